//! How long a guest may go on: so long from its start where its client says so, and so much time in which it does not wait
//! for a message. A conversation does not end because nobody says anything; how long a guest waits in all is bounded by itself.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::error::GuestEnd;
use super::limits::GuestLimits;

/// Longer than any daemon runs.
const FAR: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The end of one guest's time.
#[derive(Debug)]
pub(crate) struct Deadline {
    started: Instant,
    /// What the client allows, from the start on.
    client_ms: Option<u64>,
    busy_ms: u64,
    idle_ms: u64,
    idle: Mutex<Idle>,
    /// The guest has begun to wait, or got its message.
    changed: Notify,
}

/// How long it has waited for messages.
#[derive(Debug, Default)]
struct Idle {
    before: Duration,
    since: Option<Instant>,
}

impl Idle {
    fn waited(&self, now: Instant) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now - since)
    }
}

/// While it lives, the guest waits.
struct Waiting<'a>(&'a Deadline);

impl Deadline {
    pub(crate) fn new(started: Instant, client_ms: Option<u64>, limits: &GuestLimits) -> Self {
        let (busy_ms, idle_ms) = (limits.deadline_ms, limits.idle_ms);
        Self { started, client_ms, busy_ms, idle_ms, idle: Mutex::default(), changed: Notify::new() }
    }

    /// Waits for a message, in time that is not busy.
    pub(crate) async fn idle<T>(&self, message: impl Future<Output = T>) -> T {
        self.lock().since = Some(Instant::now());
        self.changed.notify_one();
        let _waiting = Waiting(self);
        message.await
    }

    /// How long it may still run if it does not wait.
    pub(crate) fn left(&self) -> Duration {
        let busy = self.busy_end(&self.lock(), Instant::now());
        let end = self.client_end().map_or(busy, |client| client.min(busy));
        end.saturating_duration_since(Instant::now())
    }

    /// The time that it did not wait, and the time that it waited.
    pub(crate) fn spent(&self) -> (Duration, Duration) {
        let (idle, now) = (self.lock(), Instant::now());
        let waited = idle.waited(now);
        (now.saturating_duration_since(self.started).saturating_sub(waited), waited)
    }

    /// Waits until its time is over; how it ends then.
    pub(crate) async fn over(&self) -> GuestEnd {
        loop {
            let (at, end) = self.next_end();
            if at <= Instant::now() {
                return end;
            }
            tokio::select! {
                () = tokio::time::sleep_until(at.into()) => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// When its time is over if it goes on with what it does now.
    fn next_end(&self) -> (Instant, GuestEnd) {
        let idle = self.lock();
        let own = match idle.since {
            Some(since) => {
                let left = Duration::from_millis(self.idle_ms).saturating_sub(idle.before);
                (later(since, left), GuestEnd::IdleExceeded { limit_ms: self.idle_ms })
            }
            None => {
                let end = GuestEnd::DeadlineExceeded { limit_ms: self.busy_ms };
                (self.busy_end(&idle, Instant::now()), end)
            }
        };
        match (self.client_end(), self.client_ms) {
            (Some(at), Some(limit_ms)) if at <= own.0 => (at, GuestEnd::DeadlineExceeded { limit_ms }),
            _ => own,
        }
    }

    fn busy_end(&self, idle: &Idle, now: Instant) -> Instant {
        later(self.started, Duration::from_millis(self.busy_ms).saturating_add(idle.waited(now)))
    }

    fn client_end(&self) -> Option<Instant> {
        Some(later(self.started, Duration::from_millis(self.client_ms?)))
    }

    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// So much later, or as late as a clock can tell.
fn later(at: Instant, by: Duration) -> Instant {
    at.checked_add(by).unwrap_or_else(|| at + FAR)
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut idle = self.0.lock();
        if let Some(since) = idle.since.take() {
            idle.before += since.elapsed();
        }
        drop(idle);
        self.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deadline(client_ms: Option<u64>, busy_ms: u64, idle_ms: u64) -> Deadline {
        let limits = GuestLimits { deadline_ms: busy_ms, idle_ms, ..GuestLimits::default() };
        Deadline::new(Instant::now(), client_ms, &limits)
    }

    /// Waits so long for a message that does not come, and goes on then.
    async fn waits(deadline: &Deadline, ms: u64) {
        deadline.idle(tokio::time::sleep(Duration::from_millis(ms))).await;
    }

    #[tokio::test]
    async fn waiting_for_a_message_takes_no_time_of_its_own() {
        let deadline = deadline(None, 100, 60_000);
        let began = Instant::now();
        let end = tokio::select! {
            end = deadline.over() => end,
            () = async {
                waits(&deadline, 300).await;
                tokio::time::sleep(Duration::from_secs(60)).await;
            } => panic!("it goes on"),
        };
        assert_eq!(end, GuestEnd::DeadlineExceeded { limit_ms: 100 });
        assert!(began.elapsed() >= Duration::from_millis(380), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn all_waits_together_have_a_bound() {
        let deadline = deadline(None, 60_000, 120);
        let waiting = async {
            loop {
                waits(&deadline, 50).await;
            }
        };
        let end = tokio::select! { end = deadline.over() => end, () = waiting => unreachable!("it waits for ever") };
        assert_eq!(end, GuestEnd::IdleExceeded { limit_ms: 120 });
    }

    #[tokio::test]
    async fn what_the_client_allows_counts_by_the_clock() {
        let deadline = deadline(Some(80), 60_000, 60_000);
        assert!(deadline.left() <= Duration::from_millis(80));
        let end = tokio::select! {
            end = deadline.over() => end,
            () = waits(&deadline, 60_000) => panic!("it is ended before"),
        };
        assert_eq!(end, GuestEnd::DeadlineExceeded { limit_ms: 80 });
        for endless in
            [self::deadline(Some(u64::MAX), 1_000, 1_000), self::deadline(None, u64::MAX, u64::MAX)]
        {
            assert!(endless.left() > Duration::from_millis(500));
            waits(&endless, 1).await;
        }
    }
}
