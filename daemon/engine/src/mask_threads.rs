//! Threads that work out what constraints allow: beside the engine's thread, while its device computes.

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::account::{ActorId, GuestId, Owner};
use crate::constraint::ConstraintError;

/// What takes longer is slow. A mask of an ordinary grammar takes a hundredth of it.
const SLOW: Duration = Duration::from_millis(5);

/// After so long, work that comes in pieces lets others go first.
const TURN: Duration = Duration::from_millis(2);

/// For so long after something slow the guests of its user are taken for slow, those that are not known yet.
const SLOW_FOR: Duration = Duration::from_secs(60);

/// How long a thread that has nothing to do is kept, but for the last.
const KEPT: Duration = Duration::from_secs(10);

/// What a slow guest has done quickly, one after the other, before it is taken for quick.
const N_QUICK: u32 = 32;

/// Addresses for a thread's stack. Regular expressions are worked on as deep as they nest.
const STACK_BYTES: usize = 16 << 20;

/// Works out what a grammar allows. A panic in that ends it with an error: its run, or question, waits for nothing else.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T, ConstraintError>) -> Result<T, ConstraintError> {
    let reason = || "working that out panicked".to_owned();
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(ConstraintError::TooComplex { reason: reason() }))
}

/// The threads of one engine. They serve users round robin, and so the guests of a user, a mask each, or a piece of what leads
/// to one; those that were slow lately are never on all threads at once, so that they wait for each other and no other guest
/// for them.
#[derive(Debug)]
pub(crate) struct MaskThreads(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// What takes longer is slow.
    slow: Duration,
    /// How long a thread that has nothing to do is kept.
    kept: Duration,
    queue: Mutex<Queue>,
    /// There is something to do, or there never will be.
    called: Condvar,
}

type Work = Box<dyn FnMut(&mut Turn) -> Piece + Send>;

/// How far a piece of some work has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// To the end.
    Last,
    /// There is more to do, in a later turn.
    GoesOn,
}

/// The time of one piece.
#[derive(Debug, Default)]
pub(crate) struct Turn(Option<Instant>);

impl Turn {
    /// Whether it is time to let others go first. It runs from where this is first asked, so that what has to be looked for
    /// first takes nothing of it.
    pub(crate) fn is_over(&mut self) -> bool {
        self.0.get_or_insert_with(Instant::now).elapsed() >= TURN
    }
}

/// Guests, and users, that are remembered. To forget them costs something slow each.
const N_KNOWN_MAX: usize = 4096;

/// Who was slow lately.
#[derive(Default)]
struct Known {
    /// What each guest has still to do quickly before it is taken for quick; nothing if it is.
    guests: FxHashMap<GuestId, u32>,
    /// When each user's guests were last slow. Without it, whoever is found to be slow would begin anew as another guest.
    users: FxHashMap<ActorId, Instant>,
}

impl Known {
    fn is_slow(&self, actor: ActorId, guest: GuestId) -> bool {
        let of_user = || self.users.get(&actor).is_some_and(|last| last.elapsed() < SLOW_FOR);
        self.guests.get(&guest).map_or_else(of_user, |&n_left| n_left > 0)
    }

    fn note(&mut self, actor: ActorId, guest: GuestId, is_slow: bool) {
        let n_at_first = if self.is_slow(actor, guest) { N_QUICK } else { 0 };
        if self.guests.len() >= N_KNOWN_MAX && !self.guests.contains_key(&guest) {
            self.guests.clear();
        }
        let n_left = self.guests.entry(guest).or_insert(n_at_first);
        *n_left = if is_slow { N_QUICK } else { n_left.saturating_sub(1) };
        if is_slow {
            if self.users.len() >= N_KNOWN_MAX && !self.users.contains_key(&actor) {
                self.users.clear();
            }
            self.users.insert(actor, Instant::now());
        }
    }
}

/// Something to do that was taken out.
struct Taken {
    actor: ActorId,
    guest: GuestId,
    work: Work,
    /// Whether it counts among the slow.
    is_slow: bool,
}

#[derive(Default)]
struct Queue {
    users: FxHashMap<ActorId, OfUser>,
    /// Users with something to do, the next one first.
    order: VecDeque<ActorId>,
    n_waiting: usize,
    known: Known,
    n_threads: usize,
    n_threads_max: usize,
    n_idle: usize,
    /// Idle threads that were called and have not woken yet.
    n_called: usize,
    /// Threads that work for a slow guest.
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
    /// That of a user, who has something to do now.
    fn of_user(&mut self, actor: ActorId) -> &mut OfUser {
        self.n_waiting += 1;
        let user = self.users.entry(actor).or_default();
        if user.order.is_empty() {
            self.order.push_back(actor);
        }
        user
    }

    /// Takes out what is next.
    fn take(&mut self) -> Option<Taken> {
        let may_be_slow = self.n_on_slow < (self.n_threads_max - 1).max(1);
        let (users, known) = (&mut self.users, &self.known);
        let mut take_of = |actor: ActorId| {
            let is_next = |guest: &GuestId| may_be_slow || !known.is_slow(actor, *guest);
            users.get_mut(&actor).and_then(|user| user.take(is_next))
        };
        let (idx, (guest, work)) =
            self.order.iter().enumerate().find_map(|(idx, &actor)| Some((idx, take_of(actor)?)))?;
        let actor = self.order.remove(idx).expect("it was found");
        if self.users.get(&actor).is_some_and(|user| user.order.is_empty()) {
            self.users.remove(&actor);
        } else {
            self.order.push_back(actor);
        }
        self.n_waiting -= 1;
        Some(Taken { actor, guest, work, is_slow: self.known.is_slow(actor, guest) })
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
        Self::keeping(n_threads_max, slow, KEPT)
    }

    fn keeping(n_threads_max: usize, slow: Duration, kept: Duration) -> Self {
        let queue = Mutex::new(Queue { n_threads_max, ..Queue::default() });
        Self(Arc::new(Shared { slow, kept, queue, called: Condvar::new() }))
    }

    /// Starts the first thread, so that there is one whatever the system has later.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub(crate) fn begin_first(&self) -> io::Result<()> {
        self.0.lock().n_threads += 1;
        self.begin()
    }

    /// Has something done for a guest, after what it asked for before.
    pub(crate) fn run(&self, owner: &Owner, work: impl FnOnce() + Send + 'static) {
        let mut work = Some(work);
        self.run_in_pieces(owner, move |_| {
            if let Some(work) = work.take() {
                work();
            }
            Piece::Last
        });
    }

    /// The same of something that may take long, and is done a piece at a time. Others go first in between.
    pub(crate) fn run_in_pieces(&self, owner: &Owner, work: impl FnMut(&mut Turn) -> Piece + Send + 'static) {
        let mut queue = self.0.lock();
        queue.of_user(owner.actor).push(owner.guest, Box::new(work));
        let is_short = queue.n_waiting > queue.n_idle;
        self.0.call(&mut queue);
        if is_short && queue.n_threads < queue.n_threads_max {
            queue.n_threads += 1;
            drop(queue);
            // It is done by the threads that there are; where there are none yet, whoever comes next tries again.
            if let Err(error) = self.begin() {
                tracing::warn!(%error, "there is no further thread for masks");
            }
        }
    }

    /// Starts a thread that is counted already; it is not, where there is none.
    fn begin(&self) -> io::Result<()> {
        let shared = self.0.clone();
        let thread = thread::Builder::new().name("masks".to_owned()).stack_size(STACK_BYTES);
        self.counted(thread.spawn(move || shared.serve()).map(drop))
    }

    /// Whether a thread has begun; one that has not no longer counts.
    fn counted(&self, begun: io::Result<()>) -> io::Result<()> {
        if begun.is_err() {
            self.0.lock().n_threads -= 1;
        }
        begun
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

    /// Calls an idle thread, if there is something to do and none is on its way that would call the next: who has many masks worked
    /// out, as the engine's thread between two steps, wakes one thread for them and not one for each.
    fn call(&self, queue: &mut Queue) {
        if queue.n_waiting > 0 && queue.n_called == 0 && queue.n_idle > 0 {
            queue.n_called = 1;
            self.called.notify_one();
        }
    }

    /// Waits to be called; whether that was within the time for which a thread that does nothing is kept. The only one waits on.
    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> (MutexGuard<'a, Queue>, bool) {
        if queue.n_threads == 1 {
            return (self.called.wait(queue).unwrap_or_else(PoisonError::into_inner), true);
        }
        let (queue, waited) =
            self.called.wait_timeout(queue, self.kept).unwrap_or_else(PoisonError::into_inner);
        (queue, !waited.timed_out())
    }

    fn serve(&self) {
        let mut queue = self.lock();
        while !queue.is_closed {
            let Some(Taken { actor, guest, work, is_slow: was_slow }) = queue.take() else {
                queue.n_idle += 1;
                let has_come;
                (queue, has_come) = self.wait(queue);
                queue.n_idle -= 1;
                // Whoever woke is the one who was called: who was not, and woke by itself, looks for work as well.
                queue.n_called = 0;
                if !has_come && queue.n_waiting == 0 && queue.n_threads > 1 {
                    queue.n_threads -= 1;
                    return;
                }
                continue;
            };
            queue.n_on_slow += usize::from(was_slow);
            self.call(&mut queue);
            drop(queue);
            let begun = Instant::now();
            let left = piece_of(work);
            let is_slow = left.is_some() || begun.elapsed() > self.slow;
            queue = self.lock();
            queue.n_on_slow -= usize::from(was_slow);
            queue.known.note(actor, guest, is_slow);
            let goes_on = left.is_some();
            if let Some(work) = left {
                queue.of_user(actor).push(guest, work);
            }
            // Others may have waited for one of the slow to be done, and this thread does only one of what there is to do.
            if was_slow || goes_on {
                self.call(&mut queue);
            }
        }
    }
}

/// Does a piece of some work, and lets go of it at its end; what is left of it.
fn piece_of(mut work: Work) -> Option<Work> {
    let piece = AssertUnwindSafe(move || {
        let piece = work(&mut Turn::default());
        (piece == Piece::GoesOn).then_some(work)
    });
    catch_unwind(piece).unwrap_or_else(|_| {
        // What a guest waits for is told before: this is to keep the thread.
        tracing::error!("a mask was not worked out");
        None
    })
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
    fn threads_that_have_nothing_to_do_end_but_for_one() {
        let threads = MaskThreads::keeping(3, SLOW, Duration::from_millis(5));
        for _ in 0..3 {
            let (done, dones) = mpsc::channel();
            let gates = [1, 2, 3].map(|user| {
                let ((gate, opened), done) = (mpsc::channel::<()>(), done.clone());
                threads.run(&guest(user), move || {
                    done.send(()).expect("it is waited for");
                    opened.recv().expect("it is opened");
                });
                gate
            });
            for _ in &gates {
                assert_eq!(dones.recv_timeout(SOON), Ok(()), "there is a thread for each");
            }
            assert_eq!(threads.0.lock().n_threads, 3);
            for gate in gates {
                gate.send(()).expect("it waits");
            }
            let begun = Instant::now();
            while threads.0.lock().n_threads > 1 {
                assert!(begun.elapsed() < SOON, "they end");
                thread::yield_now();
            }
        }
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
        let is_known = |user: u32| threads.0.lock().known.is_slow(ActorId(user), GuestId(user.into()));
        while !is_known(1) || !is_known(2) {
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
    fn what_comes_in_pieces_lets_others_go_first_and_makes_its_user_slow_before_it_ends() {
        let threads = MaskThreads::of(1, SLOW);
        let (done, dones) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        threads.run(&guest(9), move || gone.recv().expect("it is let go"));
        let (mut n_pieces, of_long, of_next) = (0, done.clone(), done.clone());
        threads.run_in_pieces(&guest_of(1, 10), move |_| {
            n_pieces += 1;
            of_long.send((1, n_pieces)).expect("it is waited for");
            if n_pieces < 3 { Piece::GoesOn } else { Piece::Last }
        });
        threads.run(&guest_of(1, 10), move || of_next.send((1, 9)).expect("it is waited for"));
        for n in 0..2 {
            let done = done.clone();
            threads.run(&guest(2), move || done.send((2, n)).expect("it is waited for"));
        }
        go.send(()).expect("it waits");
        let order: Vec<(u32, u32)> = (0..6).map(|_| dones.recv_timeout(SOON).expect("done")).collect();
        assert_eq!(order, [(1, 1), (2, 0), (1, 9), (2, 1), (1, 2), (1, 3)]);
        let queue = threads.0.lock();
        assert!(queue.known.is_slow(ActorId(1), GuestId(10)), "though each of its pieces was quick");
        assert!(queue.known.is_slow(ActorId(1), GuestId(11)), "another guest of the same user");
        assert!(!queue.known.is_slow(ActorId(2), GuestId(2)));
    }

    #[test]
    fn a_slow_guest_is_quick_after_many_quick_pieces_and_its_user_s_next_one_is_not() {
        let (user, mut known) = (ActorId(1), Known::default());
        known.note(user, GuestId(1), false);
        known.note(user, GuestId(2), true);
        assert!(!known.is_slow(user, GuestId(1)), "it is known");
        for _ in 1..N_QUICK {
            known.note(user, GuestId(2), false);
            known.note(user, GuestId(3), false);
        }
        assert!(known.is_slow(user, GuestId(2)) && known.is_slow(user, GuestId(3)));
        known.note(user, GuestId(2), false);
        known.note(user, GuestId(3), false);
        assert!(!known.is_slow(user, GuestId(2)) && !known.is_slow(user, GuestId(3)));
        assert!(known.is_slow(user, GuestId(4)), "nothing is known of it but its user");
        assert!(!known.is_slow(ActorId(2), GuestId(5)));
    }

    #[test]
    fn new_guests_of_a_slow_user_are_not_on_all_threads() {
        let threads = MaskThreads::of(2, SLOW);
        let (done, dones) = mpsc::channel();
        threads.0.lock().known.note(ActorId(1), GuestId(0), true);
        let gates = [10, 11, 12].map(|number| {
            let (gate, opened) = mpsc::channel::<()>();
            let done = done.clone();
            threads.run(&guest_of(1, number), move || {
                opened.recv().expect("it is opened");
                done.send(1).expect("it is waited for");
            });
            gate
        });
        let of_other = done.clone();
        threads.run(&guest(2), move || of_other.send(2).expect("it is waited for"));
        assert_eq!(dones.recv_timeout(SOON), Ok(2));
        for gate in gates {
            gate.send(()).expect("it waits, or will");
            assert_eq!(dones.recv_timeout(SOON), Ok(1));
        }
    }

    #[test]
    fn a_thread_that_could_not_be_started_is_not_counted() {
        let threads = MaskThreads::of(2, SLOW);
        threads.begin_first().expect("the system has a thread");
        assert_eq!(threads.0.lock().n_threads, 1);
        // As it is while one is being started, which then fails.
        threads.0.lock().n_threads += 1;
        let failed = threads.counted(Err(io::ErrorKind::WouldBlock.into()));
        assert!(failed.is_err());
        assert_eq!(threads.0.lock().n_threads, 1);
        let (done, dones) = mpsc::channel();
        threads.run(&guest(1), move || done.send(()).expect("it is waited for"));
        assert_eq!(dones.recv_timeout(SOON), Ok(()));
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
