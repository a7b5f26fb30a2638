//! Work on components that several clients ask for at once: it is done once, a few pieces at a time, fair by user.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use tokio::sync::{oneshot, watch};
use trellis_engine::account::{ActorId, most_beside_others};

type Work<T> = Shared<BoxFuture<'static, T>>;

/// Work under way, by the component's hash. `P` is how far it is, `T` what comes of it.
pub(crate) struct Flights<T: Clone, P> {
    /// What one user may have; beside them is one more for a user that has none.
    n_places: usize,
    n_queued_max: usize,
    n_queued_per_user_max: usize,
    state: Mutex<State<T, P>>,
}

struct State<T: Clone, P> {
    /// Each has at least one user that waits for it.
    flights: HashMap<blake3::Hash, Flight<T, P>>,
    /// The users for which the places are taken, by the flights' numbers; at most one more than `n_places`.
    running: HashMap<u64, ActorId>,
    /// When each user had a place last; only of users that wait for something or have a place.
    last_turns: HashMap<ActorId, u64>,
    n_begun: u64,
    n_turns: u64,
}

struct Flight<T: Clone, P> {
    number: u64,
    work: Work<T>,
    progress: watch::Receiver<P>,
    /// How many wait for it, of each user.
    waiting: HashMap<ActorId, usize>,
    /// Told when it gets its place; `None` from then on.
    queued: Option<oneshot::Sender<()>>,
}

/// The queue has no room for one more component of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueFull {
    pub(crate) n_queued: usize,
    pub(crate) limit: usize,
}

impl<T: Clone, P> State<T, P> {
    fn n_running(&self, actor: ActorId) -> usize {
        self.running.values().filter(|&&other| other == actor).count()
    }

    /// Gives free places to users in turn, those with the fewest places first, and to each for what was asked for
    /// first. A user that is alone has all places; the one beside them is for users that have none, so that their work
    /// does not wait for that one user.
    fn admit(&mut self, n_places: usize) {
        while self.running.len() <= n_places {
            let n_places_free = n_places - self.running.len();
            let queued = self.flights.iter().filter(|(_, flight)| flight.queued.is_some());
            let asked = queued.flat_map(|(hash, flight)| {
                flight.waiting.keys().map(move |&actor| (hash, flight.number, actor))
            });
            let next = asked
                .map(|(&hash, number, actor)| (self.n_running(actor), actor, number, hash))
                .filter(|&(n_running, ..)| n_places_free > 0 || n_running == 0)
                .min_by_key(|&(n_running, actor, number, _)| {
                    (n_running, self.last_turns.get(&actor).copied(), number)
                });
            let Some((_, actor, number, hash)) = next else { break };
            self.n_turns += 1;
            self.last_turns.insert(actor, self.n_turns);
            self.running.insert(number, actor);
            let flight = self.flights.get_mut(&hash).expect("found above");
            let told = flight.queued.take().expect("found among the queued").send(());
            debug_assert!(told.is_ok(), "the work is there as long as somebody waits for it");
        }
        let Self { flights, running, last_turns, .. } = self;
        last_turns.retain(|actor, _| {
            running.values().any(|other| other == actor)
                || flights.values().any(|flight| flight.waiting.contains_key(actor))
        });
    }
}

impl<T, P> Flights<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    /// At most `n_places` pieces of work at once, and one more of a user that has none under way; and `n_queued_max` in the queue,
    /// of which `n_queued_per_user_max` for one user; and one of each user that has none there.
    pub(crate) fn new(n_places: usize, n_queued_max: usize, n_queued_per_user_max: usize) -> Arc<Self> {
        let state = State {
            flights: HashMap::new(),
            running: HashMap::new(),
            last_turns: HashMap::new(),
            n_begun: 0,
            n_turns: 0,
        };
        let state = Mutex::new(state);
        Arc::new(Self { n_places: n_places.max(1), n_queued_max, n_queued_per_user_max, state })
    }

    fn lock(&self) -> MutexGuard<'_, State<T, P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the work on a component, together with all others that do; the first call begins it with `work`, which has its
    /// place once the [`PendingPermit`] is granted and as long as it keeps the [`Permit`].
    ///
    /// # Errors
    /// The work would be one more in a full queue.
    pub(crate) fn join<W>(
        self: &Arc<Self>,
        hash: blake3::Hash,
        actor: ActorId,
        progress: P,
        work: impl FnOnce(PendingPermit<T, P>, watch::Sender<P>) -> W,
    ) -> Result<Joined<T, P>, QueueFull>
    where
        W: Future<Output = T> + Send + 'static,
    {
        let mut state = self.lock();
        if !state.flights.contains_key(&hash) {
            let queued = || state.flights.values().filter(|flight| flight.queued.is_some());
            let n_all = queued().count();
            let n_user = queued().filter(|flight| flight.waiting.contains_key(&actor)).count();
            state.n_begun += 1;
            let number = state.n_begun;
            let (queued, told) = oneshot::channel();
            let (sender, progress) = watch::channel(progress);
            let permit = PendingPermit { told, permit: Permit { flights: self.clone(), number } };
            let work = work(permit, sender).boxed().shared();
            let waiting = HashMap::from([(actor, 0)]);
            state.flights.insert(hash, Flight { number, work, progress, waiting, queued: Some(queued) });
            state.admit(self.n_places);
            if state.flights[&hash].queued.is_some() {
                let of_user = self.n_queued_per_user_max;
                let most =
                    most_beside_others(of_user as u64, n_all as u64, self.n_queued_max as u64, 1) as usize;
                let limit = match n_user {
                    _ if n_user >= of_user || self.n_queued_max == 0 => of_user.min(self.n_queued_max),
                    // Whoever has nothing in the queue finds a place there: no others fill it.
                    _ => most.max(1),
                };
                if n_user >= limit {
                    let refused = state.flights.remove(&hash);
                    drop(state);
                    drop(refused);
                    return Err(QueueFull { n_queued: n_user, limit });
                }
            }
        }
        let flight = state.flights.get_mut(&hash).expect("it was there or has been added");
        *flight.waiting.entry(actor).or_insert(0) += 1;
        let (work, progress) = (Some(flight.work.clone()), flight.progress.clone());
        // A user that has nothing under way may bring forward what another one has queued.
        state.admit(self.n_places);
        Ok(Joined { flights: self.clone(), hash, actor, work, progress })
    }

    /// A [`Joined`] was dropped. The last one takes the work along; it is returned to be dropped outside the lock.
    #[must_use]
    fn leave(&self, hash: &blake3::Hash, actor: ActorId) -> Option<Work<T>> {
        let mut state = self.lock();
        let State { flights, running, .. } = &mut *state;
        let flight = flights.get_mut(hash).expect("it stays while somebody waits for it");
        let n_waiting = flight.waiting.get_mut(&actor).expect("counted when this one joined");
        *n_waiting -= 1;
        if *n_waiting > 0 {
            return None;
        }
        flight.waiting.remove(&actor);
        let work = match flight.waiting.keys().next() {
            Some(&heir) => {
                // The place counts for a user that still waits for the work.
                if let Some(owner) = running.get_mut(&flight.number).filter(|owner| **owner == actor) {
                    *owner = heir;
                }
                None
            }
            None => flights.remove(hash).map(|flight| flight.work),
        };
        state.admit(self.n_places);
        work
    }

    /// Work that has a place or waits for one.
    pub(crate) fn n_under_way(&self) -> usize {
        let state = self.lock();
        state.running.len() + state.flights.values().filter(|flight| flight.queued.is_some()).count()
    }
}

/// What a piece of work waits for before it begins.
pub(crate) struct PendingPermit<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    told: oneshot::Receiver<()>,
    /// Given back even if the permit was granted and the work never learns of it.
    permit: Permit<T, P>,
}

/// Permission for a piece of work to run; the next one gets it when this is dropped.
pub(crate) struct Permit<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    flights: Arc<Flights<T, P>>,
    number: u64,
}

impl<T, P> PendingPermit<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    /// Waits for the permit.
    pub(crate) async fn granted(self) -> Permit<T, P> {
        let Self { told, permit } = self;
        told.await.expect("the queue keeps what is waited for");
        permit
    }
}

impl<T, P> Drop for Permit<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    fn drop(&mut self) {
        let mut state = self.flights.lock();
        state.running.remove(&self.number);
        state.admit(self.flights.n_places);
    }
}

/// A future that waits for a piece of work. The work is dropped with the last of them.
pub(crate) struct Joined<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    flights: Arc<Flights<T, P>>,
    hash: blake3::Hash,
    actor: ActorId,
    /// Always there until this is dropped.
    work: Option<Work<T>>,
    progress: watch::Receiver<P>,
}

impl<T, P> Joined<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    /// How far the work is.
    pub(crate) fn progress(&self) -> watch::Receiver<P> {
        self.progress.clone()
    }
}

impl<T, P> Future for Joined<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        Pin::new(self.work.as_mut().expect("there until this is dropped")).poll(cx)
    }
}

impl<T, P> Drop for Joined<T, P>
where
    T: Clone + Send + Sync + 'static,
    P: Clone + Send + Sync + 'static,
{
    fn drop(&mut self) {
        // First this one's share of the work, so that the last one that leaves holds all that is left of it.
        drop(self.work.take());
        drop(self.flights.leave(&self.hash, self.actor));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Semaphore;

    use super::*;

    /// Work that ends when it is let go, and counts how often it was begun and how often it was dropped.
    struct World {
        flights: Arc<Flights<u8, u32>>,
        ends: Arc<Semaphore>,
        n_begun: Arc<AtomicUsize>,
        n_over: Arc<AtomicUsize>,
    }

    struct Over(Arc<AtomicUsize>);

    impl Drop for Over {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl World {
        fn new(n_places: usize, n_queued: usize, n_queued_per_user: usize) -> Self {
            Self {
                flights: Flights::new(n_places, n_queued, n_queued_per_user),
                ends: Arc::new(Semaphore::new(0)),
                n_begun: Arc::default(),
                n_over: Arc::default(),
            }
        }

        fn join(&self, user: u32, component: u8) -> Result<Joined<u8, u32>, QueueFull> {
            let (ends, n_begun, n_over) = (self.ends.clone(), self.n_begun.clone(), self.n_over.clone());
            self.flights.join(hash(component), ActorId(user), 0, |permit, progress| {
                let over = Over(n_over);
                async move {
                    let _over = over;
                    let _permit = permit.granted().await;
                    n_begun.fetch_add(1, Ordering::Relaxed);
                    progress.send_replace(7);
                    ends.acquire().await.expect("never closed").forget();
                    component
                }
            })
        }

        fn n_begun(&self) -> usize {
            self.n_begun.load(Ordering::Relaxed)
        }

        fn n_over(&self) -> usize {
            self.n_over.load(Ordering::Relaxed)
        }
    }

    fn hash(component: u8) -> blake3::Hash {
        blake3::hash(&[component])
    }

    /// Whether the work that is waited for has its place; it is polled for that.
    fn is_running(joined: &mut Joined<u8, u32>) -> bool {
        assert!(joined.now_or_never().is_none(), "nothing was let go");
        *joined.progress().borrow() == 7
    }

    #[tokio::test]
    async fn what_many_ask_for_is_done_once() {
        let world = World::new(2, 0, 0);
        let mut all: Vec<_> = (0..100).map(|user| world.join(user, 1).expect("no queue")).collect();
        assert!(all.iter_mut().all(is_running));
        assert_eq!((world.n_begun(), world.flights.n_under_way()), (1, 1));
        all.truncate(50);
        assert_eq!(world.n_over(), 0, "others wait for it");
        world.ends.add_permits(1);
        for joined in all.drain(..) {
            assert_eq!(joined.await, 1);
        }
        assert_eq!((world.n_begun(), world.n_over(), world.flights.n_under_way()), (1, 1, 0));
        assert!(world.flights.lock().flights.is_empty());
    }

    #[tokio::test]
    async fn the_last_who_leaves_takes_the_work_along() {
        let world = World::new(2, 4, 4);
        let mut all: Vec<_> = (0..3).map(|user| world.join(user, 1).expect("a place")).collect();
        assert!(is_running(&mut all[0]));
        let last = all.pop();
        drop(all);
        assert_eq!(world.n_over(), 0);
        let queued = world.join(9, 2).expect("a place");
        drop(queued);
        assert_eq!(world.n_over(), 1, "work that has not begun goes as well");
        drop(last);
        assert_eq!((world.n_begun(), world.n_over(), world.flights.n_under_way()), (1, 2, 0));
        let mut again = world.join(1, 1).expect("a place");
        assert!(is_running(&mut again), "the place is free again");
        assert_eq!(world.n_begun(), 2);
    }

    #[tokio::test]
    async fn a_lone_user_has_all_places_and_others_do_not_wait_for_it() {
        let world = World::new(2, 8, 8);
        let mut greedy: Vec<_> = (0..5).map(|n| world.join(1, n).expect("room")).collect();
        let running: Vec<_> = greedy.iter_mut().map(is_running).collect();
        assert_eq!(running, [true, true, false, false, false]);
        let mut other = world.join(2, 10).expect("room");
        assert!(is_running(&mut other), "there is a place for who has none");
        // The next free place goes to the user that has fewest, round robin among equals.
        let [mut second, mut third] = [world.join(2, 11).expect("room"), world.join(3, 12).expect("room")];
        assert!(!is_running(&mut third));
        drop(greedy.remove(0));
        assert!(is_running(&mut third) && !is_running(&mut second) && !is_running(&mut greedy[1]));
        drop(third);
        let now = (is_running(&mut second), is_running(&mut greedy[1]));
        assert_eq!(now, (false, false), "both have one, and the last place is for who has none");
        // What one user has queued is brought forward by another that wants it, too.
        let mut shared = world.join(4, 4).expect("room");
        assert!(is_running(&mut shared) && !is_running(&mut second));
        drop(shared);
        drop(other);
        assert!(is_running(&mut second), "it has none now");
        drop(second);
        // What was shared is the first user's now: with two it has all places.
        assert!(is_running(&mut greedy[3]) && !is_running(&mut greedy[1]));
        drop(greedy.remove(0));
        assert!(is_running(&mut greedy[0]));
    }

    #[test]
    fn who_has_nothing_in_the_queue_finds_room_there() {
        let world = World::new(1, 5, 3);
        let _running = [8, 9].map(|user| world.join(user, 100 + user as u8).expect("a place"));
        let mut component = 0;
        let mut enter = |user| {
            component += 1;
            world.join(user, component)
        };
        let mut queued: Vec<_> = (0..3).map(|_| enter(1).expect("room")).collect();
        let full = |result: Result<Joined<u8, u32>, QueueFull>| {
            let QueueFull { n_queued, limit } = result.map(|_| ()).expect_err("full");
            (n_queued, limit)
        };
        assert_eq!(full(enter(1)), (3, 3));
        queued.extend([enter(2).expect("room for others"), enter(3).expect("room for others")]);
        assert_eq!(full(enter(2)), (1, 1));
        queued.push(enter(4).expect("room for who has nothing there"));
        let again: Vec<_> = (0..20).map(|_| world.join(1, 1).expect("the queue counts components")).collect();
        drop(again);
        drop(queued.remove(0));
        assert_eq!(full(enter(1)), (2, 1), "beside those of others");
        queued.truncate(2);
        drop(enter(1).expect("room again"));
        drop(queued);
        assert_eq!(world.flights.n_under_way(), 2);
        let state = world.flights.lock();
        assert_eq!((state.flights.len(), state.last_turns.len()), (2, 2));
    }
}
