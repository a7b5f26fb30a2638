//! See `trellis_oracles::operations`.
#![no_main]

libfuzzer_sys::fuzz_target!(init: trellis_oracles::prepare(), |input: &[u8]| {
    trellis_oracles::operations::check(input);
});
