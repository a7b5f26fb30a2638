//! What the log is told of connections that end badly or cannot begin. Clients can bring that about as fast as they like, and
//! are not to fill it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::listener::{BindError, Place};
use crate::session::{Actor, SessionError};

/// Of so long a time, one is told.
const PAUSE: Duration = Duration::from_secs(60);

/// Complaints about clients of one daemon.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    ended: Mutex<Told>,
    not_accepted: Mutex<Told>,
    /// Whether the last that was told of accepting is that it does not work.
    is_not_accepting: AtomicBool,
    /// Whether the last that was told of the socket's file is that it is not to be had.
    is_displaced: AtomicBool,
}

#[derive(Debug, Default)]
struct Told {
    last: Option<Instant>,
    n_untold: u64,
}

impl Told {
    /// Whether to tell one, and then how many were not told since the last.
    fn tell(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < PAUSE) {
            self.n_untold += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.n_untold))
    }
}

fn tell(told: &Mutex<Told>) -> Option<u64> {
    told.lock().unwrap_or_else(PoisonError::into_inner).tell(Instant::now())
}

impl Complaints {
    /// The system gives a connection that waits, or does not. Each change is told, but not more often than other complaints.
    pub(super) fn note_accepted(&self, error: Option<&io::Error>) {
        match error {
            Some(error) => {
                if !self.is_not_accepting.load(Ordering::Relaxed)
                    && let Some(n_untold) = tell(&self.not_accepted)
                {
                    self.is_not_accepting.store(true, Ordering::Relaxed);
                    tracing::warn!(%error, n_untold, "cannot accept a connection");
                }
            }
            None => {
                if self.is_not_accepting.swap(false, Ordering::Relaxed) {
                    tracing::info!("connections are accepted again");
                }
            }
        }
    }

    /// What became of the socket's file.
    pub(super) fn note_place(&self, place: &Result<Place, BindError>) {
        match place {
            Ok(Place::Kept) => {
                if self.is_displaced.swap(false, Ordering::Relaxed) {
                    tracing::info!("the socket is in its place again");
                }
            }
            Ok(Place::Restored) => {
                self.is_displaced.store(false, Ordering::Relaxed);
                tracing::warn!("the socket's file was removed; it is there again");
            }
            Err(error) => {
                if !self.is_displaced.swap(true, Ordering::Relaxed) {
                    tracing::error!(%error, "the socket's file was removed, and clients cannot reach this daemon");
                }
            }
        }
    }

    /// A connection has ended so.
    pub(super) fn note_ended(&self, actor: Actor, pid: Option<i32>, error: &SessionError) {
        // A client may leave in the middle of a frame.
        let told = match error.is_departure() {
            true => None,
            false => tell(&self.ended),
        };
        match told {
            Some(n_untold) => {
                tracing::warn!(uid = actor.uid, pid, %error, n_untold, "a session was ended for what its client did");
            }
            None => tracing::debug!(uid = actor.uid, pid, %error, "a session has ended early"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_one_is_told_and_the_others_are_counted() {
        let (mut told, begin) = (Told::default(), Instant::now());
        let times_s = [0, 1, 2, 59, 60, 61, 200];
        let seen = times_s.map(|s| told.tell(begin + Duration::from_secs(s)));
        assert_eq!(seen, [Some(0), None, None, None, Some(3), None, Some(1)]);
    }
}
