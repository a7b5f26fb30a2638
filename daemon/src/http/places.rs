//! Places for connections: as many as the settings give to the front, of those that the daemon has descriptors for.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::ipc;
use crate::session::{Actor, Quota};

/// Whose a connection on a loopback address is until a token says it: nobody's that the system knows. They are together one user
/// more beside those of the daemon's own socket.
const UNKNOWN: Actor = Actor { uid: u32::MAX, gid: u32::MAX };

/// The places of a loopback address, in those of a user: nobody is known there before its first request.
const USERS_OF_ALL: usize = 4;

/// The places of the front.
#[derive(Debug)]
pub(super) struct Places {
    /// Those of each user whom the kernel names.
    of_users: Arc<Quota>,
    /// Those of all others together.
    of_unknown: Arc<Semaphore>,
    /// Those of the daemon, its own socket included.
    of_daemon: Arc<ipc::Places>,
}

/// Held for as long as a connection lasts.
pub(super) struct Place {
    _of_front: Box<dyn Send>,
    _of_daemon: ipc::Place,
}

impl Places {
    /// So many for each user, and [`USERS_OF_ALL`] times as many for all together whom nobody knows; all among those of the daemon.
    pub(super) fn new(n: usize, of_daemon: Arc<ipc::Places>) -> Self {
        let of_unknown = Arc::new(Semaphore::new(n.saturating_mul(USERS_OF_ALL).min(Semaphore::MAX_PERMITS)));
        Self { of_users: Quota::new(n), of_unknown, of_daemon }
    }

    /// One more for a user, if it is known; none where it has all that it may have, or the daemon has no more.
    pub(super) fn take(&self, peer: Option<Actor>) -> Option<Place> {
        let of_front: Box<dyn Send> = match peer {
            Some(actor) => Box::new(self.of_users.take(actor)?),
            None => Box::new(self.of_unknown.clone().try_acquire_owned().ok()?),
        };
        let of_daemon = self.of_daemon.take(peer.unwrap_or(UNKNOWN)).ok()?;
        Some(Place { _of_front: of_front, _of_daemon: of_daemon })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> Option<Actor> {
        Some(Actor { uid, gid: 0 })
    }

    #[test]
    fn users_have_no_more_than_the_daemon_has_descriptors_for() {
        let of_daemon = Arc::new(ipc::Places::new(4));
        let places = Places::new(256, of_daemon.clone());
        let taken: Vec<_> = (1..9).filter_map(|uid| places.take(user(uid))).collect();
        assert_eq!(taken.len(), 4);
        assert!(of_daemon.take(Actor { uid: 9, gid: 0 }).is_err(), "its own socket has none left either");
        drop(taken);
        let taken: Vec<_> = (0..9).filter_map(|_| places.take(None)).collect();
        assert_eq!(taken.len(), 2, "whom nobody knows leave as many to others");
        assert!(places.take(user(1)).is_some());
    }

    #[test]
    fn each_user_has_what_the_settings_say_and_all_whom_nobody_knows_together() {
        let places = Places::new(2, Arc::new(ipc::Places::new(100)));
        for (peer, n) in [(user(1), 2), (user(2), 2), (None, 2 * USERS_OF_ALL)] {
            let taken: Vec<_> = (0..9).filter_map(|_| places.take(peer)).collect();
            assert_eq!(taken.len(), n, "{peer:?}");
            drop(taken);
            assert!(places.take(peer).is_some());
        }
    }
}
