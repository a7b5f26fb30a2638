//! See `trellis_oracles::chat`.
#![no_main]

libfuzzer_sys::fuzz_target!(init: trellis_oracles::prepare(), |input: &[u8]| {
    trellis_oracles::chat::check(input);
});
