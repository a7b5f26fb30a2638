//! Places for connections: as many as leave descriptors to the rest of the daemon. Of these a user leaves others as many as it
//! has itself.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use trellis_engine::account::most_beside_others;

use crate::session::{Actor, Quota, QuotaPermit, SessionError};

/// The places of one daemon.
#[derive(Debug)]
pub(crate) struct Places {
    n_max: usize,
    all: Arc<Semaphore>,
    users: Arc<Quota>,
}

/// The place of one connection, free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    _of_all: OwnedSemaphorePermit,
    _of_user: QuotaPermit,
}

impl Places {
    /// So many, of which one user has half at most.
    pub(crate) fn new(n_max: usize) -> Self {
        let n_max = n_max.min(Semaphore::MAX_PERMITS);
        Self { n_max, all: Arc::new(Semaphore::new(n_max)), users: Quota::new(n_max.div_ceil(2)) }
    }

    /// A place for one more connection of this user.
    ///
    /// # Errors
    /// The user has as many as it may have, or all are taken.
    pub(crate) fn take(&self, actor: Actor) -> Result<Place, SessionError> {
        let (n_user, n_all) = self.users.taken(actor);
        let n_max = self.users.n_max();
        let most = most_beside_others(n_max, n_all as u64, self.n_max as u64, 1);
        // The last place is for who has none.
        let limit = if n_user as u64 >= n_max { n_max } else { most.max(1) };
        let too_many = || SessionError::TooManyConnections { uid: actor.uid, limit };
        let full = |_| SessionError::Full { limit: self.n_max as u64 };
        if n_user as u64 >= limit {
            return Err(too_many());
        }
        let _of_user = self.users.take(actor).ok_or_else(too_many)?;
        Ok(Place { _of_all: self.all.clone().try_acquire_owned().map_err(full)?, _of_user })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_leaves_others_as_many_places_as_it_has() {
        let places = Places::new(6);
        let take = |uid| places.take(Actor { uid, gid: 0 });
        let mut taken: Vec<_> = (0..3).map(|_| take(1).expect("a place")).collect();
        assert!(matches!(take(1), Err(SessionError::TooManyConnections { uid: 1, limit: 3 })));
        taken.push(take(2).expect("for another"));
        assert!(matches!(take(2), Err(SessionError::TooManyConnections { uid: 2, limit: 1 })));
        taken.push(take(3).expect("for a third"));
        taken.push(take(4).expect("the last one"));
        assert!(matches!(take(5), Err(SessionError::Full { limit: 6 })));
        drop(taken.remove(0));
        let again = take(5).expect("free again");
        assert!(matches!(take(1), Err(SessionError::TooManyConnections { limit: 1, .. })));
        drop((taken, again));
        assert!((0..3).map(|_| take(1)).collect::<Result<Vec<_>, _>>().is_ok());
        assert!(Places::new(usize::MAX).take(Actor { uid: 1, gid: 0 }).is_ok());
    }
}
