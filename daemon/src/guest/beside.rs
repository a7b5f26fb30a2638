//! Long work beside the threads that guests and sockets share.

use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;

use tokio::sync::Semaphore;

use super::cpu::CpuClock;
use crate::tasks::blocking;

/// Runs long work of guests on threads of its own, as many at once as there are processors.
#[derive(Clone, Debug)]
pub(crate) struct Beside {
    slots: Arc<Semaphore>,
}

impl Beside {
    pub(crate) fn new() -> Self {
        let n_slots = available_parallelism().map_or(1, NonZero::get);
        Self { slots: Arc::new(Semaphore::new(n_slots)) }
    }

    /// Runs work on another thread; its time counts on the clock, the time in the queue does not. Work that
    /// waits for its turn is forgotten when the future is dropped.
    ///
    /// # Panics
    /// The work does.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        clock: &Arc<CpuClock>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let slot = self.slots.clone().acquire_owned().await.expect("the semaphore is never closed");
        let clock = clock.clone();
        blocking(move || {
            let _slot = slot;
            clock.measure(work)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn long_work_blocks_nobody_and_is_counted() {
        let (beside, clock) = (Beside::new(), Arc::new(CpuClock::default()));
        let (begun, has_begun) = oneshot::channel();
        let (looked, have_looked) = mpsc::channel();
        let work = beside.run(&clock, move || {
            begun.send(()).expect("it is waited for");
            have_looked.recv().expect("they look");
            std::thread::sleep(Duration::from_millis(50));
            7
        });
        let others = async {
            has_begun.await.expect("it begins");
            assert!(clock.is_running(), "this thread was free while the work went on");
            looked.send(()).expect("it waits");
        };
        let (result, ()) = tokio::join!(clock.meter(work), others);
        assert_eq!(result, 7);
        assert!(clock.used() >= Duration::from_millis(50), "{:?}", clock.used());
        assert!(!clock.is_running());
    }
}
