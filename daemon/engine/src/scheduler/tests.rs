//! Random operations against a model without pages, batches or run-ahead.

mod ask;
mod beams;
mod causes;
mod checked;
mod cost;
mod evict;
mod failing;
mod forced;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzed;
mod guest;
pub(crate) mod hash_backend;
mod hidden;
pub(crate) mod hostile;
mod joint;
mod late;
mod mixture;
mod particles;
mod progress;
mod pull;
mod random;
mod ranks;
mod resize;
mod saved;
mod shares;
mod shown;
mod steered;
mod steps;
mod trees;
mod verify;
mod victims;

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::rc::Rc;
use std::sync::Arc;

use self::guest::Guests;
use self::hash_backend::{HashBackend, VOCAB, drawn, fails, mix, ranked, score};
use self::random::Random;
use super::{Plan, Scheduler, SchedulerSettings};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, Priority, Resource, SessionId, USER};
use crate::backend::{AskLimits, Limits, PAGE_LEN, SteeringTimes};
use crate::batch::{Output, Seen, Token, Top};
use crate::causes::Cause;
use crate::command::{Ahead, Answer, Ask, ContextId, Edit, MaskSource, ModelId, Operation, RunSettings};
use crate::completion::{CallerId, Done, Outbox};
use crate::error::EngineError;
use crate::kv::{PrefixScope, SegmentLengths};
use crate::mailbox::Ticket;
use crate::port::Port;
use crate::run::{Finish, PullReport, RunEvent, RunQueue};
use crate::sampling::{Looks, Sampler, TokenMask};

const N_POSITIONS: usize = 200;
/// Those of one context.
const N_PAGES_MIN: usize = N_POSITIONS.div_ceil(PAGE_LEN);

struct Stream {
    queue: RunQueue,
    seed: u64,
    n_left: usize,
    has_ended: bool,
    /// Whether its caller supplies the masks, and what it expected in the places for which it did.
    is_masked: bool,
    masked: VecDeque<Option<Token>>,
    /// How often something else was drawn.
    n_turns: u32,
}

/// What the caller knows of a context.
struct Model {
    tokens: Vec<Token>,
    /// What was taken out of them.
    past: evict::Past,
    n_synced: usize,
    stream: Option<Stream>,
    question: Option<Question>,
    /// The mixture that it is part of.
    mixed: Option<Rc<RefCell<mixture::Mixing>>>,
    /// Whether it is a member of a job that is not done.
    is_member: bool,
    caller: CallerId,
    actor: ActorId,
}

struct Question {
    place: Ticket,
    expected: Answer,
    /// What is appended once it is answered.
    then: Vec<Token>,
    /// Pages that its context takes on the way to the answer, at most.
    n_pages: usize,
}

/// A context of the one model that there is.
fn context_id(number: u64) -> ContextId {
    ContextId { model: ModelId::default(), number }
}

impl Scheduler {
    /// The scheduler of a model that is alone on its device.
    fn alone(limits: Limits, settings: SchedulerSettings) -> Self {
        Self::new(limits, 0, settings, Outbox::default())
    }
}

struct World {
    random: Random,
    scheduler: Scheduler,
    /// What operations and completions travel over.
    port: Port,
    guests: Guests,
    backend: HashBackend,
    /// What the longest context needs.
    n_pages_min: usize,
    /// Steps that the backend has done and the scheduler has not heard of.
    under_way: VecDeque<(Plan, Vec<Output>)>,
    users: Vec<Arc<Account>>,
    contexts: Vec<(ContextId, Model)>,
    jobs: Vec<joint::Job>,
    n_jobs: joint::Seen,
    n_mixed: mixture::Seen,
    searches: Vec<beams::Searched>,
    n_searches: beams::Seen,
    saved: HashMap<(ActorId, String), (Vec<Token>, evict::Past)>,
    next_id: u64,
    n_answers: usize,
    n_tokens_pulled: usize,
    n_over_budget: usize,
    n_faults: usize,
    n_verified: usize,
    n_trees: usize,
    n_masks_late: usize,
    n_masks_ahead: usize,
    n_turns: usize,
    n_moved_within: usize,
    /// Tokens that were taken out of contexts.
    n_evicted: usize,
    /// Share of operations that take tokens out, of 100.
    n_evictions_in_100: usize,
    /// Times that contexts were steered, and the share of operations that do so, of 100.
    n_steered: usize,
    n_steers_in_100: usize,
    /// Times that pages were given up, by what was missed most.
    n_parted: [usize; 4],
    /// Segments of tokens that were shared, summed over all that was done.
    n_segments_shared: usize,
    /// Whether a process that is no guest of ours is there too, and what honest guests have asked meanwhile.
    is_attacked: bool,
    recorded: Vec<Operation>,
}

/// Operations that are kept to be sent again.
const N_RECORDED_MAX: usize = 500;

impl World {
    fn new(seed: u64) -> Self {
        Self::with_pages(seed, N_PAGES_MIN)
    }

    /// One of so many pages at least.
    fn with_pages(seed: u64, n_pages_min: usize) -> Self {
        Self::by(Random::new(seed), seed, n_pages_min)
    }

    fn by(mut random: Random, seed: u64, n_pages_min: usize) -> Self {
        // From ample to so few that single contexts push each other out.
        let n_pages = n_pages_min + random.below(60);
        let n_host_pages = random.below(30);
        let limits = Limits {
            n_pages,
            n_granule_pages: 1,
            n_host_pages,
            // Of the long ones a plan moves from one to 16.
            page_bytes: [128, 4 << 20][(seed / 2 % 2) as usize],
            n_rows_max: 1 + random.below(8),
            n_tokens_max: 1 + random.below(64),
            n_tile_tokens: [1, 4, 100][random.below(3)],
            n_block_tokens: [1, 8, 100][random.below(3)],
            n_queries_per_key: 4,
            n_positions_max: N_POSITIONS,
            vocab_size: VOCAB as usize,
            hidden_size: 1,
            n_layers: 6,
            n_steps_under_way: 1 + random.below(2),
            n_slots: 1 << 16,
            n_states: [0, 5, 1 << 16][random.below(3)],
            n_stretches_max: 8,
            logits_tokens: 1.0,
            steering: SteeringTimes::NONE,
            asks: AskLimits::NONE,
        };
        let settings = SchedulerSettings {
            prefix_scope: if random.below(2) == 0 { PrefixScope::Actor } else { PrefixScope::Shared },
            // So short that contexts have several.
            segments: SegmentLengths {
                n_tokens: PAGE_LEN << (seed / 3 % 3),
                n_bundle_blocks: 1 + (seed % 3) as usize,
            },
            ..SchedulerSettings::alone(limits.n_tokens_max)
        };
        Self {
            random,
            scheduler: Scheduler::alone(limits, settings),
            port: if seed.is_multiple_of(2) { Port::Direct } else { Port::Encoded },
            guests: Guests::default(),
            backend: HashBackend::new(n_pages, n_host_pages),
            n_pages_min,
            under_way: VecDeque::new(),
            users: (0..2).map(|user| user_of(seed, user)).collect(),
            contexts: Vec::new(),
            jobs: Vec::new(),
            n_jobs: joint::Seen::default(),
            n_mixed: mixture::Seen::default(),
            searches: Vec::new(),
            n_searches: beams::Seen::default(),
            saved: HashMap::new(),
            next_id: 0,
            n_answers: 0,
            n_tokens_pulled: 0,
            n_over_budget: 0,
            n_faults: 0,
            n_verified: 0,
            n_trees: 0,
            n_masks_late: 0,
            n_masks_ahead: 0,
            n_turns: 0,
            n_moved_within: 0,
            n_evicted: 0,
            n_evictions_in_100: 0,
            n_steered: 0,
            n_steers_in_100: 0,
            n_parted: [0; 4],
            n_segments_shared: 0,
            is_attacked: false,
            recorded: Vec::new(),
        }
    }

    fn apply(&mut self, operation: Operation) {
        if self.is_attacked {
            match self.recorded.len() {
                N_RECORDED_MAX => {
                    let idx = self.random.below(N_RECORDED_MAX);
                    self.recorded[idx] = operation.clone();
                }
                _ => self.recorded.push(operation.clone()),
            }
        }
        self.apply_of_others(operation);
    }

    /// Applies what no honest guest asked.
    fn apply_of_others(&mut self, operation: Operation) {
        self.scheduler.apply(self.port.carry(operation));
        self.guests.deliver(&self.scheduler, self.port);
    }

    fn new_id(&mut self) -> ContextId {
        self.next_id += 1;
        context_id(self.next_id)
    }

    fn owner(&mut self) -> Owner {
        let actor = self.random.below(2);
        // Some guests come to the end of their budgets in the middle of whatever they do.
        let n_pages = if self.random.below(4) == 0 { 1 + self.random.below(8) as u64 } else { u64::MAX };
        let n_tokens = if self.random.below(8) == 0 { self.random.below(150) as u64 } else { u64::MAX };
        let budget = Budget { n_pages, n_tokens, ..Budget::UNLIMITED };
        let account = Account::new("guest", budget, Some(self.users[actor].clone()));
        let session = SessionId(self.random.below(2) as u64);
        Owner { actor: ActorId(actor as u32), session, guest: GuestId(self.random.next()), account }
    }

    fn tokens(&mut self, n: usize) -> Vec<Token> {
        // Few distinct texts, so that prefixes coincide.
        let text = self.random.below(3) as u64;
        (0..n).map(|i| (mix(text * 1000 + i as u64) % VOCAB) as Token).collect()
    }

    fn edit(model: &mut Model, seen: &mut mixture::Seen) -> Edit {
        let appended = model.tokens[model.n_synced..].to_vec();
        let n_kept = std::mem::replace(&mut model.n_synced, model.tokens.len());
        let n_pulled = Self::end_run(model, seen);
        Edit { n_kept, appended, n_pulled }
    }

    /// Ends what a context decodes; returns how many tokens of it were pulled.
    fn end_run(model: &mut Model, seen: &mut mixture::Seen) -> usize {
        let mixed = model.end_mixing(seen);
        model.stream.take().map_or(mixed.unwrap_or(0), |stream| stream.queue.n_pulled())
    }

    /// A context without an open question, if there is one.
    fn pick(&mut self) -> Option<usize> {
        let free: Vec<usize> =
            (0..self.contexts.len()).filter(|&idx| self.contexts[idx].1.is_free()).collect();
        if free.is_empty() { None } else { Some(free[self.random.below(free.len())]) }
    }

    fn act(&mut self) {
        let choice = self.random.below(100);
        if self.random.below(50) == 0 {
            self.resize();
        }
        if self.contexts.is_empty() || (choice < 8 && self.contexts.len() < 12) {
            let (id, owner) = (self.new_id(), self.owner());
            let actor = owner.actor;
            let caller = self.guests.enter(&mut self.scheduler, owner);
            self.apply(Operation::Create { id, caller });
            let (tokens, stream, question, mixed) = (Vec::new(), None, None, None);
            let past = evict::Past::default();
            let model =
                Model { tokens, past, n_synced: 0, stream, question, mixed, is_member: false, caller, actor };
            self.contexts.push((id, model));
            return;
        }
        if choice < 14 {
            // Also in the middle of a question: the guest was killed.
            let idx = self.random.below(self.contexts.len());
            let (id, mut model) = self.contexts.swap_remove(idx);
            self.disturb(id);
            let n_pulled = Self::end_run(&mut model, &mut self.n_mixed);
            return self.apply(Operation::Release { id, n_pulled });
        }
        let Some(idx) = self.pick() else { return };
        let id = self.contexts[idx].0;
        let is_empty = self.contexts[idx].1.tokens.is_empty();
        if self.n_evictions_in_100 > 0 && self.random.below(100) < self.n_evictions_in_100 {
            return self.evict(idx);
        }
        if self.n_steers_in_100 > 0 && self.random.below(100) < self.n_steers_in_100 {
            return self.steer(idx);
        }
        match choice {
            14..34 => {
                let n = 1 + self.random.below(40);
                let n = n.min(self.contexts[idx].1.n_free());
                let tokens = self.tokens(n);
                let model = &mut self.contexts[idx].1;
                model.tokens.extend(tokens);
                if model.stream.is_some() || model.mixed.is_some() {
                    let edit = Self::edit(model, &mut self.n_mixed);
                    self.apply(Operation::Edit { id, edit });
                }
            }
            34..44 => {
                let n = self.random.below(self.contexts[idx].1.tokens.len() + 1);
                let model = &mut self.contexts[idx].1;
                model.truncate(n);
                model.n_synced = model.n_synced.min(n);
                let edit = Self::edit(model, &mut self.n_mixed);
                self.apply(Operation::Edit { id, edit });
            }
            44..54 if self.contexts.len() < 12 => {
                let child = self.new_id();
                let model = &mut self.contexts[idx].1;
                let edit = Self::edit(model, &mut self.n_mixed);
                let forked = Model {
                    tokens: model.tokens.clone(),
                    past: model.past.clone(),
                    n_synced: model.tokens.len(),
                    stream: None,
                    question: None,
                    mixed: None,
                    is_member: false,
                    caller: model.caller,
                    actor: model.actor,
                };
                self.contexts.push((child, forked));
                self.apply(Operation::Fork { id, edit, child });
            }
            54..72 if !is_empty => self.ask(idx),
            72..75 if !is_empty => self.draw_together(idx),
            75..80 => self.save_or_open(idx),
            80..82 if !is_empty => self.search(idx),
            _ if !is_empty => {
                let is_mixed = choice >= 92;
                for _ in 0..1 + self.random.below(8) {
                    if is_mixed {
                        self.pull_mixed(idx);
                    } else {
                        self.pull(idx);
                    }
                    if self.random.below(2) == 0 {
                        self.step();
                    }
                }
            }
            _ => {}
        }
    }

    /// Plans steps as long as more can be under way, then takes in the oldest.
    fn step(&mut self) {
        self.supply_some_masks();
        while self.lets_draw()
            && self.under_way.len() < self.scheduler.limits.n_steps_under_way
            && self.scheduler.has_work()
        {
            let plan = self.scheduler.plan();
            let batch = self.scheduler.batch(&plan, Vec::new());
            assert!(batch.rows.len() <= self.scheduler.limits.n_rows_max);
            let n_tokens: usize = batch.rows.iter().map(|row| row.end() - row.start).sum();
            assert!(n_tokens <= self.scheduler.limits.n_tokens_max);
            assert!(plan.has_rows() || batch.copies.is_empty(), "without rows nothing is copied");
            let outputs = self.backend.run(&plan.moves, &batch);
            Self::check_mixtures(&batch, &mut self.n_mixed);
            drop(batch);
            if self.scheduler.note_rows_written(&plan) {
                for id in self.scheduler.commons.kept.take_ready() {
                    self.scheduler.note_rows_ready(id);
                }
            }
            self.check_jobs(&plan);
            if !plan.has_rows() {
                break;
            }
            self.under_way.push_back((plan, outputs));
            self.check();
            // Commands come while a step is under way.
            if self.random.below(3) == 0 {
                return;
            }
        }
        let is_held_up = self.under_way.len() == 1 && !self.lets_draw();
        if !is_held_up && let Some((plan, outputs)) = self.under_way.pop_front() {
            let elapsed_ns = 1_000_000 + self.random.below(1_000_000) as u64;
            self.scheduler.complete(plan, outputs, elapsed_ns);
            self.backend.move_cells(&self.scheduler.take_cell_moves());
        }
        self.check();
        self.take_answers();
    }

    fn take_answers(&mut self) {
        self.guests.deliver(&self.scheduler, self.port);
        self.take_drawn();
        self.take_found();
        // One that was just cancelled or refused has ended, and its caller has not looked.
        let n_searches = self.searches.iter().filter(|search| !search.is_disturbed()).count();
        let is_right = self.is_attacked || self.scheduler.jobs.n_searches() <= n_searches;
        assert!(is_right, "no search is forgotten");
        for (id, model) in &mut self.contexts {
            let Some(Question { place, expected, then, n_pages }) = &mut model.question else { continue };
            match place.try_take() {
                Some(Done::Answer(answer)) => {
                    match answer {
                        Err(EngineError::Budget(_)) => self.n_over_budget += 1,
                        Err(EngineError::NoPages { n_needed, n_pages: n_there }) => {
                            evict::check_refused(n_needed, n_there, *n_pages);
                        }
                        answer => {
                            let answer = answer.expect("nothing was wrong with the question");
                            let account = &self.scheduler.contexts[id].owner.account;
                            let may_lack_pages = *n_pages > self.n_pages_min;
                            verify::check_answer(&answer, expected, account, may_lack_pages);
                            self.n_answers += 1;
                            self.n_verified += usize::from(matches!(expected, Answer::Verified(_)));
                            model.tokens.append(then);
                        }
                    }
                    model.question = None;
                }
                Some(other) => panic!("{other:?}"),
                None => {}
            }
        }
    }

    fn finish(mut self) -> Self {
        // Whatever is asked comes to its end, however tight the pages are.
        for _ in 0..20_000 {
            self.step();
            let has_jobs = !self.jobs.is_empty() || !self.searches.is_empty();
            if !has_jobs && self.contexts.iter().all(|(_, model)| model.question.is_none()) {
                break;
            }
        }
        assert!(self.contexts.iter().all(|(_, model)| model.question.is_none()), "a question starves");
        assert!(self.jobs.is_empty(), "a job starves");
        assert!(self.searches.is_empty(), "a search starves");
        for (id, _) in std::mem::take(&mut self.contexts) {
            self.apply(Operation::Release { id, n_pulled: 0 });
        }
        for ((actor, name), _) in std::mem::take(&mut self.saved) {
            let owner = Owner { actor, ..self.owner() };
            let caller = self.guests.enter(&mut self.scheduler, owner);
            let tag = self.guests.ticket(caller).tag();
            self.apply(Operation::Forget { model: ModelId::default(), caller, name, tag });
        }
        while !self.under_way.is_empty() {
            self.step();
        }
        self.check();
        assert!(self.scheduler.jobs.is_empty(), "no mixture is forgotten");
        let stats = self.scheduler.stats();
        assert_eq!(stats.n_pages_free + stats.n_pages_cached, stats.n_pages, "every page came back");
        assert_eq!((stats.n_pages_on_host, stats.n_contexts, stats.n_saved), (0, 0, 0));
        self
    }
}

/// In half of the worlds the second user has a higher share and rank than the first.
fn user_of(seed: u64, user: u32) -> Arc<Account> {
    let priority = match (seed / 5).is_multiple_of(2) || user == 0 {
        true => Priority::EVEN,
        false => Priority { share: NonZeroU32::new(3).expect("above 0"), rank: 1 },
    };
    Account::with_priority(USER, Budget::UNLIMITED, None, priority)
}

#[test]
fn random_operations_give_what_a_model_without_pages_gives() {
    let (mut n_answers, mut n_tokens, mut n_swaps, mut n_recomputed, mut n_cached) = (0, 0, 0, 0, 0);
    let (mut n_over_budget, mut n_faults, mut n_drawn_rows, mut n_on_new_pages, mut n_in_vain) =
        (0, 0, 0, 0, 0);
    let (mut n_jobs, mut n_searches) = (joint::Seen::default(), beams::Seen::default());
    let mut n_mixed = mixture::Seen::default();
    let (mut n_verified, mut n_rows_of_head, mut n_moved_within) = (0, 0, 0);
    let (mut n_trees, mut n_cells_moved) = (0, 0);
    let (mut n_masks_ahead, mut n_turns, mut n_forced) = (0, 0, 0);
    let (mut n_masks_late, mut n_sat_out, mut n_heads_with_pages, mut n_told_again) = (0, 0, 0, 0);
    let mut n_parted = [0; 4];
    let (mut n_taken_apart, mut n_segments_shared) = (0, 0);
    for seed in 0..200 {
        let mut world = World::new(seed);
        for n_acts in 0..600 {
            world.act();
            if n_acts % 8 == 0 {
                world.check_sequences();
            }
            world.n_segments_shared += world.scheduler.pages.tokens.n_shared();
            if world.random.below(3) == 0 {
                world.step();
            }
        }
        let world = world.finish();
        n_answers += world.n_answers;
        n_tokens += world.n_tokens_pulled;
        n_over_budget += world.n_over_budget;
        n_faults += world.n_faults;
        n_verified += world.n_verified;
        n_trees += world.n_trees;
        n_cells_moved += world.backend.n_cells_moved;
        n_moved_within += world.n_moved_within;
        n_parted.iter_mut().zip(world.n_parted).for_each(|(sum, n)| *sum += n);
        n_rows_of_head += world.backend.n_rows_of_head;
        n_heads_with_pages += world.backend.n_heads_with_pages;
        n_told_again += world.backend.n_told_again;
        n_masks_late += world.n_masks_late;
        n_masks_ahead += world.n_masks_ahead;
        n_turns += world.n_turns;
        n_taken_apart += world.scheduler.pages.n_bundles_taken_apart();
        n_segments_shared += world.n_segments_shared;
        n_jobs.add(&world.n_jobs);
        n_searches.add(&world.n_searches);
        n_mixed.add(&world.n_mixed);
        n_drawn_rows += world.backend.n_drawn_rows;
        n_on_new_pages += world.backend.n_drawn_rows_on_new_pages;
        let stats = world.scheduler.stats();
        n_swaps += stats.n_swaps_out;
        n_recomputed += stats.n_tokens_again;
        n_cached += stats.n_tokens_cached;
        n_in_vain += stats.causes.n_rows_in_vain();
        n_sat_out += stats.causes[Cause::RowsSatOut];
        n_forced += stats.n_tokens_forced;
    }
    // The test is worth nothing if the schedules never reach these paths.
    assert!(n_answers > 5_000 && n_tokens > 5_000, "{n_answers} answers, {n_tokens} tokens");
    assert!(n_moved_within > 300, "{n_moved_within} pages moved within the device");
    assert!(n_parted[..3].iter().all(|&n| n > 100), "{n_parted:?}");
    assert!(n_taken_apart > 300, "{n_taken_apart} bundles that others shared");
    assert!(n_segments_shared > 100_000, "{n_segments_shared} segments of tokens shared for a while");
    assert!(n_verified > 500 && n_rows_of_head > 300, "{n_verified} {n_rows_of_head}");
    assert!(
        n_trees > 500 && n_cells_moved > 100,
        "{n_trees} trees, {n_cells_moved} tokens of branches copied"
    );
    assert!(n_heads_with_pages > 300 && n_heads_with_pages < n_rows_of_head, "{n_heads_with_pages}");
    assert!(n_told_again < 10_000, "{n_told_again} pages were told again as they were");
    assert!(n_over_budget > 500 && n_faults > 50, "{n_over_budget} {n_faults}");
    assert!(n_drawn_rows > 3_000 && n_on_new_pages > 100, "{n_drawn_rows} {n_on_new_pages}");
    assert!(n_in_vain > 300, "{n_in_vain} rows in vain");
    n_jobs.check();
    n_searches.check();
    n_mixed.check();
    assert!(n_masks_ahead > 1_000 && n_turns > 50 && n_forced > 300, "{n_masks_ahead} {n_turns} {n_forced}");
    assert!(n_masks_late > 300 && n_sat_out > 300, "{n_masks_late} {n_sat_out}");
    assert!(
        n_swaps > 1_000 && n_recomputed > 100 && n_cached > 10_000,
        "{n_swaps} {n_recomputed} {n_cached}"
    );
}
