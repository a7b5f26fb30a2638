//! Long work of guests that cannot be cut: texts to encode, templates, grammars.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::num::{NonZero, NonZeroU32};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, available_parallelism};
use std::time::Duration;

use tokio::sync::oneshot;
use trellis_engine::account::{ActorId, Owner};
use trellis_engine::fair::{FairQueue, Lane, Seat};

use super::cpu::CpuClock;
use super::rooms::{Kind, Need, Rooms};
use super::threads::{as_ns, give_way};

/// By how much it gives way to the daemon's other threads, in the system's steps of niceness: as guests do.
const NICENESS: i32 = 5;

/// The system's last step of niceness.
const NICENESS_MAX: i32 = 19;

/// By how much more of a processor a thread has than one that is a step nicer.
const STEP_OF_NICENESS: f64 = 1.25;

/// Users whose work is under way at once with all that each may have; others wait for a piece of theirs.
const N_USERS: usize = 16;

/// Addresses for a thread's stack: regular expressions, templates and grammars are worked on as deep as they nest.
const STACK_BYTES: usize = 16 << 20;

/// Rows are what an engine counts.
const NO_ROWS: usize = 0;

/// Runs long work of guests on threads of its own. Each user may have as many as there are processors, and what waits of one
/// user is served by fair shares of processor time of its sessions and guests. So no user waits for the work of another, and
/// the system shares the processors between the threads of all: those of users with smaller shares are nicer to those of users
/// with larger ones. Texts and grammars wait for room as well, since they take some hundred times their length while they are under way.
#[derive(Clone, Debug)]
pub(crate) struct Beside(Arc<Mutex<Pieces>>);

/// What waits, and what is under way.
struct Pieces {
    users: BTreeMap<ActorId, OfUser>,
    n_running: usize,
    n_running_max: usize,
    n_running_of_user_max: usize,
    rooms: Rooms,
    /// Who waits for room among all users, for each kind: until then nobody else of that kind begins, however little it needs.
    claims: [Option<ActorId>; Kind::N],
    /// Pieces that were begun, ever.
    n_begun: u64,
}

/// A piece that waits for its turn.
struct Waiting {
    begin: oneshot::Sender<Running>,
    need: Need,
}

struct OfUser {
    /// Its weight beside other users.
    share: NonZeroU32,
    waiting: FairQueue<Waiting>,
    n_waiting: usize,
    n_running: usize,
    rooms: Rooms,
    n_places: usize,
    /// When its last piece was begun, in pieces that were begun.
    last_begun: u64,
}

impl OfUser {
    fn new(share: NonZeroU32) -> Self {
        let waiting = FairQueue::default();
        let rooms = Rooms::default();
        Self { share, waiting, n_waiting: 0, n_running: 0, rooms, n_places: 0, last_begun: 0 }
    }

    /// Where its next piece waits, of those that may begin. `all` is what is under way of all users.
    fn next(&mut self, actor: ActorId, all: &Rooms, claims: &mut [Option<ActorId>; Kind::N]) -> Option<Lane> {
        let may_begin = Kind::ALL.map(|kind| self.may_begin(kind, actor, all, &mut claims[kind as usize]));
        let kinds = Kind::ALL.into_iter().zip(may_begin).filter(|(_, may_begin)| *may_begin);
        self.waiting.first_of(kinds.map(|(kind, _)| kind.lane()))
    }

    /// The need of the first piece of a kind, if there is one and it has room among those of its user. One that was given up needs
    /// nothing.
    fn first_need(&mut self, kind: Kind) -> Option<Need> {
        let first = self.waiting.peek(kind.lane())?;
        let need = if first.begin.is_closed() { Need::NOTHING } else { first.need };
        self.rooms.fit_of_user(need).then_some(need)
    }

    /// Whether the first piece of a kind may begin. Where only room among all is missing, it is the next that has it.
    fn may_begin(&mut self, kind: Kind, actor: ActorId, all: &Rooms, claim: &mut Option<ActorId>) -> bool {
        let Some(need) = self.first_need(kind) else { return false };
        if claim.is_some_and(|other| other != actor) {
            return false;
        }
        let has_room = all.fit_of_all(need);
        *claim = (!has_room).then_some(actor);
        has_room
    }

    /// Whether it has less under way for its share than another, or as much, and began its last piece before the other.
    fn compare(&self, other: &Self) -> Ordering {
        let weighed = |user: &Self, of: &Self| user.n_running as u64 * u64::from(of.share.get());
        weighed(self, other).cmp(&weighed(other, self)).then(self.last_begun.cmp(&other.last_begun))
    }
}

impl std::fmt::Debug for Pieces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pieces").field("n_running", &self.n_running).finish_non_exhaustive()
    }
}

impl Pieces {
    fn user(&mut self, actor: ActorId) -> &mut OfUser {
        self.users.get_mut(&actor).expect("it has a piece")
    }

    fn forget_if_done(&mut self, actor: ActorId) {
        let user = self.user(actor);
        if user.n_places == 0 && user.n_running == 0 {
            self.users.remove(&actor);
        }
    }
}

/// The place of a piece of work among those of its user, until it is done or given up.
struct Place {
    beside: Beside,
    actor: ActorId,
    seat: Option<Seat>,
}

impl Place {
    fn charge(&self, cost: Duration) {
        let seat = self.seat.as_ref().expect("it is given back at the end");
        self.beside.lock().user(self.actor).waiting.charge(seat, as_ns(cost));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let seat = self.seat.take().expect("it is given back once");
        let mut pieces = self.beside.lock();
        let user = pieces.user(self.actor);
        user.waiting.vacate(seat);
        user.n_places -= 1;
        pieces.forget_if_done(self.actor);
        drop(pieces);
        // What it waited for may have kept others out.
        self.beside.serve();
    }
}

/// A piece of work that is under way; the next one begins when this is dropped.
struct Running {
    beside: Beside,
    actor: ActorId,
    need: Need,
    /// Whether what it had is given back.
    is_back: bool,
}

impl Running {
    fn give_back(&mut self) {
        self.is_back = true;
        let mut pieces = self.beside.lock();
        pieces.n_running -= 1;
        pieces.rooms.end(self.need);
        let user = pieces.user(self.actor);
        user.n_running -= 1;
        user.rooms.end(self.need);
        pieces.forget_if_done(self.actor);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_back {
            self.give_back();
            self.beside.serve();
        }
    }
}

impl Beside {
    pub(crate) fn new() -> Self {
        Self::of(available_parallelism().map_or(1, NonZero::get))
    }

    fn of(n_processors: usize) -> Self {
        Self(Arc::new(Mutex::new(Pieces {
            users: BTreeMap::new(),
            n_running: 0,
            n_running_max: n_processors * N_USERS,
            n_running_of_user_max: n_processors,
            rooms: Rooms::default(),
            claims: [None; Kind::N],
            n_begun: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Pieces> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs work of a guest on another thread; its time counts on the clock, the time in the queue does not. Work that waits
    /// for its turn is forgotten when the future is dropped.
    ///
    /// # Panics
    /// The work does.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        owner: &Owner,
        clock: &Arc<CpuClock>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        self.run_in_room(owner, clock, Need::NOTHING, work).await
    }

    /// As [`Self::run`], for work that waits for room.
    ///
    /// # Panics
    /// The work does.
    pub(crate) async fn run_in_room<T: Send + 'static>(
        &self,
        owner: &Owner,
        clock: &Arc<CpuClock>,
        need: Need,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let (place, turn) = self.wait(owner, need);
        let running = turn.await.expect("the queue keeps what is waited for");
        // Others wait for the room that it has: how soon it gives that back is not its user's business alone.
        let niceness = match need.kind() {
            Kind::LongText | Kind::HugeText | Kind::LargeGrammar => NICENESS,
            _ => self.niceness(owner.account.priority().share),
        };
        let (done, result) = oneshot::channel();
        let clock = clock.clone();
        let thread = thread::Builder::new().name("guest-work".to_owned()).stack_size(STACK_BYTES);
        let begun = thread.spawn(move || {
            give_way(niceness);
            let span = clock.begin();
            let result = catch_unwind(AssertUnwindSafe(work));
            place.charge(span.elapsed());
            drop(span);
            drop((running, place));
            // The guest may be gone.
            let _ = done.send(result);
        });
        if let Err(error) = begun {
            panic!("the system has no thread for long work: {error}");
        }
        match result.await.expect("it is sent, come what may") {
            Ok(result) => result,
            Err(panic) => resume_unwind(panic),
        }
    }

    /// How nice a thread of a user with this share is beside those of the users who have work.
    fn niceness(&self, share: NonZeroU32) -> i32 {
        let most = self.lock().users.values().map(|user| user.share).max();
        niceness_beside(share, most.unwrap_or(share))
    }

    fn wait(&self, owner: &Owner, need: Need) -> (Place, oneshot::Receiver<Running>) {
        let (begin, turn) = oneshot::channel();
        let mut pieces = self.lock();
        let share = owner.account.priority().share;
        let user = pieces.users.entry(owner.actor).or_insert_with(|| OfUser::new(share));
        let seat = user.waiting.seat(owner);
        let lane = need.kind().lane();
        user.waiting.push(&seat, lane, Waiting { begin, need }, NO_ROWS);
        user.n_waiting += 1;
        user.n_places += 1;
        drop(pieces);
        self.serve();
        (Place { beside: self.clone(), actor: owner.actor, seat: Some(seat) }, turn)
    }

    /// Begins what may begin.
    fn serve(&self) {
        while let Some((begin, running)) = self.next() {
            // Of a piece that was given up: what follows begins here, and not within its end.
            if let Err(mut running) = begin.send(running) {
                running.give_back();
            }
        }
    }

    /// What comes next, if it may begin: of the user that has the least under way for its share, of those with something for which
    /// there is room. It counts as under way from here on.
    fn next(&self) -> Option<(oneshot::Sender<Running>, Running)> {
        let pieces = &mut *self.lock();
        if pieces.n_running == pieces.n_running_max {
            return None;
        }
        let most = pieces.n_running_of_user_max;
        for kind in Kind::ALL {
            let claim = &mut pieces.claims[kind as usize];
            let user = claim.and_then(|actor| pieces.users.get_mut(&actor));
            let holds = user.is_some_and(|user| {
                user.n_running < most && user.first_need(kind).is_some_and(|need| need != Need::NOTHING)
            });
            *claim = claim.filter(|_| holds);
        }
        let may_begin = |(_, user): &(&ActorId, &mut OfUser)| user.n_waiting > 0 && user.n_running < most;
        let mut users: Vec<_> = pieces.users.iter_mut().filter(may_begin).collect();
        users.sort_by(|(_, user), (_, other)| user.compare(other));
        let (actor, lane, user) = users.into_iter().find_map(|(&actor, user)| {
            let lane = user.next(actor, &pieces.rooms, &mut pieces.claims)?;
            Some((actor, lane, user))
        })?;
        let Waiting { begin, need } = user.waiting.pop(lane).expect("it waits");
        user.n_waiting -= 1;
        user.n_running += 1;
        user.rooms.begin(need);
        pieces.n_running += 1;
        pieces.rooms.begin(need);
        // One that was given up costs its user nothing.
        if !begin.is_closed() {
            pieces.n_begun += 1;
            user.last_begun = pieces.n_begun;
        }
        Some((begin, Running { beside: self.clone(), actor, need, is_back: false }))
    }
}

/// So nice that a thread has its share's part of what one with the largest share has, as far as the system goes.
fn niceness_beside(share: NonZeroU32, largest: NonZeroU32) -> i32 {
    let n_steps = (f64::from(largest.get()) / f64::from(share.get())).log(STEP_OF_NICENESS).round();
    NICENESS_MAX.min(NICENESS + n_steps as i32)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::super::threads::tests::{owner, owner_with};
    use super::*;
    use crate::thread_time::thread_time;

    #[tokio::test]
    async fn long_work_blocks_nobody_and_is_counted() {
        let (beside, clock) = (Beside::new(), Arc::new(CpuClock::default()));
        let (begun, has_begun) = oneshot::channel();
        let (looked, have_looked) = mpsc::channel();
        let owner = owner(1, 1);
        let work = beside.run(&owner, &clock, move || {
            begun.send(()).expect("it is waited for");
            have_looked.recv().expect("they look");
            let begun = thread_time();
            while thread_time() - begun < Duration::from_millis(20) {
                std::hint::spin_loop();
            }
            7
        });
        let others = async {
            has_begun.await.expect("it begins");
            assert!(clock.is_running(), "this thread was free while the work went on");
            looked.send(()).expect("it waits");
        };
        let (result, ()) = tokio::join!(work, others);
        assert_eq!(result, 7);
        assert!(clock.used() >= Duration::from_millis(20), "{:?}", clock.used());
        assert!(!clock.is_running());
    }

    #[tokio::test]
    async fn guests_take_turns_users_do_not_wait_for_each_other_and_what_is_given_up_is_passed_over() {
        let beside = Beside::of(1);
        let (go, gone) = mpsc::channel::<()>();
        let done = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        let mut begin = |user: u32, guest: u64, number: u32, wait: Option<mpsc::Receiver<()>>| {
            let (beside, done) = (beside.clone(), done.clone());
            tasks.push(tokio::spawn(async move {
                let work = move || {
                    wait.map(|wait| wait.recv());
                    done.lock().expect("no panic").push((user, guest, number));
                };
                beside.run(&owner(user, guest), &Arc::default(), work).await;
            }));
        };
        begin(1, 1, 0, Some(gone));
        tokio::task::yield_now().await;
        for number in 1..5 {
            begin(1, 1, number, None);
            tokio::task::yield_now().await;
        }
        begin(1, 2, 0, None);
        tokio::task::yield_now().await;
        tasks.remove(2).abort();
        tokio::task::yield_now().await;
        // The other user's is done while the first one's is under way.
        assert_eq!(beside.run(&owner(2, 1), &Arc::default(), || 9).await, 9);
        go.send(()).expect("it waits");
        for task in tasks {
            task.await.expect("it ends");
        }
        let mut seen = done.lock().expect("no panic").clone();
        assert_eq!(seen[0], (1, 1, 0));
        assert_ne!(seen.last(), Some(&(1, 2, 0)), "the guest that came last is not served last");
        seen.sort_unstable();
        assert_eq!(seen, [(1, 1, 0), (1, 1, 1), (1, 1, 3), (1, 1, 4), (1, 2, 0)]);
        let pieces = beside.lock();
        assert!(pieces.users.is_empty() && pieces.n_running == 0);
    }

    #[tokio::test]
    async fn long_texts_wait_for_room_and_nothing_else_waits_for_them() {
        const MIB: usize = 1 << 20;
        let beside = Beside::of(8);
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let begin = |user: u32, guest: u64, text_bytes: usize| {
            let (beside, begun) = (beside.clone(), begun.clone());
            let (go, gone) = mpsc::channel::<()>();
            let work = move || {
                begun.send((user, guest)).expect("it is waited for");
                gone.recv().expect("it is told");
            };
            let owner = owner(user, guest);
            let need = Need::of_text(text_bytes);
            let task = async move { beside.run_in_room(&owner, &Arc::default(), need, work).await };
            (go, tokio::spawn(task))
        };
        let mut first = Vec::new();
        for user in 1..=4 {
            first.push(begin(user, 1, MIB));
            assert_eq!(begins.recv().await, Some((user, 1)));
        }
        // Its user has no more room, and then no more has the daemon.
        let second = begin(1, 2, MIB / 2);
        tokio::task::yield_now().await;
        let given_up = begin(5, 1, 2 * MIB);
        tokio::task::yield_now().await;
        let third = begin(6, 1, MIB / 2);
        tokio::task::yield_now().await;
        let clock = Arc::default();
        let short = Need::of_text(60 << 10);
        assert_eq!(beside.run_in_room(&owner(5, 2), &clock, short, || 1).await, 1);
        assert_eq!(beside.run(&owner(1, 3), &clock, || 2).await, 2, "no text at all");
        given_up.1.abort();
        assert!(given_up.1.await.is_err());
        assert!(begins.try_recv().is_err(), "long ones have begun without room");
        let (go, ended) = first.remove(0);
        go.send(()).expect("it waits");
        ended.await.expect("it ends");
        let mut now = [begins.recv().await, begins.recv().await];
        now.sort_unstable();
        assert_eq!(now, [Some((1, 2)), Some((6, 1))]);
        for (go, ended) in first.into_iter().chain([second, third]) {
            go.send(()).expect("it waits");
            ended.await.expect("it ends");
        }
        let pieces = beside.lock();
        assert!(pieces.users.is_empty() && pieces.n_running == 0);
        assert_eq!(pieces.rooms, Rooms::default());
    }

    #[tokio::test]
    async fn work_of_a_smaller_share_is_nicer_while_a_larger_one_has_work() {
        let niceness = |share: u32, largest: u32| {
            let [share, largest] = [share, largest].map(|n| NonZeroU32::new(n).expect("above 0"));
            niceness_beside(share, largest)
        };
        let seen =
            [(1, 1), (7, 7), (1, 3), (2, 4), (1, 100)].map(|(share, largest)| niceness(share, largest));
        assert_eq!(seen, [5, 5, 10, 8, 19]);
        let beside = Beside::of(1);
        let share = NonZeroU32::MIN;
        assert_eq!(beside.niceness(share), NICENESS);
        let (go, gone) = mpsc::channel::<()>();
        let work = {
            let beside = beside.clone();
            let wait = move || gone.recv().expect("it is told");
            tokio::spawn(async move { beside.run(&owner_with(3, 1, 1), &Arc::default(), wait).await })
        };
        tokio::task::yield_now().await;
        assert_eq!(beside.niceness(share), 10);
        go.send(()).expect("it waits");
        work.await.expect("it ends");
        assert_eq!(beside.niceness(share), NICENESS);
    }

    #[test]
    fn the_user_with_the_least_under_way_for_its_share_is_next() {
        let user = |share, n_running, last_begun| OfUser {
            n_running,
            last_begun,
            ..OfUser::new(NonZeroU32::new(share).expect("above 0"))
        };
        assert!(user(3, 5, 9).compare(&user(1, 2, 1)).is_lt());
        assert!(user(3, 6, 9).compare(&user(1, 2, 1)).is_gt(), "as much: the one that began last comes last");
        assert!(user(1, 1, 1).compare(&user(1, 0, 9)).is_gt());
    }

    #[tokio::test]
    async fn a_panic_reaches_its_guest_and_leaves_nothing() {
        let beside = Beside::of(1);
        let owner = owner(1, 1);
        let clock = Arc::default();
        let panicking = AssertUnwindSafe(beside.run(&owner, &clock, || panic!("an injected panic")));
        let panic = futures_util::FutureExt::catch_unwind(panicking).await.expect_err("it goes on");
        assert_eq!(panic.downcast_ref(), Some(&"an injected panic"));
        assert_eq!(beside.run(&owner, &clock, || 1).await, 1);
        assert!(beside.lock().users.is_empty());
    }
}
