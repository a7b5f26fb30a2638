//! Whether the socket is kept for the program that takes this one's place, and where.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use super::Listener;

/// From when on no connections are accepted, so that they wait for the next program, and the socket in the end.
#[derive(Debug, Default)]
pub struct HandOver {
    begun: CancellationToken,
    given_up: CancellationToken,
    is_lent: AtomicBool,
    kept: Mutex<Option<Listener>>,
}

impl HandOver {
    /// Nobody is accepted any more, and the socket is kept. Not to be taken back: who waits there waits for the next program.
    pub(crate) fn begin(&self) {
        self.begun.cancel();
    }

    /// Whether it was begun.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.is_cancelled()
    }

    /// No program comes, and the socket goes with the daemon.
    pub(crate) fn give_up(&self) {
        self.given_up.cancel();
    }

    /// Whether no program comes.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.is_cancelled()
    }

    /// Waits until no program comes.
    pub(super) async fn gives_up(&self) {
        self.given_up.cancelled().await;
    }

    /// Notes whose the socket is.
    pub(super) fn note(&self, listener: &Listener) {
        self.is_lent.store(listener.is_lent(), Ordering::Relaxed);
    }

    /// Whether somebody else has made the socket, and keeps it.
    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent.load(Ordering::Relaxed)
    }

    /// Waits until it is begun.
    pub(crate) async fn begins(&self) {
        self.begun.cancelled().await;
    }

    /// Lays the socket down, once all connections have ended.
    pub(super) fn keep(&self, listener: Listener) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
    }

    /// The socket, once it was laid down.
    pub(crate) fn take(&self) -> Option<Listener> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
