//! Memory that the kernels of programs find as they left it: zeros.

use trellis_engine::model::ModelConfig;

use super::sizes::{StepLimits, n_plane_sets};
use crate::ops::program::planes_bytes;
use crate::ops::program_single::meetings_bytes;
use crate::{Buffer, CudaError, Gpu, Stream};

/// Zeros between steps.
#[derive(Debug)]
pub(super) struct ProgramMemory {
    /// Rows of the history, in sets.
    pub(super) planes: Buffer, // f32 [n_plane_sets, N_PLANES_MAX, vocab_size]
    pub(super) n_plane_sets: usize,
    /// Where the blocks meet that share a row.
    pub(super) meetings: Buffer, // one for each row of logits
}

impl ProgramMemory {
    /// Bytes of its parts.
    pub(super) fn n_bytes(config: &ModelConfig, limits: StepLimits) -> [usize; 2] {
        let n_plane_sets = n_plane_sets(config, limits);
        [planes_bytes(n_plane_sets, config.vocab_size), meetings_bytes(limits.n_logits_rows)]
    }

    /// Takes the memory, and fills it in a stream of the caller's.
    pub(super) fn new(
        gpu: &Gpu,
        stream: &Stream,
        config: &ModelConfig,
        limits: StepLimits,
    ) -> Result<Self, CudaError> {
        let [planes, meetings] = Self::n_bytes(config, limits);
        let planes = gpu.allocate("rows of the history", planes)?;
        let meetings = gpu.allocate("where blocks meet", meetings)?;
        planes.slice().fill(stream, 0)?;
        meetings.slice().fill(stream, 0)?;
        Ok(Self { planes, n_plane_sets: n_plane_sets(config, limits), meetings })
    }
}
