//! A stream that only reads: how fast the device's memory is.

use super::common::{expect, expect_i32};
use crate::driver::params;
use crate::{CudaError, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// The kernel's source.
#[must_use]
pub fn source() -> Source {
    Source::new("stream.cu", include_str!("stream.cu")).with("N_THREADS", N_THREADS)
}

const N_THREADS: u32 = 512;
/// Blocks that a multiprocessor holds at once: 2,048 threads.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

/// As in `stream.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct StreamReadParams {
    words: Pointer,
    out: Pointer,
    n: u64,
}
params!(StreamReadParams, 24);

/// Reads memory and keeps next to nothing of it; see `stream.cu`.
#[derive(Clone, Debug)]
pub struct StreamRead {
    kernel: Kernel<StreamReadParams>,
    n_blocks: usize,
}

impl StreamRead {
    /// Finds the kernel in the module of [`source`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, n_multiprocessors: usize) -> Result<Self, CudaError> {
        let n_blocks = BLOCKS_PER_MULTIPROCESSOR * n_multiprocessors;
        Ok(Self { kernel: module.kernel("stream_read")?, n_blocks })
    }

    /// Words of the result.
    #[must_use]
    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Reads the memory once. The words of `out` together are the xor of all words read.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// The memory is not a multiple of 16 bytes, or `out` is too short.
    pub fn run(
        &self,
        stream: &Stream,
        memory: Slice,
        out: Slice, // u32 [n_blocks]
    ) -> Result<(), CudaError> {
        assert!(memory.n_bytes.is_multiple_of(16), "{} bytes", memory.n_bytes);
        expect("memory", memory, memory.n_bytes, 1);
        expect_i32("out", out, self.n_blocks);
        let params =
            StreamReadParams { words: memory.into(), out: out.into(), n: memory.n_bytes as u64 / 16 };
        let launch = Launch { grid: (self.n_blocks as u32, 1, 1), block: (N_THREADS, 1, 1), shared_bytes: 0 };
        // SAFETY: lengths were checked above.
        unsafe { launch.run(stream, &self.kernel, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::{assert_compiles, poisoned};
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        assert_compiles(source());
    }

    /// Exact: xor has no rounding. The last length takes several turns of the loop of eight loads.
    #[test]
    fn reads_every_word_once() {
        let Some(test) = gpu() else { return };
        let read = StreamRead::new(&test.module(source()), test.gpu.n_multiprocessors()).expect("the kernel");
        let mut random = Random(31);
        for n_words in [0, 4, 4 * 511, 4 * 1_000_003, 4 * 20_000_033] {
            let words: Vec<u32> = (0..n_words).map(|_| random.next() as u32).collect();
            let memory = poisoned(&test, 4 * n_words.max(4));
            memory.slice().upload(&test.stream, &words).expect("a copy");
            let out = poisoned(&test, 4 * read.n_blocks());
            read.run(&test.stream, memory.slice().part(0, 4 * n_words), out.slice()).expect("a launch");
            let mut got = vec![0u32; read.n_blocks()];
            out.slice().download(&test.stream, &mut got).expect("a copy");
            let xor = |words: &[u32]| words.iter().fold(0, |sum, word| sum ^ word);
            assert_eq!(xor(&got), xor(&words), "{n_words} words");
        }
    }
}
