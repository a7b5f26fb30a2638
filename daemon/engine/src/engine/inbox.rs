//! What comes in for an engine, in the order in which it came. What the commands of a guest take of the engine's thread is
//! bounded in each turn: the rest of them waits for the next one, in their order, and nobody else waits with it but, beside other
//! users, what guests of its user ask beyond what one user may.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use tokio::sync::{mpsc, oneshot, watch};

use super::core::{EngineInput, Inputs};
use crate::account::ActorId;
use crate::backend::Backend;
use crate::command::ModelId;
use crate::completion::CallerId;
use crate::error::EngineFailure;
use crate::handle::{DESK, Message, Posted};
use crate::mailbox::{Mailbox, Postbox};

/// A wait for guests that takes longer than this is made of naps.
const SPINS_MAX: Duration = Duration::from_micros(300);
const NAP: Duration = Duration::from_micros(50);

/// While the device works, what comes in is carried out together, so often at most: a turn for each command would cost
/// more than the commands.
const PACE: Duration = Duration::from_micros(100);

/// Hints between two looks whether the device is done, about a microsecond: a look keeps the driver from other threads.
const N_HINTS: usize = 32;

/// What a guest's commands may cost before its others wait for the next turn: a question about each of a hundred rows, or
/// ten forks of long contexts. And what those of all guests of a user may: less than a step of the smallest model, so that a
/// crowd that forks leaves others half of the pace that they would have alone. While there is one user, guests that have had
/// none go on all the same.
const OF_ONE_NS: u64 = 100_000;
const OF_USER_NS: u64 = 200_000;

/// What the commands of a user's guests may cost while the device waits for another user, whose next step nobody else rides
/// with.
const BESIDE_FAVOURED_NS: u64 = 25_000;

/// Turns that follow one another at once, such as those that take a step in and submit the next, are one for that, up to so many.
const N_TURNS_AT_ONCE: usize = 3;

/// Turns that a command is made up for, at most: nobody waits for longer with a question or to cancel something, and what one took
/// while its user was alone harmed nobody.
const N_TURNS_OF_DEBT: u64 = 4;

/// How many times its price a command may cost, if it takes as long.
const N_PRICES_MAX: u64 = 16;

/// The engine is wanted no more: no sender is left.
pub(super) struct Closed;

/// What came first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    Device,
    Input,
}

/// What has come in, and from which guest.
pub(super) struct Inbox {
    messages: mpsc::UnboundedReceiver<Posted>,
    /// One that was waited for.
    awaited: Option<Posted>,
    deferred: Deferred,
    users: Users,
    spent: Spent,
    /// Turns whose commands have cost that.
    n_turns: usize,
    /// Whether commands cost what they take beside other users, if that is more than they should: not in a loop whose time is told
    /// to it.
    pub(super) times_commands: bool,
    pub(super) postboxes: FxHashMap<CallerId, Postbox>,
    /// Where the backends of models go that are about to leave.
    leavers: FxHashMap<ModelId, oneshot::Sender<Box<dyn Backend>>>,
    /// Where it is said that a model has failed.
    watched: FxHashMap<ModelId, watch::Sender<Option<EngineFailure>>>,
}

/// Queues whose memory is laid out at the start, the commands each has room for, and those that it keeps room for: what a guest
/// had waiting once is no reason to keep a megabyte for ever.
const N_QUEUES: usize = 64;
const N_HELD: usize = 16;
const N_HELD_KEPT: usize = 64;

/// Commands that have to wait for another turn, by guest.
struct Deferred {
    queues: FxHashMap<CallerId, VecDeque<Posted>>,
    /// Guests with such commands; the first is served first.
    order: VecDeque<CallerId>,
    /// Those that have had some carried out in this turn: in the next one they come last.
    served: Vec<CallerId>,
    /// Guests of them that are to be served in this turn.
    n_due: usize,
    /// Empty queues.
    spare: Vec<VecDeque<Posted>>,
}

impl Default for Deferred {
    fn default() -> Self {
        Self {
            queues: FxHashMap::with_capacity_and_hasher(N_QUEUES, rustc_hash::FxBuildHasher),
            order: VecDeque::with_capacity(N_QUEUES),
            served: Vec::with_capacity(N_QUEUES),
            n_due: 0,
            spare: (0..N_QUEUES).map(|_| VecDeque::with_capacity(N_HELD)).collect(),
        }
    }
}

impl Deferred {
    fn push(&mut self, posted: Posted, spent: &Spent) {
        let caller = posted.from;
        let queue = self.queues.entry(caller).or_insert_with(|| self.spare.pop().unwrap_or_default());
        let is_first = queue.is_empty();
        queue.push_back(posted);
        if is_first {
            self.put_back(caller, spent);
        }
    }

    /// Has a guest wait for the next turn, behind those that had nothing carried out in this one.
    fn put_back(&mut self, caller: CallerId, spent: &Spent) {
        match spent.by_guest.contains_key(&caller) {
            true => self.served.push(caller),
            false => self.order.push_back(caller),
        }
    }

    fn put_away(&mut self, mut emptied: VecDeque<Posted>) {
        if self.spare.len() < N_QUEUES {
            if emptied.capacity() > N_HELD_KEPT {
                emptied.shrink_to(N_HELD);
            }
            self.spare.push(emptied);
        }
    }

    fn is_empty(&self) -> bool {
        self.order.is_empty() && self.served.is_empty()
    }

    fn begin_turn(&mut self) {
        self.order.extend(self.served.drain(..));
        self.n_due = self.order.len();
    }

    /// The next command of a guest that may go on, of those that were there when the turn began.
    fn pop(&mut self, spent: &Spent, users: &Users) -> Option<Posted> {
        while self.n_due > 0 {
            let caller = self.order.pop_front()?;
            let queue = self.queues.get_mut(&caller).expect("a guest in the order has a queue");
            let posted = if spent.may_go_on(caller, users) { queue.pop_front() } else { None };
            if queue.is_empty() {
                let emptied = self.queues.remove(&caller).expect("it was just there");
                self.put_away(emptied);
                self.n_due -= 1;
            } else if posted.is_some() {
                self.order.push_front(caller);
            } else {
                self.put_back(caller, spent);
                self.n_due -= 1;
            }
            if posted.is_some() {
                return posted;
            }
        }
        None
    }
}

/// Whose the guests are.
#[derive(Default)]
struct Users {
    of_guests: FxHashMap<CallerId, ActorId>,
    n_guests: FxHashMap<ActorId, usize>,
}

impl Users {
    fn enter(&mut self, caller: CallerId, user: ActorId) {
        if self.of_guests.insert(caller, user).is_none() {
            *self.n_guests.entry(user).or_default() += 1;
        }
    }

    fn leave(&mut self, caller: CallerId) {
        let Some(user) = self.of_guests.remove(&caller) else { return };
        let n_guests = self.n_guests.get_mut(&user).expect("a guest that entered was counted");
        *n_guests -= 1;
        if *n_guests == 0 {
            self.n_guests.remove(&user);
        }
    }

    fn are_several(&self) -> bool {
        self.n_guests.len() > 1
    }
}

/// What commands have cost in this turn.
#[derive(Default)]
struct Spent {
    /// For whom the device waits.
    favoured: Option<ActorId>,
    by_guest: FxHashMap<CallerId, u64>,
    by_user: FxHashMap<ActorId, u64>,
}

impl Spent {
    fn clear(&mut self) {
        self.by_guest.clear();
        self.by_user.clear();
    }

    /// Another turn: what a user's commands cost beyond what they may in one is for the next few to make up for.
    fn begin_turn(&mut self) {
        self.by_guest.clear();
        self.by_user.retain(|_, ns| {
            *ns = ns.saturating_sub(OF_USER_NS).min(N_TURNS_OF_DEBT * OF_USER_NS);
            *ns > 0
        });
    }

    fn add(&mut self, caller: CallerId, users: &Users, price_ns: u64) {
        if price_ns > 0 {
            *self.by_guest.entry(caller).or_default() += price_ns;
            if let Some(&user) = users.of_guests.get(&caller) {
                *self.by_user.entry(user).or_default() += price_ns;
            }
        }
    }

    fn may_go_on(&self, caller: CallerId, users: &Users) -> bool {
        let of_guest = self.by_guest.get(&caller).copied();
        let user = users.of_guests.get(&caller);
        let of_user = user.and_then(|user| self.by_user.get(user)).copied();
        let most_ns = match (self.favoured, user) {
            (Some(favoured), Some(&user)) if user != favoured => BESIDE_FAVOURED_NS,
            _ => OF_USER_NS,
        };
        let user_may = of_user.is_none_or(|ns| ns < most_ns);
        let is_first_of_lone_user = of_guest.is_none() && !users.are_several();
        caller == DESK || is_first_of_lone_user || user_may && of_guest.is_none_or(|ns| ns < OF_ONE_NS)
    }
}

/// What is taken in during one turn.
pub(super) struct Taken<'a> {
    inbox: &'a mut Inbox,
    /// Messages that were there when the turn began, and are left.
    n_left: usize,
    last: CallerId,
    /// When that one was handed out, if it is timed.
    since: Option<Instant>,
    /// The user of the one before, and what it cost beside others.
    cost: Option<(ActorId, u64)>,
}

impl Inputs for Taken<'_> {
    fn next(&mut self, price_ns: u64) -> Option<EngineInput> {
        if price_ns > 0 {
            let Inbox { spent, users, .. } = &mut *self.inbox;
            // Other users wait for what it takes, whatever it should cost; not for what takes the processor meanwhile.
            let took_ns = self.since.map_or(0, |since| since.elapsed().as_nanos() as u64);
            let cost_ns = match users.are_several() {
                true => took_ns.clamp(price_ns, N_PRICES_MAX * price_ns),
                false => price_ns,
            };
            spent.add(self.last, users, cost_ns);
            let user = users.of_guests.get(&self.last).filter(|_| users.are_several());
            self.cost = user.map(|&user| (user, cost_ns));
        }
        let posted = self.inbox.next(&mut self.n_left)?;
        (self.last, self.since) = (posted.from, self.inbox.times_commands.then(Instant::now));
        Some(self.inbox.input(posted.message))
    }

    fn take_cost(&mut self) -> Option<(ActorId, u64)> {
        self.cost.take()
    }
}

/// Whether it holds nothing back whatever its guest and its user have asked: a mask should not be late.
fn is_free(message: &Message) -> bool {
    use crate::command::Operation;
    let Message::Operation(operation) = message else { return false };
    matches!(operation, Operation::Pulled { .. } | Operation::Mask { .. } | Operation::EndRun { .. })
}

impl Inbox {
    /// One for the guests that will enter, and for what the handle itself asks.
    pub(super) fn new(messages: mpsc::UnboundedReceiver<Posted>, desk: Arc<Mailbox>) -> Self {
        let postboxes = FxHashMap::from_iter([(DESK, Postbox::Here(desk))]);
        let (leavers, watched) = (FxHashMap::default(), FxHashMap::default());
        let (deferred, users, spent) = (Deferred::default(), Users::default(), Spent::default());
        Self {
            messages,
            awaited: None,
            deferred,
            users,
            spent,
            n_turns: 0,
            times_commands: false,
            postboxes,
            leavers,
            watched,
        }
    }

    /// What has come in by now and no more: guests that ask faster than they are answered would keep the engine from
    /// computing. `favoured` is a user for whom the device waits.
    pub(super) fn inputs(&mut self, favoured: Option<ActorId>) -> Taken<'_> {
        if !self.users.are_several() {
            // Nobody waits for what a lone user asks.
            self.n_turns = 0;
            self.spent.clear();
        } else if self.n_turns == 0 || self.n_turns >= N_TURNS_AT_ONCE {
            self.n_turns = 0;
            self.spent.begin_turn();
        }
        self.n_turns += 1;
        self.spent.favoured = favoured;
        self.deferred.begin_turn();
        let n_left = self.messages.len();
        Taken { inbox: self, n_left, last: DESK, since: None, cost: None }
    }

    /// The turn has ended; `goes_on` says that another follows at once.
    pub(super) fn end_turn(&mut self, goes_on: bool) {
        if !goes_on {
            self.n_turns = 0;
        }
    }

    fn next(&mut self, n_left: &mut usize) -> Option<Posted> {
        let mut next = self.deferred.pop(&self.spent, &self.users);
        while next.is_none() {
            let posted = match self.awaited.take() {
                Some(posted) => posted,
                None if *n_left == 0 => break,
                None => {
                    *n_left -= 1;
                    self.messages.try_recv().ok()?
                }
            };
            let caller = posted.from;
            let may_go_on = is_free(&posted.message) || self.spent.may_go_on(caller, &self.users);
            if self.deferred.queues.contains_key(&caller) || !may_go_on {
                self.deferred.push(posted, &self.spent);
            } else {
                next = Some(posted);
            }
        }
        next
    }

    fn input(&mut self, message: Message) -> EngineInput {
        match message {
            Message::Enter { caller, owner, postbox } => {
                self.postboxes.insert(caller, postbox);
                self.users.enter(caller, owner.actor);
                EngineInput::Enter(caller, owner)
            }
            Message::Leave { caller } => {
                self.postboxes.remove(&caller);
                self.users.leave(caller);
                EngineInput::Leave(caller)
            }
            Message::Operation(operation) => EngineInput::Operation(operation),
            Message::Add { newcomer, failure } => {
                self.watched.insert(newcomer.id, failure);
                EngineInput::Add(newcomer)
            }
            Message::SetKvBytes { kv_bytes, tag } => EngineInput::SetKvBytes { kv_bytes, tag },
            Message::Relieve { n_bytes, tag } => EngineInput::Relieve { n_bytes, tag },
            Message::FromArchive { model, what } => EngineInput::FromArchive(model, what),
            Message::Remove { model, to } => {
                self.leavers.insert(model, to);
                EngineInput::Remove(model)
            }
            Message::Shutdown => EngineInput::Shutdown,
        }
    }

    pub(super) fn note_failed(&mut self, model: ModelId, failure: EngineFailure) {
        tracing::error!(error = %failure, "a model has failed; the engine goes on with the others");
        if let Some(watched) = self.watched.get(&model) {
            watched.send_replace(Some(failure));
        }
    }

    /// Gives a backend to the caller that asked for its model to go: letting go of it here would hold up all guests.
    pub(super) fn see_off(&mut self, model: ModelId, backend: Box<dyn Backend>) {
        self.watched.remove(&model);
        if let Some(to) = self.leavers.remove(&model) {
            // Where the caller is gone it is dropped here.
            let _ = to.send(backend);
        }
    }

    /// Whether there are commands that have to wait for another turn.
    pub(super) fn holds_back(&self) -> bool {
        !self.deferred.is_empty()
    }

    fn is_empty(&self) -> bool {
        !self.holds_back() && self.messages.is_empty()
    }

    /// Waits until something comes in.
    pub(super) fn wait(&mut self) -> Result<(), Closed> {
        if !self.holds_back() {
            self.awaited = Some(self.messages.blocking_recv().ok_or(Closed)?);
        }
        Ok(())
    }

    /// As [`Self::wait`], for a loop that is a task.
    #[cfg(feature = "fuzzing")]
    pub(super) fn poll_wait(
        &mut self,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Closed>> {
        use std::task::Poll;
        if self.holds_back() || self.awaited.is_some() {
            return Poll::Ready(Ok(()));
        }
        self.messages.poll_recv(cx).map(|posted| {
            self.awaited = Some(posted.ok_or(Closed)?);
            Ok(())
        })
    }

    /// Waits until something comes in, the device is done or that moment, at first without going to sleep: most of what comes
    /// in comes at once.
    pub(super) fn wait_until(&mut self, until: Instant, mut is_done: impl FnMut() -> bool) {
        let mut naps_from = None;
        while self.is_empty() {
            let now = Instant::now();
            match until.saturating_duration_since(now) {
                Duration::ZERO => return,
                _ if now < *naps_from.get_or_insert(now + SPINS_MAX) => std::hint::spin_loop(),
                // To ask the device at each turn would keep its driver from others.
                _ if is_done() => return,
                left => std::thread::sleep(left.min(NAP)),
            }
        }
    }

    /// Waits until something comes in or the device is done with what it does, which is in a part of a step: waiting for
    /// the device alone keeps a core busy as well. Other threads that need the core get it.
    pub(super) fn wait_unless(&mut self, mut is_done: impl FnMut() -> bool) {
        while self.is_empty() && !is_done() {
            std::thread::yield_now();
        }
    }

    /// Waits until the device is done, or something has come in, of which it tells in its pace. It keeps its core, as the
    /// driver's own waiting does: a thread that lets a busy one go first gets the core back after a whole slice, and the
    /// device stands still meanwhile.
    pub(super) fn wait_beside(&mut self, mut is_done: impl FnMut() -> bool) -> Awaited {
        let begun = Instant::now();
        loop {
            if is_done() {
                return Awaited::Device;
            }
            if !self.is_empty() && begun.elapsed() >= PACE {
                return Awaited::Input;
            }
            (0..N_HINTS).for_each(|_| std::hint::spin_loop());
        }
    }

    /// Says to all guests that nothing more will come, also to those that have only just entered.
    pub(super) fn close(mut self) {
        self.messages.close();
        let mut inputs = self.inputs(None);
        while inputs.next(0).is_some() {}
        self.postboxes.values().for_each(|mailbox| mailbox.close());
    }
}

#[cfg(test)]
mod tests;
