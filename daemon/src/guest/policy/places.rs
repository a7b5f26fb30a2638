//! How many calls of the policy are under way for each user: they are nobody's time but the daemon's.

use std::collections::{HashMap, VecDeque};
use std::num::NonZero;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;

use tokio::sync::oneshot;
use trellis_engine::account::ActorId;

/// The part of the processors that calls for one user may take beside those for others, and one in any case.
const PART_OF_PROCESSORS: usize = 2;

/// A user that is alone has a place for each processor. Beside others it has the part of one user: what it has more is given
/// back as its calls end, each of which is bounded, and nobody waits for that.
#[derive(Clone, Debug)]
pub(super) struct Places(Arc<Mutex<State>>);

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
    waiting: VecDeque<oneshot::Sender<Place>>,
}

/// A place, until this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Places,
    user: ActorId,
    /// Whether it was given back, because nobody waited for it any more.
    is_back: bool,
}

impl Drop for Place {
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
    fn admit(&mut self, places: &Places) {
        for of_user in self.users.values_mut() {
            of_user.waiting.retain(|turn| !turn.is_closed());
        }
        self.users.retain(|_, of_user| of_user.n_taken > 0 || !of_user.waiting.is_empty());
        let n_places = if self.users.len() == 1 { self.n_alone } else { self.n_beside_others };
        for (&user, of_user) in &mut self.users {
            while of_user.n_taken < n_places
                && let Some(turn) = of_user.waiting.pop_front()
            {
                match turn.send(Place { places: places.clone(), user, is_back: false }) {
                    Ok(()) => of_user.n_taken += 1,
                    Err(mut place) => place.is_back = true,
                }
            }
        }
    }
}

impl Places {
    pub(super) fn new() -> Self {
        Self::of(available_parallelism().map_or(1, NonZero::get))
    }

    fn of(n_processors: usize) -> Self {
        let n_beside_others = (n_processors / PART_OF_PROCESSORS).max(1);
        let state = State { n_alone: n_processors, n_beside_others, users: HashMap::new() };
        Self(Arc::new(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place of a user; those of one user have theirs in the order in which they came.
    pub(super) async fn take(&self, user: ActorId) -> Place {
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
    async fn a_lone_user_has_all_processors_and_its_part_beside_others() {
        let places = Places::of(4);
        let (one, other) = (ActorId(1), ActorId(2));
        let mut taken = Vec::new();
        for _ in 0..4 {
            taken.push(places.take(one).now_or_never().expect("it is alone"));
        }
        let mut fifth = Box::pin(places.take(one));
        assert!(fifth.as_mut().now_or_never().is_none(), "there are four processors");
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
    async fn on_one_processor_each_has_one() {
        let places = Places::of(1);
        let _one = places.take(ActorId(1)).await;
        assert!(places.take(ActorId(1)).now_or_never().is_none());
        let _other = places.take(ActorId(2)).now_or_never().expect("it has none");
    }
}
