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

/// Turns that follow one another at once, such as those that take a step in and submit the next, are one for that, up to so many.
const N_TURNS_AT_ONCE: usize = 3;

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

/// Queues whose memory is laid out at the start, and the commands each has room for.
const N_QUEUES: usize = 64;
const N_HELD: usize = 16;

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
                let emptied = self.queues.remove(&caller).filter(|_| self.spare.len() < N_QUEUES);
                self.spare.extend(emptied);
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
    by_guest: FxHashMap<CallerId, u64>,
    by_user: FxHashMap<ActorId, u64>,
}

impl Spent {
    fn clear(&mut self) {
        self.by_guest.clear();
        self.by_user.clear();
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
        let of_user = users.of_guests.get(&caller).and_then(|user| self.by_user.get(user)).copied();
        let user_may = of_user.is_none_or(|ns| ns < OF_USER_NS);
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
    /// computing.
    pub(super) fn inputs(&mut self) -> Taken<'_> {
        // Nobody waits for what a lone user asks.
        if self.n_turns == 0 || self.n_turns >= N_TURNS_AT_ONCE || !self.users.are_several() {
            self.n_turns = 0;
            self.spent.clear();
        }
        self.n_turns += 1;
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
        let mut inputs = self.inputs();
        while inputs.next(0).is_some() {}
        self.postboxes.values().for_each(|mailbox| mailbox.close());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{ContextId, Edit, Operation};
    use crate::completion::Tag;

    const PRICE_NS: u64 = OF_ONE_NS / 4;

    /// A guest's command with a number.
    fn command(from: u64, number: usize) -> Posted {
        let edit = Edit { n_kept: number, ..Edit::default() };
        Posted::new(CallerId(from), Message::Operation(Operation::Edit { id: ContextId::LEAST, edit }))
    }

    /// A mask of a guest's.
    fn mask(from: u64) -> Posted {
        let (id, tag) = (ContextId::LEAST, Tag::new(0, 0));
        let mask = Arc::new(crate::sampling::TokenMask::all(1));
        let operation = Operation::Mask { id, tag, position: 0, turn: 0, mask, expected: None };
        Posted::new(CallerId(from), Message::Operation(operation))
    }

    /// Stands for a mask among numbers.
    const MASK: usize = usize::MAX;

    /// The numbers of the commands that a turn carries out, each of which costs so much.
    fn turn(inbox: &mut Inbox, price_ns: u64) -> Vec<usize> {
        let (mut inputs, mut numbers, mut last_ns) = (inbox.inputs(), Vec::new(), 0);
        while let Some(input) = inputs.next(last_ns) {
            last_ns = price_ns;
            match input {
                EngineInput::Operation(Operation::Edit { edit, .. }) => numbers.push(edit.n_kept),
                EngineInput::Operation(Operation::Mask { .. }) => numbers.push(MASK),
                _ => panic!("a command"),
            }
        }
        inbox.end_turn(false);
        numbers
    }

    #[test]
    fn commands_of_a_guest_that_take_long_wait_for_the_next_turn_and_nobody_else_does() {
        let (sender, messages) = mpsc::unbounded_channel();
        let mut inbox = Inbox::new(messages, Arc::default());
        for number in 0..10 {
            assert!(sender.send(command(1, number)).is_ok());
        }
        assert!(sender.send(command(2, 100)).is_ok());
        assert_eq!(turn(&mut inbox, PRICE_NS), [0, 1, 2, 3, 100]);
        // What comes later from that guest stays behind.
        assert!(sender.send(command(1, 10)).is_ok());
        assert!(sender.send(command(2, 101)).is_ok());
        assert_eq!(turn(&mut inbox, PRICE_NS), [4, 5, 6, 7, 101]);
        assert!(!inbox.is_empty());
        assert_eq!(turn(&mut inbox, PRICE_NS), [8, 9, 10]);
        assert!(inbox.is_empty() && inbox.deferred.queues.is_empty());
    }

    /// An inbox with commands of 40 guests, three of each; every second is of the second of two users, or all are of one.
    fn crowd(n_users: u32) -> (mpsc::UnboundedSender<Posted>, Inbox) {
        let (sender, messages) = mpsc::unbounded_channel();
        let mut inbox = Inbox::new(messages, Arc::default());
        for guest in 1..=40 {
            inbox.users.enter(CallerId(guest.into()), ActorId(guest % n_users));
            for number in 0..3 {
                assert!(sender.send(command(guest.into(), number)).is_ok());
            }
        }
        (sender, inbox)
    }

    /// More than a command takes here on a busy machine.
    const LONG_NS: u64 = OF_USER_NS / 3 + 1;

    #[test]
    fn guests_of_a_lone_user_whose_commands_take_long_get_one_each_once_their_time_is_up() {
        let (_sender, mut inbox) = crowd(1);
        let first = turn(&mut inbox, LONG_NS);
        assert_eq!(first.iter().filter(|&&number| number == 0).count(), 40);
        assert!(first.len() <= 42, "{first:?}");
        while !turn(&mut inbox, 0).is_empty() {}
        assert!(inbox.is_empty());
    }

    #[test]
    fn a_crowd_of_one_of_two_users_has_what_a_user_has() {
        let (_sender, mut inbox) = crowd(2);
        // Each of the users has three; those of its guests that had none are next.
        assert_eq!(turn(&mut inbox, LONG_NS), [0, 1, 0, 1, 0, 0]);
        let first_two = [1, 2].map(|guest| inbox.deferred.queues[&CallerId(guest)].len());
        assert_eq!(first_two, [1, 1]);
        assert_eq!(turn(&mut inbox, LONG_NS), [0, 1, 0, 1, 0, 0]);
        let mut n_turns = 2;
        while !turn(&mut inbox, LONG_NS).is_empty() {
            n_turns += 1;
        }
        assert!(inbox.is_empty() && inbox.deferred.queues.is_empty());
        assert!((20..=22).contains(&n_turns), "{n_turns}");
    }

    #[test]
    fn turns_that_follow_at_once_are_one_for_a_crowd_beside_others() {
        let (_sender, mut inbox) = crowd(2);
        let n_taken = |inbox: &mut Inbox| {
            let (mut inputs, mut n, mut last_ns) = (inbox.inputs(), 0, 0);
            while inputs.next(last_ns).is_some() {
                (n, last_ns) = (n + 1, LONG_NS);
            }
            inbox.end_turn(true);
            n
        };
        let taken: Vec<_> = (0..2 * N_TURNS_AT_ONCE).map(|_| n_taken(&mut inbox)).collect();
        assert_eq!(taken, [6, 0, 0, 6, 0, 0]);
    }

    #[test]
    fn a_mask_of_a_guest_that_asks_little_waits_for_no_other_guest() {
        let (sender, mut inbox) = crowd(2);
        inbox.users.enter(CallerId(42), ActorId(1));
        assert!(sender.send(mask(42)).is_ok());
        assert!(turn(&mut inbox, LONG_NS).contains(&MASK));
        while !turn(&mut inbox, LONG_NS).is_empty() {}
        assert!(inbox.is_empty());
    }

    #[test]
    fn who_has_left_is_no_user() {
        let mut users = Users::default();
        (1..=3_u32).for_each(|guest| users.enter(CallerId(guest.into()), ActorId(guest % 2)));
        assert!(users.are_several());
        users.leave(CallerId(2));
        assert!(!users.are_several());
        users.leave(CallerId(2));
        assert_eq!((users.of_guests.len(), users.n_guests[&ActorId(1)]), (2, 2));
    }
}
