//! See `trellis_oracles::components`.
#![no_main]

libfuzzer_sys::fuzz_target!(init: trellis_oracles::prepare(), |input: &[u8]| {
    trellis_oracles::components::check(input);
});
