//! Steps of a card beside those of the CPU.

use trellis_engine::cpu::CpuBackend;

use super::tests::assert_same;
use super::*;

/// Takes a step on both and compares what comes of it. Two tokens may stand as close as rounding: returns how many draws were
/// of another token.
pub(super) fn compare(
    device: &mut CudaBackend,
    host: &mut CpuBackend,
    batch: Batch<'_>,
    about: &str,
) -> usize {
    let found = device.forward(&batch).expect("a step");
    let expected = host.forward(&batch).expect("a step");
    assert_eq!(found.len(), expected.len());
    let mut n_other_draws = 0;
    for (output_idx, (found, expected)) in found.iter().zip(&expected).enumerate() {
        match (found, expected) {
            (Output::Sampled(a), Output::Sampled(b)) if a.token != b.token => n_other_draws += 1,
            _ => assert_same(found, expected, &format!("output {output_idx} of {about}")),
        }
    }
    n_other_draws
}
