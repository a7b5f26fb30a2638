//! The kernel of programs that read their row several times and neither select, nor add up rows, nor look at the history.

use super::program_small::{small_text, with_small};
use crate::driver::{N_CLUSTER_BLOCKS, Params};
use crate::{CudaError, Kernel, Launch, Module, Source, Stream};

const KERNEL: &str = "programs_of_passes";
const N_THREADS: usize = 512;
const SHARED_BYTES: usize = 80 << 10;
/// Blocks of the largest cluster.
const N_BLOCKS_MOST: usize = 16;
/// Rows of one launch. Of more, each block of the kernel for any program keeps its part of the row, so that memory is read once.
pub(super) const N_ROWS_MAX: usize = 64;

pub(super) fn source() -> Source {
    let text = small_text!("program_passes.cu");
    with_small(Source::new("program_passes.cu", text))
        .with("KERNEL", KERNEL)
        .with("CLUSTER", N_BLOCKS_MOST)
        .with("THREADS", N_THREADS)
        .with("SHARED_BYTES", SHARED_BYTES)
        .with("BLOCKS_OF_SM", 1)
}

fn launch(n_rows: usize, n_blocks: usize) -> Launch {
    Launch {
        grid: ((n_rows * n_blocks) as u32, 1, 1),
        block: (N_THREADS as u32, 1, 1),
        shared_bytes: SHARED_BYTES as u32,
    }
}

/// Blocks of each of so many rows: about as many in all as there are multiprocessors. As many of the largest clusters run at once
/// as `n_large` says; a device need not take any.
fn n_blocks(n_rows: usize, n_large: usize) -> usize {
    match n_rows {
        _ if n_rows <= n_large.min(8) => N_BLOCKS_MOST,
        ..=16 => N_CLUSTER_BLOCKS,
        17..=32 => 4,
        _ => 2,
    }
}

/// The kernel, loaded, on a device with clusters.
#[derive(Debug)]
pub(super) struct PassesKernel<P> {
    kernel: Kernel<P>,
    /// Largest clusters that run at once.
    n_large: usize,
}

impl<P: Params> PassesKernel<P> {
    /// Finds the kernel in the module of [`source`].
    pub(super) fn new(module: &Module) -> Result<Self, CudaError> {
        let kernel = module.kernel(KERNEL)?;
        kernel.allow_shared_bytes(SHARED_BYTES)?;
        let n_large = || {
            kernel.allow_large_clusters()?;
            launch(1, N_BLOCKS_MOST).n_resident_clusters(&kernel, N_BLOCKS_MOST as u32)
        };
        let n_large = n_large().unwrap_or_else(|error| {
            tracing::warn!(%error, "programs of passes run in smaller clusters");
            0
        });
        Ok(Self { kernel, n_large })
    }

    /// Launches it over so many rows, at most [`N_ROWS_MAX`].
    ///
    /// # Safety
    /// As for [`Launch::run`].
    pub(super) unsafe fn run(&self, stream: &Stream, params: &P, n_rows: usize) -> Result<(), CudaError> {
        let n_blocks = n_blocks(n_rows, self.n_large);
        // SAFETY: the caller's promise.
        unsafe { launch(n_rows, n_blocks).run_in_clusters(n_blocks as u32, stream, &self.kernel, params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_all_rows_are_about_as_many_as_multiprocessors() {
        let all = |n_large| [1, 4, 8, 9, 16, 17, 32, 33, 64].map(|n_rows| n_rows * n_blocks(n_rows, n_large));
        assert_eq!(all(8), [16, 64, 128, 72, 128, 68, 128, 66, 128]);
        assert_eq!(all(0), [8, 32, 64, 72, 128, 68, 128, 66, 128]);
        assert!(n_blocks(5, 4) <= N_CLUSTER_BLOCKS, "a fifth would wait for one of four");
    }
}
