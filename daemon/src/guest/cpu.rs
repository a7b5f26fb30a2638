//! The processor time of a guest.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Measures how long a guest's future is being polled, which is when it computes rather than waits, or works
/// on another thread. Time in which it does both counts once.
#[derive(Debug, Default)]
pub(crate) struct CpuClock(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    used: Duration,
    n_spans: usize,
    running_since: Option<Instant>, // while there are spans
}

impl CpuClock {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time used, that of work in progress included.
    pub(crate) fn used(&self) -> Duration {
        let inner = self.lock();
        inner.used + inner.running_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Whether the guest computes at this moment.
    pub(crate) fn is_running(&self) -> bool {
        self.lock().n_spans > 0
    }

    /// Runs a future on this clock.
    pub(crate) async fn meter<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|cx| {
            let _span = Span::begin(self);
            future.as_mut().poll(cx)
        })
        .await
    }

    /// Runs work of the guest on this clock.
    pub(crate) fn measure<T>(&self, work: impl FnOnce() -> T) -> T {
        let _span = Span::begin(self);
        work()
    }
}

/// One poll or piece of work; ends when dropped, by a panic too.
struct Span<'a>(&'a CpuClock);

impl<'a> Span<'a> {
    fn begin(clock: &'a CpuClock) -> Self {
        let mut inner = clock.lock();
        inner.n_spans += 1;
        inner.running_since.get_or_insert_with(Instant::now);
        drop(inner);
        Self(clock)
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.n_spans -= 1;
        if inner.n_spans == 0
            && let Some(since) = inner.running_since.take()
        {
            inner.used += since.elapsed();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn waiting_is_not_computing() {
        let clock = CpuClock::default();
        let (end, ended) = oneshot::channel::<()>();
        let mut waiting = pin!(clock.meter(ended));
        assert!(waiting.as_mut().now_or_never().is_none(), "nobody has ended it");
        let used = clock.used();
        std::thread::sleep(Duration::from_millis(40));
        assert_eq!((clock.used(), clock.is_running()), (used, false), "between two polls no time is used");
        end.send(()).expect("it waits");
        waiting.await.expect("it was ended");
        let used = clock.used();
        clock.meter(async { std::thread::sleep(Duration::from_millis(30)) }).await;
        assert!(clock.used() >= used + Duration::from_millis(30), "{:?}", clock.used());
        assert!(!clock.is_running());
    }
}
