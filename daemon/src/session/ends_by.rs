//! By when a daemon is gone that was told to end.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

/// After the time of a drain, what is left has so long: guests to end that are told to, clients to take what is left for them, what
/// was saved to come onto disk.
const END_TIME: Duration = Duration::from_millis(900);

/// Of that, so long for all that comes after the ends of guests.
const LAST_TIME: Duration = Duration::from_millis(400);

/// The moment after which nothing of a daemon is waited for any more, once it drains. A drain that waits for nothing sets none: then
/// each thing has the time of its own.
#[derive(Debug, Default)]
pub(crate) struct EndsBy(OnceLock<Instant>);

impl EndsBy {
    /// The daemon drains for so long from now on; until when. The first word holds.
    pub(super) fn note_drain(&self, time: Duration) -> Instant {
        let now = Instant::now();
        // Longer than any daemon runs, where that is no moment.
        let until = now.checked_add(time).unwrap_or_else(|| now + Duration::from_secs(u64::from(u32::MAX)));
        if !time.is_zero() {
            let _ = self.0.set(until + END_TIME);
        }
        until
    }

    /// How long the drain goes on, while it does.
    pub(crate) fn drain_left(&self) -> Option<Duration> {
        let left = self.0.get()?.saturating_duration_since(Instant::now());
        left.checked_sub(END_TIME)
    }

    /// The end of something that may take so long.
    pub(crate) fn at_most(&self, time: Duration) -> Instant {
        let own = Instant::now() + time;
        self.0.get().map_or(own, |by| own.min(*by))
    }

    /// The end of something that may take so long, after which there is more to come.
    pub(super) fn before_the_last(&self, time: Duration) -> Instant {
        let own = Instant::now() + time;
        self.0.get().map_or(own, |by| own.min(*by - LAST_TIME))
    }

    /// Waits for something, but not beyond that moment where there is one; whether it has come.
    pub(crate) async fn wait(&self, what: impl Future<Output = ()>) -> bool {
        match self.0.get() {
            Some(by) => timeout_at(*by, what).await.is_ok(),
            None => {
                what.await;
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3_600);

    #[tokio::test]
    async fn all_is_over_soon_after_the_drain() {
        let (ends_by, begun) = (EndsBy::default(), Instant::now());
        assert!(ends_by.at_most(LONG) >= begun + LONG, "it does not drain");
        let drain = Duration::from_millis(100);
        let until = ends_by.note_drain(drain);
        assert!(until >= begun + drain);
        ends_by.note_drain(LONG);
        assert!(ends_by.drain_left().is_none_or(|left| left <= drain), "the first word holds");
        let by = until + END_TIME;
        assert_eq!((ends_by.at_most(LONG), ends_by.before_the_last(LONG)), (by, by - LAST_TIME));
        assert!(!ends_by.wait(std::future::pending()).await);
        assert!(Instant::now() >= by);
        assert_eq!(ends_by.drain_left(), None);
        let without_time = EndsBy::default();
        without_time.note_drain(Duration::ZERO);
        assert!(without_time.at_most(LONG) > by + drain);
        assert!(without_time.wait(async {}).await);
        EndsBy::default().note_drain(Duration::MAX);
    }
}
