//! Threads that work out what constraints allow: beside the engine's thread, while its device computes.

use std::collections::VecDeque;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::account::{ActorId, GuestId, Owner};
use crate::constraint::ConstraintError;

/// What takes longer is slow. A mask of an ordinary grammar takes a hundredth of it.
const SLOW: Duration = Duration::from_millis(5);

/// Addresses for a thread's stack. Regular expressions are worked on as deep as they nest.
const STACK_BYTES: usize = 16 << 20;

/// Works out what a grammar allows. A panic in that ends it with an error: its run, or question, waits for nothing else.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T, ConstraintError>) -> Result<T, ConstraintError> {
    let reason = || "working that out panicked".to_owned();
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(ConstraintError::TooComplex { reason: reason() }))
}

/// The threads of one engine. They serve users round robin, and so the guests of a user, a mask each; those whose last mask was
/// slow are never on all threads at once, so that they wait for each other and no other guest for them.
#[derive(Debug)]
pub(crate) struct MaskThreads(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// What takes longer is slow.
    slow: Duration,
    queue: Mutex<Queue>,
    /// There is something to do, or there never will be.
    called: Condvar,
}

type Work = Box<dyn FnOnce() + Send>;

/// Slow guests that are remembered. To forget them costs a slow mask each.
const N_SLOW_MAX: usize = 4096;

#[derive(Default)]
struct Queue {
    users: FxHashMap<ActorId, OfUser>,
    /// Users with something to do, the next one first.
    order: VecDeque<ActorId>,
    n_waiting: usize,
    /// Guests whose last mask was slow.
    slow: FxHashSet<GuestId>,
    n_threads: usize,
    n_threads_max: usize,
    n_idle: usize,
    /// Threads that work for a guest of those.
    n_on_slow: usize,
    is_closed: bool,
}

/// What is to be done for guests of one user.
#[derive(Default)]
struct OfUser {
    waiting: FxHashMap<GuestId, VecDeque<Work>>,
    /// Guests with something to do, the next one first.
    order: VecDeque<GuestId>,
}

impl OfUser {
    fn push(&mut self, guest: GuestId, work: Work) {
        let waiting = self.waiting.entry(guest).or_default();
        waiting.push_back(work);
        if waiting.len() == 1 {
            self.order.push_back(guest);
        }
    }

    /// Takes out what is next of the guests whose turn it may be.
    fn take(&mut self, is_next: impl Fn(&GuestId) -> bool) -> Option<(GuestId, Work)> {
        let idx = self.order.iter().position(is_next)?;
        let guest = self.order.remove(idx).expect("it was found");
        let waiting = self.waiting.get_mut(&guest).expect("a guest in the order waits");
        let work = waiting.pop_front().expect("for something");
        if waiting.is_empty() {
            self.waiting.remove(&guest);
        } else {
            self.order.push_back(guest);
        }
        Some((guest, work))
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("order", &self.order).finish_non_exhaustive()
    }
}

impl Queue {
    fn push(&mut self, owner: &Owner, work: Work) {
        let user = self.users.entry(owner.actor).or_default();
        if user.order.is_empty() {
            self.order.push_back(owner.actor);
        }
        user.push(owner.guest, work);
        self.n_waiting += 1;
    }

    /// Takes out what is next, and whether it is for a guest whose last mask was slow.
    fn take(&mut self) -> Option<(GuestId, Work, bool)> {
        let may_be_slow = self.n_on_slow < (self.n_threads_max - 1).max(1);
        let (users, slow) = (&mut self.users, &self.slow);
        let is_next = |guest: &GuestId| may_be_slow || !slow.contains(guest);
        let mut take_of = |actor: &ActorId| users.get_mut(actor).and_then(|user| user.take(is_next));
        let (idx, (guest, work)) =
            self.order.iter().enumerate().find_map(|(idx, actor)| Some((idx, take_of(actor)?)))?;
        let actor = self.order.remove(idx).expect("it was found");
        if self.users.get(&actor).is_some_and(|user| user.order.is_empty()) {
            self.users.remove(&actor);
        } else {
            self.order.push_back(actor);
        }
        self.n_waiting -= 1;
        Some((guest, work, self.slow.contains(&guest)))
    }

    fn note(&mut self, guest: GuestId, is_slow: bool) {
        if !is_slow {
            self.slow.remove(&guest);
            return;
        }
        if self.slow.len() >= N_SLOW_MAX {
            self.slow.clear();
        }
        self.slow.insert(guest);
    }
}

impl Default for MaskThreads {
    fn default() -> Self {
        // Half of the processors, of which there may be one: the device's own work is the other half.
        let n_processors = available_parallelism().map_or(1, NonZero::get);
        Self::of((n_processors / 2).clamp(2, 16), SLOW)
    }
}

impl MaskThreads {
    fn of(n_threads_max: usize, slow: Duration) -> Self {
        let queue = Mutex::new(Queue { n_threads_max, ..Queue::default() });
        Self(Arc::new(Shared { slow, queue, called: Condvar::new() }))
    }

    /// Has something done for a guest, after what it asked for before.
    pub(crate) fn run(&self, owner: &Owner, work: impl FnOnce() + Send + 'static) {
        let mut queue = self.0.lock();
        queue.push(owner, Box::new(work));
        // A thread that was called is idle until it wakes: there may be more to do than idle threads.
        let is_short = queue.n_waiting > queue.n_idle;
        self.0.called.notify_one();
        if is_short && queue.n_threads < queue.n_threads_max {
            queue.n_threads += 1;
            drop(queue);
            self.begin();
        }
    }

    fn begin(&self) {
        let shared = self.0.clone();
        let thread = thread::Builder::new().name("masks".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || shared.serve()).expect("the system has a thread for it");
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.called.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut queue = self.lock();
        while !queue.is_closed {
            let Some((guest, work, was_slow)) = queue.take() else {
                queue.n_idle += 1;
                queue = self.called.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.n_idle -= 1;
                continue;
            };
            queue.n_on_slow += usize::from(was_slow);
            drop(queue);
            let begun = Instant::now();
            // What a guest waits for is told before: this is to keep the thread.
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                tracing::error!("a mask was not worked out");
            }
            let is_slow = begun.elapsed() > self.slow;
            queue = self.lock();
            queue.n_on_slow -= usize::from(was_slow);
            queue.note(guest, is_slow);
            // Others may have waited for one of the slow to be done.
            if was_slow && queue.n_idle > 0 && queue.n_waiting > 0 {
                self.called.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::account::{Account, Budget, SessionId};

    /// A guest of a user.
    fn guest_of(user: u32, guest: u64) -> Owner {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        Owner { actor: ActorId(user), session: SessionId(user.into()), guest: GuestId(guest), account }
    }

    /// The one guest of a user.
    fn guest(user: u32) -> Owner {
        guest_of(user, user.into())
    }

    /// Long enough for what happens at once to have happened.
    const SOON: Duration = Duration::from_secs(60);

    /// What takes longer is slow here: nothing else does, on the busiest machine.
    const SLOW: Duration = Duration::from_millis(400);

    #[test]
    fn users_take_turns_and_so_do_the_guests_of_each() {
        let threads = MaskThreads::of(1, SLOW);
        let (done, dones) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        threads.run(&guest(9), move || gone.recv().expect("it is let go"));
        for (user, guest) in [(1, 10), (1, 10), (1, 11), (1, 12), (2, 20), (2, 20)] {
            let done = done.clone();
            let work = move || done.send((user, guest)).expect("they are waited for");
            threads.run(&guest_of(user, guest), work);
        }
        go.send(()).expect("it waits");
        let order: Vec<(u32, u64)> = (0..6).map(|_| dones.recv_timeout(SOON).expect("done")).collect();
        assert_eq!(order, [(1, 10), (2, 20), (1, 11), (2, 20), (1, 12), (1, 10)]);
    }

    #[test]
    fn what_a_guest_asks_for_is_done_in_order() {
        let threads = MaskThreads::of(1, SLOW);
        let (done, dones) = mpsc::channel();
        let owner = guest(1);
        for number in 0..100 {
            let done = done.clone();
            threads.run(&owner, move || done.send(number).expect("they are waited for"));
        }
        let order: Vec<i32> = (0..100).map(|_| dones.recv_timeout(SOON).expect("done")).collect();
        assert!(order.is_sorted(), "{order:?}");
    }

    #[test]
    fn slow_guests_wait_for_each_other_and_nobody_for_them() {
        let threads = MaskThreads::of(2, SLOW);
        let (done, dones) = mpsc::channel();
        // They are known as slow, one after the other.
        for caller in [1, 2] {
            let done = done.clone();
            threads.run(&guest(caller), move || {
                thread::sleep(SLOW + SLOW / 4);
                done.send(0).expect("it is waited for");
            });
            assert_eq!(dones.recv_timeout(SOON), Ok(0));
        }
        while threads.0.lock().slow.len() < 2 {
            thread::yield_now();
        }
        let gates = [1, 2].map(|caller| {
            let (gate, opened) = mpsc::channel::<()>();
            let done = done.clone();
            threads.run(&guest(caller), move || {
                opened.recv().expect("it is opened");
                done.send(caller).expect("it is waited for");
            });
            gate
        });
        for _ in 0..50 {
            let done = done.clone();
            threads.run(&guest(3), move || done.send(3).expect("it is waited for"));
            assert_eq!(dones.recv_timeout(SOON), Ok(3), "one thread is free of the slow");
        }
        for (gate, caller) in gates.into_iter().zip([1, 2]) {
            gate.send(()).expect("it waits, or will");
            assert_eq!(dones.recv_timeout(SOON), Ok(caller));
        }
    }

    #[test]
    fn work_that_panics_ends_itself_alone() {
        let threads = MaskThreads::of(1, SLOW);
        let (done, dones) = mpsc::channel();
        threads.run(&guest(1), || panic!("an injected panic"));
        threads.run(&guest(1), move || done.send(()).expect("it is waited for"));
        assert_eq!(dones.recv_timeout(SOON), Ok(()));
    }

    #[test]
    fn who_waits_for_what_panics_is_told() {
        assert_eq!(caught(|| Ok(7)), Ok(7));
        let told = caught(|| -> Result<(), _> { panic!("an injected panic") });
        assert!(matches!(told, Err(ConstraintError::TooComplex { .. })), "{told:?}");
    }
}
