//! A card that models share: device, compiler, one stream for all steps, memory for one step at a time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::{Buffer, Compiler, CudaError, Gpu, Slice, Stream, probe};

/// What NVIDIA recommends for cuBLASLt from sm_90 on.
const BLAS_WORKSPACE_BYTES: usize = 32 << 20;

/// An open card. Cheap to clone; models that share one use it one after the other.
#[derive(Clone, Debug)]
pub struct Card(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    compiler: Compiler,
    cache_dir: Option<PathBuf>,
    /// All steps of all models go through it, so that they never overlap and one memory serves them all.
    stream: Mutex<Stream>,
    blas_workspace: Buffer,
    /// Whether the step put into it last is only half there.
    is_held: AtomicBool,
    /// The largest memory for steps so far; the models that use it hold it.
    step_memory: Mutex<Weak<Buffer>>,
}

impl Card {
    /// Opens a device. Compiled kernels and timings of matrix products are kept in `cache_dir`.
    ///
    /// # Errors
    /// There is no driver, no such device, it is too old, or a library is missing.
    pub fn open(ordinal: usize, cache_dir: Option<&Path>) -> Result<Self, CudaError> {
        // Loads what the system's loader would not find by itself.
        let _found = probe::probe();
        let gpu = Gpu::open(ordinal)?;
        let cache_dir = cache_dir.map(Path::to_owned);
        let compiler = Compiler::new(gpu.compute_capability(), probe::include_dir(), cache_dir.clone());
        let stream = Mutex::new(gpu.stream()?);
        let blas_workspace = gpu.allocate("the workspace of matrix products", BLAS_WORKSPACE_BYTES)?;
        let step_memory = Mutex::default();
        let is_held = AtomicBool::new(false);
        Ok(Self(Arc::new(Inner { gpu, compiler, cache_dir, stream, is_held, blas_workspace, step_memory })))
    }

    /// The device.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// What compiles kernels for it.
    #[must_use]
    pub fn compiler(&self) -> &Compiler {
        &self.0.compiler
    }

    /// Where compiled kernels and timings are kept.
    #[must_use]
    pub fn cache_dir(&self) -> Option<&Path> {
        self.0.cache_dir.as_deref()
    }

    /// The stream, for as long as it takes to put one step or one group of copies into it.
    pub(crate) fn stream(&self) -> MutexGuard<'_, Stream> {
        // The driver takes a launch or a copy whole or refuses it, also where the thread that asked has panicked since.
        self.0.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the step memory as it is: no step of any model may begin before the rest of this one is in the stream. The
    /// device's engine sees to that.
    pub(crate) fn hold(&self) -> Hold {
        self.0.is_held.store(true, Ordering::Relaxed);
        Hold(self.clone())
    }

    /// Whether a step has yet to get the rest of its launches.
    pub(crate) fn is_held(&self) -> bool {
        self.0.is_held.load(Ordering::Relaxed)
    }

    /// Where matrix products may keep what they need on the way.
    pub(crate) fn blas_workspace(&self) -> Slice {
        self.0.blas_workspace.slice()
    }

    /// Memory for the activations of a step. Models share it, since their steps never overlap; one that needs more
    /// than those before it gets more, and those after it share that.
    ///
    /// # Errors
    /// There is not enough.
    pub(crate) fn step_memory(&self, n_bytes: usize) -> Result<Arc<Buffer>, CudaError> {
        let mut shared = self.0.step_memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = shared.upgrade().filter(|memory| memory.slice().n_bytes >= n_bytes) {
            return Ok(memory);
        }
        let memory = Arc::new(self.0.gpu.allocate("the activations of a step", n_bytes)?);
        *shared = Arc::downgrade(&memory);
        Ok(memory)
    }

    /// Bytes that a model's activations would take beyond what the card has for them.
    pub(crate) fn step_bytes_missing(&self, n_bytes: usize) -> usize {
        let shared = self.0.step_memory.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.upgrade().is_some_and(|memory| memory.slice().n_bytes >= n_bytes) { 0 } else { n_bytes }
    }
}

/// The step memory is kept while this is there.
#[derive(Debug)]
pub(crate) struct Hold(Card);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.0.is_held.store(false, Ordering::Relaxed);
    }
}
