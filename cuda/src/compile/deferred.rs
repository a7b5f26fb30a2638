//! Kernels that few steps need: compiled behind the start of a model, and loaded when the first step needs them.

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use super::{Compiler, Module, Source};
use crate::driver::{CudaError, Gpu};

type Find<K> = dyn Fn(&Module) -> Result<K, CudaError> + Send + Sync;

/// What is found in a module once a step needs it.
pub(crate) struct Deferred<K> {
    gpu: Gpu,
    compiler: Compiler,
    source: Source,
    find: Box<Find<K>>,
    compiling: Mutex<Option<JoinHandle<()>>>,
    found: OnceLock<K>,
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

    /// Has a thread compile it, so that later it is only loaded.
    pub(crate) fn begin(&self) {
        let (compiler, source) = (self.compiler.clone(), self.source.clone());
        let compiling = thread::spawn(move || {
            // It is found again by the step that needs the kernel.
            if let Err(error) = compiler.cubin(&source) {
                tracing::warn!(%error, "a kernel that few steps need does not compile");
            }
        });
        *self.lock() = Some(compiling);
    }

    /// It; the first call waits for the compiler and loads it.
    ///
    /// # Errors
    /// It does not compile, or the driver refused it.
    pub(crate) fn get(&self) -> Result<&K, CudaError> {
        if let Some(found) = self.found.get() {
            return Ok(found);
        }
        self.wait();
        let found = (self.find)(&Module::load(&self.gpu, &self.compiler.cubin(&self.source)?)?)?;
        Ok(self.found.get_or_init(|| found))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<JoinHandle<()>>> {
        self.compiling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) {
        if let Some(thread) = self.lock().take() {
            // Its panic has been reported where it happened.
            drop(thread.join());
        }
    }
}

impl<K> Drop for Deferred<K> {
    fn drop(&mut self) {
        // The compiler's library does not like a process that ends under it.
        self.wait();
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
