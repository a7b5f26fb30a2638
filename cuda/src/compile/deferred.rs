//! Kernels that few steps need: compiled some time after the start of a model, and loaded when the first step needs them.

use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{Compiler, Module, Source};
use crate::driver::{CudaError, Gpu};

/// After the start: a process that ends before does not wait for a compiler.
const AFTER: Duration = Duration::from_secs(2);

type Find<K> = dyn Fn(&Module) -> Result<K, CudaError> + Send + Sync;

/// What is found in a module once a step needs it.
pub(crate) struct Deferred<K> {
    gpu: Gpu,
    compiler: Compiler,
    source: Source,
    find: Box<Find<K>>,
    compiling: Mutex<Option<Compiling>>,
    found: OnceLock<K>,
}

struct Compiling {
    thread: JoinHandle<()>,
    /// The thread ends when this is dropped before it has begun.
    waiting: Sender<()>,
}

impl<K> Deferred<K> {
    /// What `find` finds in the module of a source. Nothing happens before [`Self::begin`], or before it is needed.
    pub(crate) fn new(
        gpu: &Gpu,
        compiler: &Compiler,
        source: Source,
        find: impl Fn(&Module) -> Result<K, CudaError> + Send + Sync + 'static,
    ) -> Self {
        let (gpu, compiler, find) = (gpu.clone(), compiler.clone(), Box::new(find));
        Self { gpu, compiler, source, find, compiling: Mutex::default(), found: OnceLock::new() }
    }

    /// Has a thread compile it after a while, so that later it is only loaded.
    pub(crate) fn begin(&self) {
        let (compiler, source) = (self.compiler.clone(), self.source.clone());
        let (waiting, given_up) = mpsc::channel();
        let thread = thread::spawn(move || {
            if given_up.recv_timeout(AFTER) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            // It is found again by the step that needs the kernel.
            if let Err(error) = compiler.cubin(&source) {
                tracing::warn!(%error, "a kernel that few steps need does not compile");
            }
        });
        *self.lock() = Some(Compiling { thread, waiting });
    }

    /// It; the first call compiles it, or waits for the thread that does, and loads it.
    ///
    /// # Errors
    /// It does not compile, or the driver refused it.
    pub(crate) fn get(&self) -> Result<&K, CudaError> {
        if let Some(found) = self.found.get() {
            return Ok(found);
        }
        self.give_up();
        let found = (self.find)(&Module::load(&self.gpu, &self.compiler.cubin(&self.source)?)?)?;
        Ok(self.found.get_or_init(|| found))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Compiling>> {
        self.compiling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the thread, at once if the compiler has not begun.
    fn give_up(&self) {
        if let Some(Compiling { thread, waiting }) = self.lock().take() {
            drop(waiting);
            // Its panic has been reported where it happened.
            drop(thread.join());
        }
    }
}

impl<K> Drop for Deferred<K> {
    fn drop(&mut self) {
        // The compiler's library does not like a process that ends under it.
        self.give_up();
    }
}

impl<K> fmt::Debug for Deferred<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred").field("is_found", &self.found.get().is_some()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::steer::source;
    use crate::testing::gpu;
    use crate::{Kernel, ops};

    #[test]
    fn it_is_found_whether_it_was_compiled_before_or_not() {
        let Some(test) = gpu() else { return };
        for has_begun in [true, false] {
            let find = |module: &Module| module.kernel::<ops::steer::SteerParams>("steer");
            let deferred = Deferred::new(&test.gpu, &test.compiler(), source(), find);
            if has_begun {
                deferred.begin();
            }
            let first: *const Kernel<_> = deferred.get().expect("it is found");
            assert!(std::ptr::eq(first, deferred.get().expect("it is there")), "it is found once");
        }
    }

    #[test]
    fn what_is_not_there_is_an_error_each_time() {
        let Some(test) = gpu() else { return };
        let find = |module: &Module| module.kernel::<ops::steer::SteerParams>("steers");
        let deferred = Deferred::new(&test.gpu, &test.compiler(), source(), find);
        deferred.begin();
        assert!(deferred.get().is_err() && deferred.get().is_err());
    }
}
