//! See `trellis_oracles::safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(init: trellis_oracles::prepare(), |input: &[u8]| {
    trellis_oracles::safetensors::check(input);
});
