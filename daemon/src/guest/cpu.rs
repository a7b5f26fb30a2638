//! The processor time of a guest.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Measures how long a guest's future is being polled, which is when it computes rather than waits.
#[derive(Debug, Default)]
pub(crate) struct CpuClock(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    used: Duration,
    polled_since: Option<Instant>,
}

impl CpuClock {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time used, that of a poll in progress included.
    pub(crate) fn used(&self) -> Duration {
        let inner = self.lock();
        inner.used + inner.polled_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Whether the guest computes at this moment.
    pub(crate) fn is_running(&self) -> bool {
        self.lock().polled_since.is_some()
    }

    /// Runs a future on this clock.
    pub(crate) async fn meter<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|cx| {
            let _poll = Poll::begin(self);
            future.as_mut().poll(cx)
        })
        .await
    }
}

/// One poll; ends when dropped, by a panic too.
struct Poll<'a>(&'a CpuClock);

impl<'a> Poll<'a> {
    fn begin(clock: &'a CpuClock) -> Self {
        clock.lock().polled_since = Some(Instant::now());
        Self(clock)
    }
}

impl Drop for Poll<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        if let Some(since) = inner.polled_since.take() {
            inner.used += since.elapsed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiting_is_not_computing() {
        let clock = CpuClock::default();
        clock.meter(tokio::time::sleep(Duration::from_millis(40))).await;
        assert!(clock.used() < Duration::from_millis(20), "{:?}", clock.used());
        clock.meter(async { std::thread::sleep(Duration::from_millis(30)) }).await;
        assert!(clock.used() >= Duration::from_millis(30), "{:?}", clock.used());
        assert!(!clock.is_running());
    }
}
