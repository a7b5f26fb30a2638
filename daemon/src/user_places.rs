//! What each user has so many of at once, whatever the number of its guests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Semaphore;
use trellis_engine::account::ActorId;

/// A semaphore for each user.
#[derive(Debug)]
pub(crate) struct UserPlaces {
    n_at_once: usize,
    of_users: Mutex<HashMap<ActorId, Weak<Semaphore>>>,
}

impl UserPlaces {
    /// With so many for each user.
    pub(crate) fn new(n_at_once: usize) -> Self {
        Self { n_at_once, of_users: Mutex::default() }
    }

    /// The places of one user, there as long as somebody has them.
    pub(crate) fn of(&self, user: ActorId) -> Arc<Semaphore> {
        let mut of_users = self.of_users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(places) = of_users.get(&user).and_then(Weak::upgrade) {
            return places;
        }
        of_users.retain(|_, places| places.strong_count() > 0);
        let places = Arc::new(Semaphore::new(self.n_at_once));
        of_users.insert(user, Arc::downgrade(&places));
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_own_and_who_has_left_is_forgotten() {
        let places = UserPlaces::new(2);
        let one = places.of(ActorId(1));
        assert!(Arc::ptr_eq(&one, &places.of(ActorId(1))));
        let two = places.of(ActorId(2));
        assert!(!Arc::ptr_eq(&one, &two));
        assert_eq!(two.available_permits(), 2);
        drop(one);
        places.of(ActorId(3));
        assert_eq!(places.of_users.lock().expect("nobody panicked").len(), 2);
    }
}
