//! A process of guests that runs other code, beside honest guests among random operations: whatever it sends, no operation of it
//! stops the scheduler, and the others get what they would have got without.

mod forged;
mod replayed;

use std::ops::Range;

use self::forged::Forger;
use super::evict::N_PAGES_OF_HOLES;
use super::hash_backend::mix;
use super::{N_PAGES_MIN, Random, World};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::command::{Ask, ContextId, ModelId, Operation};
use crate::completion::CallerId;
use crate::kept::KeptRow;
use crate::remote::customs::{Customs, ModelFacts};

/// Numbers of the process's contexts, of which honest guests use none.
const NUMBERS: Range<u64> = 1 << 32..1 << 40;

/// Contexts that the process has at once, about.
const N_CONTEXTS: usize = 8;

/// Guests of the process.
const N_CALLERS: usize = 2;

/// What became of what was sent.
#[derive(Debug, Default)]
struct Seen {
    /// Operations that customs let through, by kind.
    n_posted: [usize; 20],
    n_late: usize,
    n_refused: usize,
    /// Of those that were posted, what the scheduler found not to fit.
    n_expelled: usize,
}

impl Seen {
    fn add(&mut self, other: &Self) {
        self.n_posted.iter_mut().zip(other.n_posted).for_each(|(sum, n)| *sum += n);
        self.n_late += other.n_late;
        self.n_refused += other.n_refused;
        self.n_expelled += other.n_expelled;
    }
}

/// The place of a kind of operation among all.
fn kind_of(operation: &Operation) -> usize {
    match operation {
        Operation::Create { .. } => 0,
        Operation::Open { .. } => 1,
        Operation::Edit { .. } => 2,
        Operation::Evict { .. } => 3,
        Operation::Steer { .. } => 4,
        Operation::Fork { .. } => 5,
        Operation::Ask { .. } => 6,
        Operation::DrawTogether { .. } => 7,
        Operation::SearchBeams(_) => 8,
        Operation::Mix { .. } => 9,
        Operation::Cancel { .. } => 10,
        Operation::Run { .. } => 11,
        Operation::Pulled { .. } => 12,
        Operation::Mask { .. } => 13,
        Operation::EndRun { .. } => 14,
        Operation::Save { .. } => 15,
        Operation::Forget { .. } => 16,
        Operation::LetGo { .. } => 17,
        Operation::Stats { .. } => 18,
        Operation::Release { .. } => 19,
    }
}

/// The process, and the world that it is in.
struct Attack {
    world: World,
    forger: Forger,
    customs: Customs,
    facts: ModelFacts,
    callers: Vec<CallerId>,
    /// As far as customs let it make some.
    own: Vec<(ContextId, CallerId)>,
    seen: Seen,
}

impl Attack {
    fn new(random: Random, seed: u64) -> Self {
        let mut world = World::by(Random::new(seed), seed, N_PAGES_MIN + N_PAGES_OF_HOLES);
        world.is_attacked = true;
        world.n_evictions_in_100 = 5;
        world.n_steers_in_100 = 5;
        world.users.push(Account::new("user", Budget::UNLIMITED, None));
        let facts = ModelFacts::of(&world.scheduler.limits);
        let mut attack = Self {
            world,
            forger: Forger::new(random, NUMBERS.start),
            customs: Customs::new(NUMBERS),
            facts,
            callers: Vec::new(),
            own: Vec::new(),
            seen: Seen::default(),
        };
        (0..N_CALLERS).for_each(|_| attack.enter());
        attack
    }

    /// Another guest of the process: of a user of its own, or of one that honest guests have too.
    fn enter(&mut self) {
        let actor = [0, 2, 2][self.forger.random.below(3)];
        let n_pages = if self.forger.random.below(4) == 0 { 3 } else { u64::MAX };
        let budget = Budget { n_pages, ..Budget::UNLIMITED };
        let account = Account::new("guest", budget, Some(self.world.users[actor].clone()));
        let guest = GuestId(self.forger.random.next());
        let owner = Owner { actor: ActorId(actor as u32), session: SessionId(7), guest, account };
        let caller = self.world.guests.enter(&mut self.world.scheduler, owner);
        self.world.guests.note_hostile(caller);
        self.customs.enter(caller, usize::MAX).expect("as many as there are");
        self.callers.push(caller);
    }

    /// A guest of the process ends, and what it had is let go of.
    fn leave(&mut self, idx: usize) {
        let caller = self.callers.swap_remove(idx);
        for operation in self.customs.leave(caller) {
            self.world.apply(operation);
        }
        self.own.retain(|(_, owner)| *owner != caller);
        self.world.scheduler.commons.leave_for_good(caller);
    }

    /// What is known of contexts: the process's own, and those of others.
    fn look_around(&mut self) {
        let lengths = self.own.iter().map(|&(id, owner)| {
            let context = self.world.scheduler.contexts.get(&id);
            (id, owner, context.map_or(0, |context| context.kv.n_kept()))
        });
        self.forger.own = lengths.collect();
        self.forger.others = self.world.contexts.iter().map(|(id, model)| (*id, model.caller)).collect();
        self.forger.callers.clone_from(&self.callers);
    }

    /// Sends one operation.
    fn send_one(&mut self) {
        self.look_around();
        let from = self.callers[self.forger.random.below(self.callers.len())];
        let operation = match self.forger.random.below(8) {
            0..4 => self.forger.forge(from),
            _ => match self.world.recorded.is_empty() {
                true => self.forger.forge(from),
                false => {
                    let idx = self.forger.random.below(self.world.recorded.len());
                    let operation = self.world.recorded[idx].clone();
                    self.forger.replay(from, operation)
                }
            },
        };
        let operation = match self.forger.random.below(4) {
            0 => self.forger.garble(operation),
            _ => Some(operation),
        };
        if let Some(operation) = operation {
            let n_times = if self.forger.random.below(16) == 0 { 2 } else { 1 };
            for _ in 0..n_times {
                self.send(from, operation.clone());
            }
        }
    }

    fn send(&mut self, from: CallerId, operation: Operation) {
        let facts = &self.facts;
        let is_there = |model: ModelId| (model == ModelId::default()).then(|| facts.clone());
        let checked = match self.customs.check(from, operation, is_there) {
            Ok(Some(operation)) => operation,
            Ok(None) => {
                self.seen.n_late += 1;
                return;
            }
            Err(_) => {
                self.seen.n_refused += 1;
                return;
            }
        };
        self.seen.n_posted[kind_of(&checked)] += 1;
        match &checked {
            Operation::Create { id, .. } | Operation::Open { id, .. } => self.own.push((*id, from)),
            Operation::Fork { child, .. } => self.own.push((*child, from)),
            Operation::Release { id, .. } => self.own.retain(|(own, _)| own != id),
            Operation::Ask { ask: Ask::Keep, .. } if self.world.scheduler.lacks_row() => {
                self.world.scheduler.give_row(Some(KeptRow::new(())));
            }
            _ => {}
        }
        self.world.apply_of_others(checked);
    }

    /// One stream of operations of the process, and what honest guests do meanwhile.
    fn stream(&mut self) {
        for _ in 0..4 + self.forger.random.below(12) {
            self.send_one();
        }
        while self.own.len() > N_CONTEXTS {
            let (id, from) = self.own[self.forger.random.below(self.own.len())];
            let n_pulled = self.forger.random.below(3);
            self.send(from, Operation::Release { id, n_pulled });
        }
        if self.forger.random.below(16) == 0 {
            let idx = self.forger.random.below(self.callers.len());
            self.leave(idx);
            self.enter();
        }
        for _ in 0..2 {
            self.world.act();
            if self.world.random.below(2) == 0 {
                self.world.step();
            }
        }
    }

    /// The process is ended.
    fn finish(mut self) -> (World, Seen) {
        while !self.callers.is_empty() {
            self.leave(0);
        }
        assert_eq!(self.customs.n_contexts(), 0, "all are let go of");
        // What it saved is its user's, who forgets that in the end.
        for key in self.world.scheduler.saved.keys() {
            self.world.saved.entry(key.clone()).or_default();
        }
        self.seen.n_expelled = self.world.guests.n_expelled();
        (self.world.finish(), self.seen)
    }
}

/// Sends to a scheduler what these bytes say, past customs, beside honest guests.
///
/// # Panics
/// The scheduler panics, an honest guest gets something else than alone, or something is left of the process.
#[cfg(feature = "fuzzing")]
pub fn run(bytes: &[u8]) {
    let Some((seed, bytes)) = bytes.split_first_chunk() else { return };
    let seed = u64::from(u16::from_le_bytes(*seed));
    let mut attack = Attack::new(Random::given(bytes, mix(seed)), seed);
    while attack.forger.random.is_given() {
        attack.stream();
        attack.world.check_sequences();
    }
    attack.finish();
}

#[test]
fn whatever_a_process_sends_honest_guests_get_what_they_get_alone() {
    const N_WORLDS: u64 = 100;
    const N_STREAMS: usize = 200;
    let (mut seen, mut n_answers, mut n_tokens) = (Seen::default(), 0, 0);
    for seed in 0..N_WORLDS {
        let mut attack = Attack::new(Random::new(mix(seed)), seed);
        for n in 0..N_STREAMS {
            attack.stream();
            if n % 8 == 0 {
                attack.world.check_sequences();
            }
        }
        let (world, of_process) = attack.finish();
        seen.add(&of_process);
        n_answers += world.n_answers;
        n_tokens += world.n_tokens_pulled;
    }
    // Of rows only those that were kept are let go of.
    let but_two = seen.n_posted.iter().enumerate().filter(|(kind, _)| !matches!(kind, 17 | 18));
    assert!(but_two.clone().all(|(_, &n)| n > 500) && seen.n_posted[17] > 100, "{seen:?}");
    assert_eq!(seen.n_posted[18], 0, "counters tell of all users");
    assert!(seen.n_refused > 10_000 && seen.n_expelled > 2_000 && seen.n_late > 500, "{seen:?}");
    assert!(n_answers > 500 && n_tokens > 500, "{n_answers} answers, {n_tokens} tokens");
}
