//! Decides what each step computes. Pure: no I/O, no clock, no threads.
//!
//! There is one for each model of a device. What models share, so that users are served fairly whatever model they ask,
//! is [`Commons`]: it is lent to one model at a time.
//!
//! [`Scheduler::apply`] takes operations in, [`Scheduler::plan`] makes the next step, [`Scheduler::batch`] shows
//! it to the backend, [`Scheduler::complete`] takes the outputs and answers.
//!
//! What comes when: `commands` takes operations in, at the price that `price` says. For a step, `admission` and `room` see
//! to pages (`held`: who makes room for others; `terms`: after how long; `holders`, `spares`: which contexts have some to give; `packs`: what
//! evictions left in them), `joint` to jobs that ride together, `mixture` to those that go on from token to token, `beams`
//! to those that search, `guesses` to trees that are verified, `late` to masks, `kept` to rows
//! for draws of other models, `expected` to tokens that masks force,
//! `slots` to hidden states, `enqueue` says who waits for a step, `fair` which owner is next, `arrears` which user has fallen
//! behind its pace, `bounds`, `asked` and `moves`
//! what one step has room for, `cost` how long it takes and `charges` which account pays; `plan` puts it together,
//! `complete` or `failure` takes it in, `returns` and `waits` note which guests came back and which contexts waited, `prefill`
//! how far prompts are.
//! `parts` and `resize` give memory to other models and take it.
//!
//! A context with work waits in the queue (`FairQueue`) until a plan looks at it, and in the line (`line`) as long as there
//! are not pages for all that it needs. What is said of its pages:
//!
//! | a page is | because | until | so that |
//! |---|---|---|---|
//! | promised | a context was admitted for it and has not taken it | it is taken, or the context leaves | no other is admitted for it |
//! | marked | admitted contexts hold it, in the count of one plan | the next count | room is not made at their cost |
//! | pinned | a row of this plan or one under way needs it, or a copy reads it | the plan is done | it neither moves nor is given again |
//! | idle | it has no holder and the prefix cache knows it | it is found or reclaimed | it is the first to go |
//! | a victim's | its context waits for nothing, or stands at the line's end | room was made | tails of the least deserving go first |
//! | spare | a question left it past the tokens of its context | an edit, or want of pages | what is appended is not computed again |

mod admission;
mod archive;
mod arrears;
mod asked;
mod beams;
mod bounds;
mod charges;
mod commands;
mod complete;
mod cost;
mod enqueue;
mod expected;
mod failure;
mod fits;
mod guesses;
mod held;
mod histories;
mod holders;
mod joint;
mod kept;
mod late;
mod line;
mod mixture;
mod moves;
mod packs;
mod parts;
mod plan;
mod prefill;
mod price;
mod relief;
mod resize;
mod returns;
mod room;
mod slots;
mod spares;
mod steered;
mod terms;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    not(test),
    expect(dead_code, unused_imports, reason = "of the tests, fuzzers run the random operations alone")
)]
pub(crate) mod tests;
mod waits;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::account::{ActorId, GuestId, Owner};
use crate::archive::Restored;
use crate::backend::Limits;
use crate::batch::{CellMove, SlotId};
use crate::causes::{Cause, Causes};
use crate::command::ContextId;
use crate::completion::{CallerId, Outbox};
pub(crate) use crate::fair::VirtualTimes;
use crate::fair::{Class, FairQueue, Lane, Seat};
use crate::history::History;
use crate::job::Work;
use crate::kept::{KeptRow, KeptRows};
use crate::kv::{Footprint, PageTable, PrefixScope, SegmentLengths, Sequence};
use crate::run::AheadWindow;
use crate::sampling::Operator;
use crate::stats::EngineStats;
use admission::Standing;
use arrears::Arrears;
use bounds::{Pace, PromptDebt};
use cost::Costs;
use held::Held;
use holders::{Holders, Listing};
use joint::Jobs;
use line::Line;
use moves::Link;
use prefill::Prefill;
use returns::Returns;
use slots::Slots;
use spares::Spares;

pub(crate) use archive::Restoring;
pub(crate) use late::MasksOfStep;
pub(crate) use parts::{Sacrifice, Source, Want};
pub(crate) use plan::{Move, Plan};
pub(crate) use resize::Taking;
pub(crate) use returns::Privilege;

/// What the scheduler is told at start-up.
#[derive(Clone, Debug)]
pub(crate) struct SchedulerSettings {
    /// The model's place on its device.
    pub(crate) place: usize,
    /// Hash of everything that determines the bytes of a page, tokens and position aside.
    pub(crate) model_fingerprint: [u8; 32],
    pub(crate) prefix_scope: PrefixScope,
    /// Tokens up to which prompts fill a step, and are cut, and guesses beside them; of contexts that decode there may be
    /// more.
    pub(crate) n_step_tokens: usize,
    /// How much longer a step may last, while contexts decode, than it would without prompts.
    pub(crate) latency_multiple: f64,
    /// What contexts with a common beginning share as a whole.
    pub(crate) segments: SegmentLengths,
    /// What stands in front of everybody's samplers.
    pub(crate) operator: Option<Arc<Operator>>,
    /// Whether an archive keeps what is saved.
    pub(crate) is_archived: bool,
}

#[cfg(any(test, feature = "fuzzing"))]
impl SchedulerSettings {
    /// Those of a model that is alone on its device, for tests.
    pub(crate) fn alone(n_step_tokens: usize) -> Self {
        Self {
            place: 0,
            model_fingerprint: [7; 32],
            prefix_scope: PrefixScope::Actor,
            n_step_tokens,
            latency_multiple: 1.6,
            segments: SegmentLengths::default(),
            operator: None,
            is_archived: false,
        }
    }
}

#[derive(Debug)]
struct ContextState {
    caller: CallerId,
    owner: Owner,
    /// Its guest's place in the queue.
    seat: Seat,
    slot: SlotId,
    kv: Sequence,
    work: Option<Work>,
    /// While its work has a prompt to compute.
    prefill: Option<Prefill>,
    window: AheadWindow,
    /// Whether it stands in the queue.
    is_queued: bool,
    /// The device's last step that computed something for it.
    last_step: u64,
    /// The device's last step in which tokens of it were steered.
    steered_in: Option<u64>,
    /// The device's last step before it could be computed, while it could and has no row.
    ready_since: Option<u64>,
    standing: Standing,
    under_way: Option<UnderWay>,
    listing: Listing,
    /// Counts what ended the context's work, so that rows of work that has ended since are told apart.
    epoch: u64,
}

/// Up to where a context's rows go that were planned and have not been taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UnderWay {
    n_rows: usize,
    /// Position after the last token of the last row.
    end: usize,
    /// Draws whose tokens are not known yet.
    n_draws: usize,
    /// Whether the last of them may sit out: its mask has not come.
    waits_for_mask: bool,
}

/// Whose a saved context is, and its name.
type SavedKey = (ActorId, String);

/// A step that was planned and has not been taken in.
#[derive(Debug)]
struct StepUnderWay {
    step: u64,
    /// Whose rows it has.
    ids: Vec<ContextId>,
}

/// A context kept under a name.
#[derive(Debug)]
struct Saved {
    kv: Sequence,
    /// As its caller had them.
    tokens: Arc<History>,
    _footprint: Footprint,
    owner: Owner,
    /// The device's step when it was saved or last opened.
    last_step: u64,
    listing: Listing,
    /// Tells it from what was saved under its name before.
    version: u64,
    /// What came back from an archive, until the first guest that opens it is told.
    restored: Restored,
}

/// What the models of a device share.
#[derive(Debug, Default)]
pub(crate) struct Commons {
    /// Contexts that could be computed now.
    queue: FairQueue<ContextId>,
    /// Callers that have entered and not left.
    callers: FxHashMap<CallerId, Owner>,
    /// The number of the last step of any model that was planned.
    step: u64,
    /// Steps of all models that were taken in.
    n_steps: u64,
    /// Steps of all models that were planned and neither taken in nor failed.
    n_under_way: usize,
    link: Link,
    /// By the models' places.
    decoding: Vec<Option<LastDecode>>,
    /// Whether a guest that was answered by the last step and asks now comes too late for a device that stands still.
    are_late: bool,
    /// Rows of logits on the device.
    pub(crate) kept: KeptRows,
    arrears: Arrears,
}

/// The last step of a model with decode rows.
#[derive(Clone, Copy, Debug)]
struct LastDecode {
    step: u64,
    /// How long its decode rows alone would have taken.
    alone_ns: u64,
}

/// Steps of all models for which a model that decoded is taken to decode still.
const N_STEPS_BESIDE: u64 = 16;

impl Commons {
    /// The number of the last step of any model that was planned.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// A guest that asks from now on.
    pub(crate) fn enter(&mut self, caller: CallerId, owner: Owner) {
        self.callers.insert(caller, owner);
    }

    /// A guest that has asked its last; returns which it was.
    pub(crate) fn leave_for_good(&mut self, caller: CallerId) -> Option<GuestId> {
        self.kept.forget(caller);
        self.callers.remove(&caller).map(|owner| owner.guest)
    }

    /// On whose behalf a caller asks, while it is there.
    pub(crate) fn owner_of(&self, caller: CallerId) -> Option<&Owner> {
        self.callers.get(&caller)
    }

    /// Whose guest a caller is, while it is there.
    pub(crate) fn user_of(&self, caller: CallerId) -> Option<ActorId> {
        self.callers.get(&caller).map(|owner| owner.actor)
    }

    /// Callers that have entered and not left.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn n_callers(&self) -> usize {
        self.callers.len()
    }

    /// Whether a guest that asks from now on comes too late for a device that stands still.
    pub(crate) fn set_late(&mut self, are_late: bool) {
        self.are_late = are_late;
    }

    /// How long a decode step of another model than the one at this place takes, if there is one that decodes.
    fn decode_ns_beside(&self, place: usize) -> Option<u64> {
        let others = self.decoding.iter().enumerate().filter(|&(other, _)| other != place);
        let recent =
            others.filter_map(|(_, last)| last.filter(|last| self.n_steps - last.step <= N_STEPS_BESIDE));
        recent.map(|last| last.alone_ns).min()
    }

    /// A step of the model at this place was taken in; `alone_ns` is how long its decode rows alone would have taken, if
    /// it had any.
    fn note_step(&mut self, place: usize, alone_ns: Option<u64>) {
        self.n_steps += 1;
        if self.decoding.len() <= place {
            self.decoding.resize(place + 1, None);
        }
        if let Some(alone_ns) = alone_ns {
            self.decoding[place] = Some(LastDecode { step: self.n_steps, alone_ns });
        }
    }

    /// Forgets what waits for a model that is gone.
    pub(crate) fn clear(&mut self, place: usize) {
        [Class::Decode, Class::Prompt].into_iter().for_each(|class| self.queue.clear(Lane::of(place, class)));
        if let Some(last) = self.decoding.get_mut(place) {
            *last = None;
        }
    }
}

/// All contexts of one model and the order in which they are served.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    settings: SchedulerSettings,
    pages: PageTable,
    contexts: FxHashMap<ContextId, Box<ContextState>>,
    saved: BTreeMap<SavedKey, Saved>,
    /// Contexts that were saved, or came back.
    n_versions: u64,
    /// What was saved by the last operation, if an archive is to hear of it.
    newly_saved: Option<SavedKey>,
    slots: Slots,
    /// While it is the model's turn, what all models share.
    commons: Commons,
    /// Contexts that have to wait for pages.
    line: Line,
    held: Held,
    holders: Holders,
    source: Source,
    /// Pages that the model can have if others have what they cannot do without.
    n_pages_most: usize,
    n_markings: u64,
    costs: Costs,
    pace: Pace,
    debt: PromptDebt,
    returns: Returns,
    spares: Spares,
    jobs: Jobs,
    /// The number of the last step with decode rows.
    last_decode_step: u64,
    /// The number of the last step planned.
    step: u64,
    /// The steps that were planned and not taken in.
    steps_under_way: VecDeque<StepUnderWay>,
    /// Plans that were taken in, for their memory.
    spare_plans: Vec<Plan>,
    /// Of steps that were taken in, for their memory.
    spare_ids: Vec<Vec<ContextId>>,
    /// What is to be copied before any other step or move: branches of trees that were accepted.
    cell_moves: Vec<CellMove>,
    /// The place that the backend has for the next row that is to be kept, if it has one.
    next_row: Option<KeptRow>,
    /// Contexts that waited for a step when the last one was planned, and were not in it.
    n_left_waiting: usize,
    stats: EngineStats,
    outbox: Outbox,
}

impl Scheduler {
    /// The scheduler of a model; what is to be given back goes into `outbox`.
    pub(crate) fn new(
        limits: Limits,
        weight_bytes: u64,
        settings: SchedulerSettings,
        outbox: Outbox,
    ) -> Self {
        assert!(limits.n_rows_max > 0 && limits.n_tokens_max > 0, "a backend computes something");
        let settings = SchedulerSettings {
            n_step_tokens: settings.n_step_tokens.clamp(1, limits.n_tokens_max),
            ..settings
        };
        Self {
            pages: PageTable::new(limits.n_pages, limits.n_host_pages, settings.segments),
            contexts: FxHashMap::default(),
            saved: BTreeMap::new(),
            n_versions: 0,
            newly_saved: None,
            slots: Slots::new(limits.n_states),
            commons: Commons::default(),
            line: Line::default(),
            held: Held::default(),
            holders: Holders::default(),
            source: Source::default(),
            n_pages_most: limits.n_pages,
            n_markings: 0,
            costs: Costs::new(weight_bytes as f64 / limits.page_bytes as f64),
            pace: Pace::default(),
            debt: PromptDebt::default(),
            returns: Returns::default(),
            spares: Spares::default(),
            jobs: Jobs::default(),
            last_decode_step: 0,
            step: 0,
            steps_under_way: VecDeque::new(),
            spare_plans: Vec::new(),
            spare_ids: Vec::new(),
            cell_moves: Vec::new(),
            next_row: None,
            n_left_waiting: 0,
            stats: EngineStats::default(),
            outbox: outbox.of_model(),
            limits,
            settings,
        }
    }

    /// Takes what the models share, or gives it back.
    pub(crate) fn exchange(&mut self, commons: &mut Commons) {
        std::mem::swap(&mut self.commons, commons);
        // Pages that are let go of from now on are let go of in this step. Without the commons a model lets go of none.
        self.pages.note_step(self.commons.step);
    }

    /// How far the owners have come whose work for the model comes next; where none waits, those of the first in line for
    /// pages.
    pub(crate) fn next_virtual_times(&self, commons: &mut Commons) -> VirtualTimes {
        let times = [Class::Decode, Class::Prompt].map(|class| commons.queue.virtual_times(self.lane(class)));
        let first = times.into_iter().flatten().min_by(VirtualTimes::compare);
        let in_line = || {
            let id = self.line.first()?;
            Some(commons.queue.virtual_times_of(&self.contexts.get(&id)?.seat))
        };
        first.or_else(in_line).unwrap_or_default()
    }

    fn lane(&self, class: Class) -> Lane {
        Lane::of(self.settings.place, class)
    }

    /// Contexts of a class that wait for a plan.
    fn n_queued(&self, class: Class) -> usize {
        self.commons.queue.len(self.lane(class))
    }

    /// Whether there may be something to compute, as far as it has what the models share.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn has_work(&self) -> bool {
        self.has_work_among(&self.commons)
    }

    /// Contexts of the model that decode and wait for a plan.
    pub(crate) fn n_ready_among(&self, commons: &Commons) -> usize {
        commons.queue.len(self.lane(Class::Decode))
    }

    /// How long a step will take, if that is known.
    pub(crate) fn expected_ns(&self, plan: &Plan) -> Option<u64> {
        self.costs.step_ns(plan.work)
    }

    /// Whether there may be something to compute for the model.
    pub(crate) fn has_work_among(&self, commons: &Commons) -> bool {
        self.waits_for_plan_among(commons) || !self.line.is_empty()
    }

    /// Whether any of its work waits for a plan, and not for pages.
    pub(crate) fn waits_for_plan_among(&self, commons: &Commons) -> bool {
        let is_queued = |class| commons.queue.len(self.lane(class)) > 0;
        is_queued(Class::Decode) || is_queued(Class::Prompt) || self.jobs.have_waiting()
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            n_pages: self.pages.n_pages(),
            n_pages_free: self.pages.n_free(),
            n_pages_cached: self.pages.n_idle(),
            n_pages_on_host: self.pages.n_on_host(),
            n_contexts: self.contexts.len(),
            n_saved: self.saved.len(),
            n_waiting: self.n_waiting(),
            runs: self.outbox.runs().clone(),
            n_runs: self.n_runs(true),
            n_runs_waiting: self.n_runs(false),
            ..self.stats.clone()
        }
    }

    /// Device pages.
    pub(crate) fn n_pages(&self) -> usize {
        self.pages.n_pages()
    }
}

impl ContextState {
    fn class(&self) -> Class {
        let n_pending = self.n_pending();
        let decodes = self.work.as_ref().is_none_or(|work| work.decodes(self.start(), n_pending));
        if decodes { Class::Decode } else { Class::Prompt }
    }

    /// Position of the first token that no row computes yet.
    fn start(&self) -> usize {
        self.under_way.map_or(self.kv.n_computed, |under_way| under_way.end)
    }

    fn n_draws_under_way(&self) -> usize {
        self.under_way.map_or(0, |under_way| under_way.n_draws)
    }

    /// Tokens, those included that are being drawn.
    fn n_tokens_expected(&self) -> usize {
        self.kv.tokens.len() + self.n_draws_under_way()
    }

    /// Rows that the tree of guesses takes which its work verifies next, where all before it is computed.
    fn n_tree_rows(&self) -> Option<usize> {
        match &self.work {
            Some(Work::Verify(work)) if self.start() >= work.first_draw() => {
                work.tree().map(|tree| 1 + tree.n_nodes())
            }
            _ => None,
        }
    }

    /// Known tokens that its work has to compute and that no row computes yet.
    fn n_pending(&self) -> usize {
        let target = self.work.as_ref().map_or(0, |work| work.target(self.kv.tokens.len()));
        target.saturating_sub(self.start())
    }

    /// Ends its work for this cause: rows that are under way for it are in vain.
    fn end_work(&mut self, cause: Cause, causes: &mut Causes) -> Option<Work> {
        let n_rows = self.under_way.map_or(0, |under_way| under_way.n_rows);
        self.note(cause, n_rows as u64, causes);
        self.take_work()
    }

    /// Ends its work, which is done, or whose rows have been counted.
    fn take_work(&mut self) -> Option<Work> {
        self.epoch += 1;
        self.under_way = None;
        self.ready_since = None;
        self.prefill = None;
        self.work.take()
    }
}
