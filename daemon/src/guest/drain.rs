//! The end of the daemon as guests hear of it: when those that are left are ended, from the moment when that is known.

use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Tells guests that the daemon is on its way out.
#[derive(Debug)]
pub(crate) struct Drain(watch::Sender<Option<Instant>>);

/// What one guest sees of it.
#[derive(Clone, Debug)]
pub(crate) struct DrainWatch(watch::Receiver<Option<Instant>>);

impl Default for Drain {
    fn default() -> Self {
        Self(watch::Sender::new(None))
    }
}

impl Drain {
    /// The daemon goes on until then. It has begun to leave once: a later word changes nothing.
    pub(crate) fn begin(&self, until: Instant) {
        self.0.send_if_modified(|known| {
            let is_first = known.is_none();
            known.get_or_insert(until);
            is_first
        });
    }

    /// For a guest.
    pub(crate) fn watch(&self) -> DrainWatch {
        DrainWatch(self.0.subscribe())
    }
}

impl DrainWatch {
    /// How long the daemon goes on, once it is on its way out.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.0.borrow().map(|until| until.saturating_duration_since(Instant::now()))
    }

    /// As [`Self::left`], in whole milliseconds.
    pub(crate) fn left_ms(&self) -> Option<u64> {
        self.left().map(|left| left.as_millis() as u64)
    }

    /// Waits until the daemon is on its way out.
    pub(crate) async fn begun(&mut self) {
        if self.0.wait_for(Option::is_some).await.is_err() {
            // Whoever could tell is gone, and with it all guests, which end by that.
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whoever_waits_hears_of_it_and_the_first_word_holds() {
        let drain = Drain::default();
        let (mut early, until) = (drain.watch(), Instant::now() + Duration::from_secs(100));
        assert_eq!(early.left(), None);
        assert!(tokio::time::timeout(Duration::from_millis(20), early.begun()).await.is_err(), "it stays");
        drain.begin(until);
        drain.begin(until + Duration::from_secs(100));
        early.begun().await;
        for watch in [early, drain.watch()] {
            let left = watch.left().expect("it leaves");
            assert!(Duration::from_secs(50) < left && left <= Duration::from_secs(100), "{left:?}");
        }
        let over = Drain::default();
        over.begin(Instant::now());
        assert_eq!(over.watch().left(), Some(Duration::ZERO), "and no less");
    }
}
