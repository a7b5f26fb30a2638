//! A device by itself, for tests of kernels and for fuzzers.

use std::path::PathBuf;

use crate::{Buffer, Compiler, Gpu, Module, Plain, Slice, Source, Stream};

/// A device and a stream on it, without an engine.
pub(crate) struct TestGpu {
    pub(crate) gpu: Gpu,
    pub(crate) stream: Stream,
}

impl TestGpu {
    /// With a stream of its own.
    pub(crate) fn on(gpu: Gpu) -> Self {
        let stream = gpu.stream().expect("a stream");
        Self { gpu, stream }
    }

    /// A compiler that keeps nothing.
    pub(crate) fn compiler(&self) -> Compiler {
        Compiler::new(self.gpu.compute_capability(), include_dir(), None)
    }

    /// Compiles and loads a source.
    pub(crate) fn module(&self, source: Source) -> Module {
        let cubin = self.compiler().cubin(&source).unwrap_or_else(|error| panic!("{error}"));
        Module::load(&self.gpu, &cubin).expect("the module loads")
    }
}

/// Where `cuda_fp16.h` is: a toolkit's usual place, or what `CUDA_PATH` says.
pub(crate) fn include_dir() -> Option<PathBuf> {
    let named = std::env::var_os("CUDA_PATH").map(|path| PathBuf::from(path).join("include"));
    let usual = PathBuf::from("/usr/local/cuda/include");
    named.into_iter().chain([usual]).find(|dir| dir.join("cuda_fp16.h").is_file())
}

pub(crate) fn upload<T: Plain>(test: &TestGpu, values: &[T]) -> Buffer {
    let buffer = test.gpu.allocate("a test", size_of_val(values)).expect("device memory");
    buffer.slice().upload(&test.stream, values).expect("an upload");
    buffer
}

/// Memory of bytes 0xff: NaN in every type.
pub(crate) fn poisoned(test: &TestGpu, n_bytes: usize) -> Buffer {
    let buffer = test.gpu.allocate("a test", n_bytes).expect("device memory");
    buffer.slice().fill(&test.stream, 0xff).expect("a fill");
    buffer
}

pub(crate) fn download<T: Plain>(test: &TestGpu, slice: Slice, n: usize, filler: T) -> Vec<T> {
    let mut values = vec![filler; n];
    slice.download(&test.stream, &mut values).expect("a download");
    values
}
