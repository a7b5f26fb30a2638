//! Places for connections: as many as leave descriptors to the rest of the daemon.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::session::{Actor, Quota, QuotaPermit, SessionError};

/// The places of one daemon.
#[derive(Debug)]
pub(super) struct Places {
    n_max: usize,
    all: Arc<Semaphore>,
    users: Arc<Quota>,
}

/// The place of one connection, free again when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    _of_all: OwnedSemaphorePermit,
    _of_user: QuotaPermit,
}

impl Places {
    /// So many, of which one user has half at most.
    pub(super) fn new(n_max: usize) -> Self {
        let n_max = n_max.min(Semaphore::MAX_PERMITS);
        Self { n_max, all: Arc::new(Semaphore::new(n_max)), users: Quota::new(n_max.div_ceil(2)) }
    }

    /// A place for one more connection of this user.
    ///
    /// # Errors
    /// The user has as many as it may have, or all are taken.
    pub(super) fn take(&self, actor: Actor) -> Result<Place, SessionError> {
        let too_many = || SessionError::TooManyConnections { uid: actor.uid, limit: self.users.n_max() };
        let full = |_| SessionError::Full { limit: self.n_max as u64 };
        let _of_user = self.users.take(actor).ok_or_else(too_many)?;
        Ok(Place { _of_all: self.all.clone().try_acquire_owned().map_err(full)?, _of_user })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_takes_half_of_the_places() {
        let places = Places::new(5);
        let take = |uid| places.take(Actor { uid, gid: 0 });
        let mut taken: Vec<_> = (0..3).map(|_| take(1).expect("a place")).collect();
        assert!(matches!(take(1), Err(SessionError::TooManyConnections { uid: 1, limit: 3 })));
        taken.extend([take(2).expect("for another"), take(3).expect("for a third")]);
        assert!(matches!(take(2), Err(SessionError::Full { limit: 5 })));
        drop(taken.remove(0));
        let again = take(2).expect("free again");
        assert!(matches!(take(1), Err(SessionError::Full { .. })));
        drop((taken, again));
        assert!((0..3).map(|_| take(1)).collect::<Result<Vec<_>, _>>().is_ok());
        assert!(Places::new(usize::MAX).take(Actor { uid: 1, gid: 0 }).is_ok());
    }
}
