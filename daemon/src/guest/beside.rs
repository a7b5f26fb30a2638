//! Long work of guests: texts to encode, templates, JSON, and grammars, of which the last cannot be cut into parts.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::num::{NonZero, NonZeroU32};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, available_parallelism};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use trellis_engine::account::{ActorId, Owner};
use trellis_engine::fair::{FairQueue, Lane, Seat};
use trellis_engine::model::YieldPoint;

use self::turn::{Held, Turn};
use super::cpu::CpuClock;
use super::rooms::{Kind, Need, Rooms};
use super::threads::{as_ns, give_way};

#[cfg(test)]
mod tests;
mod turn;

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
/// with larger ones. Work in parts ([`Beside::run_in_parts`]) gives its place to who comes next every few milliseconds, and ends
/// once its guest is gone. Texts and grammars wait for room as well, since they take some hundred times their length while they are under way.
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
    /// Of those that wait, the ones that have been under way and have a thread.
    n_paused: usize,
    rooms: Rooms,
    n_places: usize,
    /// When its last piece was begun, in pieces that were begun.
    last_begun: u64,
}

impl OfUser {
    fn new(share: NonZeroU32) -> Self {
        let waiting = FairQueue::default();
        let rooms = Rooms::default();
        Self { share, waiting, n_waiting: 0, n_running: 0, n_paused: 0, rooms, n_places: 0, last_begun: 0 }
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
    /// Whether others have their turn in its place, while it keeps its room.
    is_paused: bool,
    /// Whether what it had is given back.
    is_back: bool,
}

impl Running {
    fn give_back(&mut self) {
        self.is_back = true;
        let n_running = usize::from(!self.is_paused);
        let mut pieces = self.beside.lock();
        pieces.n_running -= n_running;
        pieces.rooms.end(self.need);
        let user = pieces.user(self.actor);
        user.n_running -= n_running;
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

    /// Whether work waits or is under way.
    #[cfg(test)]
    pub(crate) fn is_busy(&self) -> bool {
        !self.lock().users.is_empty()
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
        self.run_in_parts(owner, clock, Duration::MAX, need, |_| work()).await
    }

    /// As [`Self::run_in_room`], for work that comes to yield points. There it lets others have their turn, and is given up when the
    /// future was dropped, or when its guest has had more than so much of processors.
    ///
    /// # Panics
    /// The work does.
    pub(crate) async fn run_in_parts<T: Send + 'static>(
        &self,
        owner: &Owner,
        clock: &Arc<CpuClock>,
        cpu_max: Duration,
        need: Need,
        work: impl FnOnce(&YieldPoint) -> T + Send + 'static,
    ) -> T {
        let (place, turn) = self.wait(owner, need);
        let running = turn.await.expect("the queue keeps what is waited for");
        // Others wait for the room that it has: how soon it gives that back is not its user's business alone.
        let niceness = match need.kind() {
            Kind::LongText | Kind::HugeText | Kind::LargeGrammar => NICENESS,
            _ => self.niceness(owner.account.priority().share),
        };
        let gone = CancellationToken::new();
        let _gone_if_dropped = gone.clone().drop_guard();
        let turn = Turn::new(Held::new(running, place), clock.clone(), cpu_max, gone, Handle::current());
        let (turn, clock) = (Arc::new(turn), clock.clone());
        let (done, result) = oneshot::channel();
        let thread = thread::Builder::new().name("guest-work".to_owned()).stack_size(STACK_BYTES);
        let begun = thread.spawn(move || {
            give_way(niceness);
            let span = clock.begin();
            turn.begin();
            let yields = YieldPoint::new({
                let turn = turn.clone();
                move || turn.reach()
            });
            let result = catch_unwind(AssertUnwindSafe(|| work(&yields)));
            let held = turn.end();
            drop(span);
            drop(held);
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
        Some((begin, Running { beside: self.clone(), actor, need, is_paused: false, is_back: false }))
    }
}

/// So nice that a thread has its share's part of what one with the largest share has, as far as the system goes.
fn niceness_beside(share: NonZeroU32, largest: NonZeroU32) -> i32 {
    let n_steps = (f64::from(largest.get()) / f64::from(share.get())).log(STEP_OF_NICENESS).round();
    NICENESS_MAX.min(NICENESS + n_steps as i32)
}
