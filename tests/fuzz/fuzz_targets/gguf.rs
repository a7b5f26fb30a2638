//! See `trellis_oracles::gguf`.
#![no_main]

libfuzzer_sys::fuzz_target!(init: trellis_oracles::prepare(), |input: &[u8]| {
    trellis_oracles::gguf::check(input);
});
