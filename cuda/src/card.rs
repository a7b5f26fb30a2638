//! A card that models share: device, compiler, one stream for all steps, memory for one step at a time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::blas::{self, Blas};
use crate::kept::KeptRows;
use crate::memory::Reserved;
use crate::ops::program::ProgramKernel;
use crate::ops::program_loading::ProgramLoading;
use crate::{Buffer, Compiler, CudaError, Event, Gpu, Slice, Stream, Timing, probe};

/// What NVIDIA recommends for cuBLASLt from sm_90 on.
const BLAS_WORKSPACE_BYTES: usize = 32 << 20;

/// How long after a step was put into the stream others are taken to go on: longer than any step takes.
const COMPUTES_FOR: Duration = Duration::from_millis(300);

/// An open card. Cheap to clone; models that share one compute one after the other, and load beside one another.
#[derive(Clone, Debug)]
pub struct Card(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    compiler: Compiler,
    cache_dir: Option<PathBuf>,
    /// All steps of all models go through it, so that they never overlap and one memory serves them all.
    stream: Mutex<Stream>,
    /// Of all matrix products, once there was one.
    blas: Mutex<Option<blas::Handle>>,
    /// Of the products in that stream. What is computed elsewhere has a workspace of its own.
    blas_workspace: Buffer,
    /// The one kernel that no model needs.
    programs: ProgramLoading,
    /// Whether the step put into it last is only half there.
    is_held: AtomicBool,
    /// Memory for steps; the models that use one hold it.
    step_memory: Mutex<Vec<Weak<Reserved>>>,
    /// Rows of logits that models leave for each other; the models that use them hold them.
    kept_rows: Mutex<Vec<Weak<KeptRows>>>,
    opened: Instant,
    /// When a step was last put into the stream, in milliseconds since it was opened and one more; 0 before the first.
    last_step_ms: AtomicU64,
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
        Ok(Self(Arc::new(Inner {
            gpu,
            compiler,
            cache_dir,
            stream,
            programs: ProgramLoading::default(),
            is_held: AtomicBool::new(false),
            blas: Mutex::default(),
            blas_workspace,
            step_memory: Mutex::default(),
            kept_rows: Mutex::default(),
            opened: Instant::now(),
            last_step_ms: AtomicU64::new(0),
        })))
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

    /// What runs logit programs, if it is ready; it is made so from the first call on.
    pub(crate) fn programs(&self) -> Option<&ProgramKernel> {
        self.0.programs.get(&self.0.gpu, &self.0.compiler)
    }

    /// Has it made ready, and waits for that: what is measured then, or tested, is the card's. Where it cannot be made ready,
    /// the host goes on to run programs.
    pub fn wait_for_programs(&self) {
        self.programs();
        self.0.programs.wait();
    }

    /// Begins to make it ready if that takes no time: its kernels were compiled before.
    pub(crate) fn load_kept_programs(&self) {
        if ProgramLoading::is_kept(&self.0.gpu, &self.0.compiler) {
            self.programs();
        }
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

    /// Waits for all that is in the stream now, which is not kept from others meanwhile.
    ///
    /// # Errors
    /// Something in it failed.
    pub(crate) fn wait_for_steps(&self) -> Result<(), CudaError> {
        let passed = Event::new(self.gpu(), Timing::Off)?;
        passed.record(&self.stream())?;
        passed.synchronize()
    }

    /// Notes that a step was put into the stream.
    pub(crate) fn note_step(&self) {
        let ms = self.0.opened.elapsed().as_millis() as u64 + 1;
        self.0.last_step_ms.store(ms, Ordering::Relaxed);
    }

    /// Whether a model computes, or has until just now: what is loaded or timed meanwhile is in its way, and it in theirs.
    pub(crate) fn is_computing(&self) -> bool {
        let last_ms = self.0.last_step_ms.load(Ordering::Relaxed);
        let now_ms = self.0.opened.elapsed().as_millis() as u64 + 1;
        last_ms > 0 && now_ms < last_ms + COMPUTES_FOR.as_millis() as u64
    }

    /// Matrix products in the stream.
    ///
    /// # Errors
    /// The library is missing, newer than the driver, or refused to start.
    pub(crate) fn blas(&self) -> Result<Blas, CudaError> {
        let handle = {
            let mut shared = self.0.blas.lock().unwrap_or_else(PoisonError::into_inner);
            match *shared {
                Some(handle) => handle,
                None => *shared.insert(blas::Handle::new(self.gpu())?),
            }
        };
        Blas::new(self.gpu(), handle, self.blas_workspace(), self.0.cache_dir.clone())
    }

    /// Where matrix products in the stream may keep what they need on the way.
    pub(crate) fn blas_workspace(&self) -> Slice {
        self.0.blas_workspace.slice()
    }

    /// Memory for the activations of a step. Models share it, since their steps never overlap: the smallest that is large
    /// enough, or a new one. A model holds the one that it was given, so that no other's coming or going moves it.
    ///
    /// # Errors
    /// There is not enough.
    pub(crate) fn step_memory(&self, n_bytes: usize) -> Result<Arc<Reserved>, CudaError> {
        let mut shared = self.0.step_memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = smallest(&shared, n_bytes) {
            return Ok(memory);
        }
        let memory = Arc::new(self.0.gpu.take("the activations of a step", self.0.gpu.taken_bytes(n_bytes))?);
        shared.retain(|other| other.strong_count() > 0);
        shared.push(Arc::downgrade(&memory));
        Ok(memory)
    }

    /// Bytes that a model's activations would take beyond what the card has for them.
    pub(crate) fn step_bytes_missing(&self, n_bytes: usize) -> usize {
        let shared = self.0.step_memory.lock().unwrap_or_else(PoisonError::into_inner);
        if smallest(&shared, n_bytes).is_some() { 0 } else { self.0.gpu.taken_bytes(n_bytes) }
    }

    /// Places for rows of logits that stay here, shared by all models of such a vocabulary.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(crate) fn kept_rows(&self, vocab_size: usize) -> Result<Arc<KeptRows>, CudaError> {
        let mut shared = self.0.kept_rows.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = as_long(&shared, vocab_size) {
            return Ok(rows);
        }
        let rows = Arc::new(KeptRows::new(self.gpu(), vocab_size)?);
        shared.retain(|other| other.strong_count() > 0);
        shared.push(Arc::downgrade(&rows));
        Ok(rows)
    }

    /// Bytes that a model's places would take beyond what the card has for them.
    pub(crate) fn kept_bytes_missing(&self, vocab_size: usize) -> usize {
        let shared = self.0.kept_rows.lock().unwrap_or_else(PoisonError::into_inner);
        if as_long(&shared, vocab_size).is_some() { 0 } else { KeptRows::n_bytes(vocab_size) }
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

/// The places of rows of this length, if a model holds them.
fn as_long(shared: &[Weak<KeptRows>], vocab_size: usize) -> Option<Arc<KeptRows>> {
    shared.iter().filter_map(Weak::upgrade).find(|rows| rows.vocab_size() == vocab_size)
}

/// The shortest that is long enough, of those that a model holds.
fn smallest(shared: &[Weak<Reserved>], n_bytes: usize) -> Option<Arc<Reserved>> {
    let held = shared.iter().filter_map(Weak::upgrade);
    held.filter(|memory| memory.slice().n_bytes >= n_bytes).min_by_key(|memory| memory.slice().n_bytes)
}
