//! The kernel of programs that read their row once.

use super::program_small::{N_SINGLE_ROOTS, small_text, with_small};
use crate::driver::Params;
use crate::{CudaError, Kernel, Launch, Module, Source, Stream};

const KERNEL: &str = "single_pass_programs";
const N_THREADS: usize = 256;
const SHARED_BYTES: usize = 36 << 10;
/// Blocks of a multiprocessor that run together.
const N_RESIDENT: usize = 3;
/// Blocks of a row at least: where rows are many, multiprocessors that are done with one block take the next.
const N_BLOCKS_LEAST: usize = 2;

/// Where the blocks of a row meet, as in `program.cuh`: the best of each root, and how many blocks have put theirs there.
const MEETING_BYTES: usize = 8 * N_SINGLE_ROOTS + 8;

/// Bytes of the meetings of so many rows, zeros before and after every launch.
#[must_use]
pub fn meetings_bytes(n_rows: usize) -> usize {
    n_rows * MEETING_BYTES
}

pub(super) fn source() -> Source {
    let text = small_text!("program_single.cu");
    with_small(Source::new("program_single.cu", text))
        .with("KERNEL", KERNEL)
        .with("CLUSTER", 1)
        .with("THREADS", N_THREADS)
        .with("SHARED_BYTES", SHARED_BYTES)
        .with("BLOCKS_OF_SM", N_RESIDENT)
}

/// The kernel, loaded.
#[derive(Debug)]
pub(super) struct SinglePassKernel<P> {
    kernel: Kernel<P>,
    /// Blocks that the device runs together.
    n_blocks: usize,
}

impl<P: Params> SinglePassKernel<P> {
    /// Finds the kernel in the module of [`source`].
    pub(super) fn new(module: &Module, n_multiprocessors: usize) -> Result<Self, CudaError> {
        let kernel = module.kernel(KERNEL)?;
        kernel.allow_shared_bytes(SHARED_BYTES)?;
        Ok(Self { kernel, n_blocks: N_RESIDENT * n_multiprocessors })
    }

    /// Launches it over so many rows. Which block is of which row is decided on the device, which knows how many count.
    ///
    /// # Safety
    /// As for [`Launch::run`].
    pub(super) unsafe fn run(&self, stream: &Stream, params: &P, n_rows: usize) -> Result<(), CudaError> {
        let launch = Launch {
            grid: (self.n_blocks.max(N_BLOCKS_LEAST * n_rows) as u32, 1, 1),
            block: (N_THREADS as u32, 1, 1),
            shared_bytes: SHARED_BYTES as u32,
        };
        // SAFETY: the caller's promise.
        unsafe { launch.run(stream, &self.kernel, params) }
    }
}
