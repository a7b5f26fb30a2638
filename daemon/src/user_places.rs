//! What each user has so many of at once, whatever the number of its guests: more where it is alone.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use trellis_engine::account::ActorId;

/// Places of users. One that is alone may have more than beside others: what it has more then is given back as what is under way
/// ends, and nobody waits for that.
#[derive(Clone, Debug)]
pub(crate) struct UserPlaces(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    n_alone: usize,
    n_beside_others: usize,
    /// Of those that have a place or wait for one.
    users: HashMap<ActorId, OfUser>,
}

#[derive(Debug, Default)]
struct OfUser {
    n_taken: usize,
    waiting: VecDeque<oneshot::Sender<UserPlace>>,
}

/// A place, until this is dropped.
#[derive(Debug)]
pub(crate) struct UserPlace {
    places: UserPlaces,
    user: ActorId,
    /// Whether it was given back, because nobody waited for it any more.
    is_back: bool,
}

impl Drop for UserPlace {
    fn drop(&mut self) {
        if !self.is_back {
            let mut state = self.places.lock();
            state.give_back(self.user);
            state.admit(&self.places);
        }
    }
}

impl State {
    fn give_back(&mut self, user: ActorId) {
        self.users.get_mut(&user).expect("it has a place").n_taken -= 1;
    }

    /// Gives each user what it may have.
    fn admit(&mut self, places: &UserPlaces) {
        for of_user in self.users.values_mut() {
            of_user.waiting.retain(|turn| !turn.is_closed());
        }
        self.users.retain(|_, of_user| of_user.n_taken > 0 || !of_user.waiting.is_empty());
        let n_places = if self.users.len() == 1 { self.n_alone } else { self.n_beside_others };
        for (&user, of_user) in &mut self.users {
            while of_user.n_taken < n_places
                && let Some(turn) = of_user.waiting.pop_front()
            {
                match turn.send(UserPlace { places: places.clone(), user, is_back: false }) {
                    Ok(()) => of_user.n_taken += 1,
                    Err(mut place) => place.is_back = true,
                }
            }
        }
    }
}

impl UserPlaces {
    /// So many for a user that is alone, and so many for each where there are more.
    pub(crate) fn new(n_alone: usize, n_beside_others: usize) -> Self {
        Self(Arc::new(Mutex::new(State { n_alone, n_beside_others, users: HashMap::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place of a user; those of one user have theirs in the order in which they came.
    pub(crate) async fn take(&self, user: ActorId) -> UserPlace {
        let (given, turn) = oneshot::channel();
        {
            let mut state = self.lock();
            state.users.entry(user).or_default().waiting.push_back(given);
            state.admit(self);
        }
        turn.await.expect("who waits is told")
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_lone_user_has_all_and_its_part_beside_others() {
        let places = UserPlaces::new(4, 2);
        let (one, other) = (ActorId(1), ActorId(2));
        let mut taken = Vec::new();
        for _ in 0..4 {
            taken.push(places.take(one).now_or_never().expect("it is alone"));
        }
        let mut fifth = Box::pin(places.take(one));
        assert!(fifth.as_mut().now_or_never().is_none(), "there are four");
        let of_other = [places.take(other), places.take(other)]
            .map(|place| place.now_or_never().expect("nobody waits for another user"));
        assert!(places.take(other).now_or_never().is_none(), "its part is half");
        taken.truncate(2);
        assert!(fifth.as_mut().now_or_never().is_none(), "and so is that of the first");
        drop(of_other);
        taken.push(fifth.now_or_never().expect("it is alone again"));
        assert_eq!(places.lock().users.len(), 1, "who waits for nothing is forgotten");
        drop(taken);
        let given_up = places.take(one);
        drop(given_up);
        drop(places.take(other).await);
        assert!(places.lock().users.is_empty());
    }

    #[tokio::test]
    async fn where_there_is_one_each_has_one() {
        let places = UserPlaces::new(1, 1);
        let _one = places.take(ActorId(1)).await;
        assert!(places.take(ActorId(1)).now_or_never().is_none());
        let _other = places.take(ActorId(2)).now_or_never().expect("it has none");
    }
}
