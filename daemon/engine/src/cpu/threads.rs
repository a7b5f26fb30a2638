//! On which threads a step runs.

use std::thread::{self, ThreadId};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Steps of up to this many tokens run on the calling thread: their products are over before another thread has
/// woken, and the guests need a core too.
const N_SERIAL_TOKENS_MAX: usize = 1;

/// All cores for long steps, the calling thread alone for short ones.
pub(super) struct Threads {
    parallel: ThreadPool,
    /// A pool of one thread, the one that called last. A pool of another thread would cost two wake-ups for each
    /// step.
    serial: Option<(ThreadId, ThreadPool)>,
}

impl Threads {
    pub(super) fn new(n_threads: usize) -> Result<Self, ThreadPoolBuildError> {
        let name = |thread_idx| format!("cpu-backend-{thread_idx}");
        let parallel = ThreadPoolBuilder::new().num_threads(n_threads).thread_name(name).build()?;
        Ok(Self { parallel, serial: None })
    }

    /// Runs a step of so many tokens.
    pub(super) fn run<T: Send>(&mut self, n_tokens: usize, step: impl FnOnce() -> T + Send) -> T {
        if n_tokens > N_SERIAL_TOKENS_MAX {
            return self.parallel.install(step);
        }
        let caller = thread::current().id();
        if self.serial.as_ref().is_none_or(|(owner, _)| *owner != caller) {
            let pool = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
            // A thread that belongs to a pool already runs the step in that one.
            self.serial = pool.ok().map(|pool| (caller, pool));
        }
        match &self.serial {
            Some((_, pool)) => pool.install(step),
            None => step(),
        }
    }
}
