//! The kernels of logit programs, made ready when the first program is put on: few daemons run one, and they take longer to
//! compile than all others. Where they are kept from before, they are loaded behind the first model.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle, ScopedJoinHandle};

use super::program::{ProgramKernel, sources};
use crate::{Compiler, CudaError, Gpu, Module};

/// The kernel, or the thread that makes it ready.
#[derive(Debug, Default)]
pub(crate) struct ProgramLoading {
    kernel: Arc<OnceLock<ProgramKernel>>,
    making: Mutex<Making>,
}

#[derive(Debug, Default)]
enum Making {
    /// It was not asked for yet.
    #[default]
    NotYet,
    UnderWay(JoinHandle<()>),
    Over,
}

impl ProgramLoading {
    /// The kernel if it is ready; the first call has it made ready. Where that fails, programs are left to the host.
    pub(crate) fn get(&self, gpu: &Gpu, compiler: &Compiler) -> Option<&ProgramKernel> {
        let ready = self.kernel.get();
        if ready.is_none() {
            let mut making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
            if let Making::NotYet = *making {
                let (gpu, compiler, kernel) = (gpu.clone(), compiler.clone(), self.kernel.clone());
                *making = Making::UnderWay(thread::spawn(move || match load(&gpu, &compiler) {
                    Ok(loaded) => drop(kernel.set(loaded)),
                    Err(error) => tracing::warn!(%error, "logit programs run on the host"),
                }));
            }
        }
        ready
    }

    /// Whether nothing has to be compiled.
    pub(crate) fn is_kept(gpu: &Gpu, compiler: &Compiler) -> bool {
        sources(gpu.compute_capability()).iter().all(|source| compiler.is_kept(source))
    }

    /// Waits until the kernel is ready, if it was asked for.
    pub(crate) fn wait(&self) {
        let mut making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*making, Making::NotYet) {
            return;
        }
        if let Making::UnderWay(thread) = std::mem::replace(&mut *making, Making::Over) {
            // Its panic has been reported where it happened.
            drop(thread.join());
        }
    }
}

impl Drop for ProgramLoading {
    fn drop(&mut self) {
        // The compiler's library does not like a process that ends under it.
        self.wait();
    }
}

fn load(gpu: &Gpu, compiler: &Compiler) -> Result<ProgramKernel, CudaError> {
    gpu.make_current()?;
    let sources = sources(gpu.compute_capability());
    let cubins: Vec<_> = thread::scope(|scope| {
        let compiling: Vec<_> = sources.iter().map(|source| scope.spawn(|| compiler.cubin(source))).collect();
        let done =
            |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        compiling.into_iter().map(done).collect()
    });
    let load = |cubin: Result<Arc<[u8]>, CudaError>| Module::load(gpu, &cubin?);
    let modules = cubins.into_iter().map(load).collect::<Result<Vec<_>, _>>()?;
    ProgramKernel::new(&modules, gpu)
}
