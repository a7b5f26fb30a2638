//! On which threads a step runs.

use std::thread::{self, ThreadId};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Steps of up to this many tokens run on the calling thread: their products are over before another thread has
/// woken, and the guests need a core too.
const N_SERIAL_TOKENS_MAX: usize = 1;

/// By how much threads that compute go before others of the machine, in the system's steps of niceness: all users wait for
/// them, and what guests and clients do at the same time would take the processor from them.
#[cfg(target_os = "linux")]
const NICENESS: i32 = -10;

/// All cores for long steps, the calling thread alone for short ones.
pub(super) struct Threads {
    parallel: ThreadPool,
    /// The thread that called last, and a pool of it alone, if it belongs to no other. A pool of another thread would cost two
    /// wake-ups for each step.
    caller: Option<(ThreadId, Option<ThreadPool>)>,
}

impl Threads {
    pub(super) fn new(n_threads: usize) -> Result<Self, ThreadPoolBuildError> {
        let parallel = ThreadPoolBuilder::new()
            .num_threads(n_threads)
            .thread_name(|thread_idx| format!("cpu-backend-{thread_idx}"))
            .start_handler(|_| go_first())
            .build()?;
        Ok(Self { parallel, caller: None })
    }

    /// Runs a step of so many tokens.
    pub(super) fn run<T: Send>(&mut self, n_tokens: usize, step: impl FnOnce() -> T + Send) -> T {
        let id = thread::current().id();
        if self.caller.as_ref().is_none_or(|(caller, _)| *caller != id) {
            go_first();
            let pool = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
            // A thread that belongs to a pool already runs the step in that one.
            self.caller = Some((id, pool.ok()));
        }
        match &self.caller {
            _ if n_tokens > N_SERIAL_TOKENS_MAX => self.parallel.install(step),
            Some((_, Some(pool))) => pool.install(step),
            _ => step(),
        }
    }
}

/// Has the calling thread go before others, where the system lets it.
fn go_first() {
    #[cfg(target_os = "linux")]
    match rustix::process::getpriority_process(None) {
        // Several models are computed on one thread.
        Ok(niceness) if niceness <= NICENESS => {}
        _ => {
            if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
                tracing::debug!(%error, "a thread that computes keeps its priority");
            }
        }
    }
}
