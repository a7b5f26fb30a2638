//! The engine as a value: operations go in, the device works, completions come out. It has no thread, waits for nothing and
//! reads no clock. The loop around it calls [`Core::turn`] with what has come in, and does what the turn asks for.
//! Models come and go; a step is of the one whose users are furthest behind.

mod archive;
mod held;
mod late;
mod linger;
mod memory;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use self::archive::Archiving;
use self::held::Held;
use self::linger::Linger;
use self::memory::Pool;
use super::KvBounds;
use super::gone::Gone;
use super::resident::{Change, Health, Resident};
use crate::account::{ActorId, Owner};
use crate::archive::{ArchiveOf, FromArchive};
use crate::backend::{Backend, BackendError, Collected, Damage, Limits, OldestStep};
use crate::batch::{CellMove, Row};
use crate::command::{Ask, ModelId, Operation};
use crate::completion::{CallerId, Completion, Outbox, Tag};
use crate::error::{EngineError, EngineFailure};
use crate::scheduler::{Commons, Plan, Scheduler, SchedulerSettings, VirtualTimes};

/// What comes in.
#[derive(Debug)]
pub(super) enum EngineInput {
    /// A guest that asks from now on.
    Enter(CallerId, Owner),
    /// A guest that has asked its last.
    Leave(CallerId),
    /// What a guest asks.
    Operation(Operation),
    /// A model that was loaded.
    Add(Newcomer),
    /// All models together are to have so many bytes of KV memory.
    SetKvBytes { kv_bytes: u64, tag: Tag },
    /// So many bytes of KV in host memory at most are to be given up.
    Relieve { n_bytes: u64, tag: Tag },
    /// An archive has something for a model, or wants something of it.
    FromArchive(ModelId, FromArchive),
    /// A model is to go.
    Remove(ModelId),
    /// The end.
    Shutdown,
}

/// What has come in, taken one by one.
pub(super) trait Inputs {
    /// The next one, after the last one cost the engine's thread so much.
    fn next(&mut self, price_ns: u64) -> Option<EngineInput>;

    /// Whose the one before was, and what it cost beside other users. Given once.
    fn take_cost(&mut self) -> Option<(ActorId, u64)> {
        None
    }
}

impl<I: Iterator<Item = EngineInput>> Inputs for I {
    fn next(&mut self, _: u64) -> Option<EngineInput> {
        Iterator::next(self)
    }
}

/// A model that was loaded.
pub(crate) struct Newcomer {
    pub(crate) id: ModelId,
    pub(crate) settings: SchedulerSettings,
    pub(crate) bounds: KvBounds,
    pub(crate) backend: Box<dyn Backend>,
    /// What keeps the contexts that are saved of it.
    pub(crate) archive: Option<ArchiveOf>,
}

impl std::fmt::Debug for Newcomer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Newcomer").field("id", &self.id).finish_non_exhaustive()
    }
}

/// What the next turn waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Something comes in.
    Input,
    /// Nothing.
    Turn,
    /// The device is done with the oldest step, and [`Core::wait`] has taken it. A turn before that carries out what has
    /// come in, and plans nothing: who asks while the device works rides with all others who do.
    Device,
    /// Something comes in, or the device is done with the layers of the last step: [`Core::is_held_up`].
    InputOrLayers,
    /// Something comes in, or this moment.
    InputBefore(Instant),
    /// There is no next turn.
    Stop,
}

/// The models of a device, what is computed for them, and for which contexts.
#[derive(Default)]
pub(super) struct Core {
    /// By their places.
    residents: Vec<Option<Resident>>,
    commons: Commons,
    gone: Gone,
    /// Backends of models that have gone.
    departed: Vec<(ModelId, Box<dyn Backend>)>,
    outbox: Outbox,
    /// Steps that were submitted, the oldest first, each with the place of its model.
    under_way: VecDeque<(usize, Plan)>,
    /// Since when the device is at the oldest of them and what moved before it, if it was seen to begin with it.
    oldest_since: Option<Instant>,
    /// Until when the device still moves pages, though no step follows them yet.
    moves_until: Option<Instant>,
    /// What came of the oldest.
    collected: Option<Result<Collected, BackendError>>,
    linger: Linger,
    /// Answers that wait for a step of another user.
    held: Held,
    /// Whether the last turn left the device at work: guests that ask now are in time.
    waits_for_device: bool,
    /// What was found while the layers of the last step were waited for; the next turn sees to it.
    layers_failed: Option<BackendError>,
    pool: Pool,
    archiving: Archiving,
    /// Models that have failed since this was asked last.
    failed: Vec<(ModelId, EngineFailure)>,
    /// Memory for the rows of a step.
    rows: Vec<Row<'static>>,
}

impl Core {
    /// Carries out what has come in, then takes in the step that is done or submits the next. What is to be given back
    /// goes into the empty list `completions`.
    ///
    /// # Errors
    /// The engine has come to its end.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        inputs: impl Inputs,
        completions: &mut Vec<Completion>,
    ) -> Result<Next, EngineFailure> {
        self.outbox.begin_turn(now);
        let is_beside_device = self.waits_for_device && self.collected.is_none();
        let next = self.go_on(now, inputs, is_beside_device);
        self.waits_for_device = matches!(next, Ok(Next::Device));
        self.outbox.take(completions);
        self.hold_back(&next, completions);
        next
    }

    fn go_on(
        &mut self,
        now: Instant,
        mut inputs: impl Inputs,
        is_beside_device: bool, // the last turn left the device at work, and it is still so
    ) -> Result<Next, EngineFailure> {
        let collected = match self.collected.take() {
            Some(Err(error)) => {
                let (place, plan) = self.oldest();
                self.note_failed(place, &plan, plan.moves.len(), error)?;
                None
            }
            Some(Ok(collected)) => Some(collected),
            None => None,
        };
        self.linger.begin(now);
        // Guests that the step before answered have asked again while the device was waited for, and are in time.
        let is_in_time = self.waits_for_device || collected.is_some() || !self.linger.is_over(now);
        self.commons.set_late(!is_in_time);
        if self.under_way.is_empty() {
            self.commons.note_rest(now);
        }
        // What commands took while the device had nothing to do, from the end of the last step on.
        let mut costs: SmallVec<[(ActorId, u64); 8]> = SmallVec::new();
        let mut price_ns = 0;
        loop {
            let input = inputs.next(price_ns);
            if let Some((user, cost_ns)) = inputs.take_cost()
                && self.under_way.len() <= usize::from(collected.is_some())
            {
                costs.push((user, cost_ns));
            }
            let Some(input) = input else { break };
            price_ns = 0;
            match input {
                EngineInput::Enter(caller, owner) => self.commons.enter(caller, owner),
                EngineInput::Leave(caller) => self.leave_for_good(caller),
                EngineInput::Operation(operation) => price_ns = self.apply(operation),
                EngineInput::Add(newcomer) => self.add(newcomer),
                EngineInput::SetKvBytes { kv_bytes, tag } => self.note_kv_bytes(kv_bytes, tag),
                EngineInput::Relieve { n_bytes, tag } => self.relieve(n_bytes, tag),
                EngineInput::FromArchive(model, what) => self.note_archive(model, what),
                EngineInput::Remove(model) => self.note_remove(model),
                EngineInput::Shutdown => return Ok(Next::Stop),
            }
        }
        let has_collected = collected.is_some();
        if let Some(collected) = collected {
            self.take_in(now, collected)?;
        }
        costs.into_iter().for_each(|(user, ns)| self.commons.note_commands(user, ns));
        if has_collected {
            return Ok(Next::Turn);
        }
        if let Some(next) = self.attend_to_masks()? {
            return Ok(next);
        }
        if is_beside_device && !self.under_way.is_empty() {
            return Ok(Next::Device);
        }
        self.change_residents()?;
        self.submit_steps(now)?;
        if self.waits_for_masks() {
            // They may have come while the step was submitted.
            return Ok(Next::Turn);
        }
        if let Some(until) = self.lingers_until(now) {
            return Ok(Next::InputBefore(until));
        }
        let has_work = |resident: &Resident| match resident.health {
            Health::Works { .. } if resident.scheduler.has_work_among(&self.commons) => true,
            Health::Failing(_) => true,
            _ => resident.change != Change::None,
        };
        let is_more_to_do = self.pool.is_asked()
            || self.archiving.has_jobs()
            || self.residents.iter().flatten().any(has_work);
        Ok(match (self.under_way.is_empty(), is_more_to_do) {
            (false, _) => Next::Device,
            (true, true) => self.moves_until.map_or(Next::Turn, Next::InputBefore),
            (true, false) => Next::Input,
        })
    }

    /// Waits until the device is done with the oldest step.
    pub(super) fn wait(&mut self) {
        let Self { under_way, residents, held, .. } = self;
        let (place, plan) = under_way.front().expect("a step is under way");
        let resident = residents[*place].as_mut().expect("a model with a step under way is there");
        held.note_step(plan, resident.backend.oldest_step());
        self.collected = Some(resident.backend.collect());
    }

    /// Where the oldest step under way is computed, if there is one.
    pub(super) fn oldest_step(&mut self) -> Option<OldestStep> {
        let &(place, _) = self.under_way.front()?;
        Some(self.resident(place).backend.oldest_step())
    }

    /// Whether a step is under way.
    #[cfg(test)]
    pub(super) fn has_steps_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// What is kept for guests beside the contexts of models.
    #[cfg(feature = "fuzzing")]
    pub(super) fn holds(&self) -> super::driven::EngineHolds {
        super::driven::EngineHolds {
            n_callers: self.commons.n_callers(),
            n_mailboxes: 0,
            n_kept_rows: self.commons.kept.n(),
            n_contexts_gone: self.gone.n_contexts(),
            n_steps_under_way: self.under_way.len(),
        }
    }

    /// As [`Scheduler::check`], for all models.
    #[cfg(feature = "fuzzing")]
    pub(super) fn check(&self) -> usize {
        self.residents.iter().flatten().map(|resident| resident.scheduler.check()).sum()
    }

    /// Backends of models that have gone since this was asked last. Letting go of one may take long.
    pub(super) fn take_departed(&mut self) -> Vec<(ModelId, Box<dyn Backend>)> {
        std::mem::take(&mut self.departed)
    }

    /// Models that have failed since this was asked last, while others go on.
    pub(super) fn take_failed(&mut self) -> Vec<(ModelId, EngineFailure)> {
        std::mem::take(&mut self.failed)
    }

    /// Ends everything, as [`Scheduler::dissolve`].
    pub(super) fn dissolve(self) {
        self.residents.into_iter().flatten().for_each(|resident| resident.scheduler.dissolve());
    }

    fn resident(&mut self, place: usize) -> &mut Resident {
        self.residents[place].as_mut().expect("a model with a step under way is there")
    }

    fn place_of(&self, model: ModelId) -> Option<usize> {
        let place = usize::from(model.place);
        let resident = self.residents.get(place)?.as_ref()?;
        (resident.id == model).then_some(place)
    }

    fn leave_for_good(&mut self, caller: CallerId) {
        self.archiving.leave(caller);
        let Some(guest) = self.commons.leave_for_good(caller) else { return };
        self.residents.iter_mut().flatten().for_each(|resident| resident.scheduler.forget_guest(guest));
    }

    /// Carries an operation out; returns what it cost this thread, in nanoseconds.
    fn apply(&mut self, operation: Operation) -> u64 {
        if let Operation::LetGo { row } = operation {
            // Its model may be gone.
            self.commons.kept.let_go(row);
            return 0;
        }
        match self.place_of(operation.model()) {
            Some(place) => match &operation {
                Operation::Open { .. }
                | Operation::Forget { .. }
                | Operation::Save { .. }
                | Operation::Release { .. } => self.apply_with_archive(place, operation),
                _ => self.apply_at(place, operation),
            },
            None => {
                self.gone.apply(operation, &EngineError::Unloaded, &self.outbox);
                0
            }
        }
    }

    /// Carries out an operation on the model at a place.
    fn apply_at(&mut self, place: usize, operation: Operation) -> u64 {
        let Self { residents, commons, gone, outbox, .. } = self;
        let resident = residents[place].as_mut().expect("it was found");
        match &resident.health {
            Health::Failed(failure) if !matches!(operation, Operation::Stats { .. }) => {
                gone.apply(operation, &EngineError::Failed(failure.clone()), outbox);
                0
            }
            _ => {
                if let Operation::Ask { ask: Ask::Keep, .. } = operation
                    && resident.scheduler.lacks_row()
                {
                    resident.scheduler.give_row(resident.backend.keep_row());
                }
                resident.lend(commons).apply(operation)
            }
        }
    }

    fn add(&mut self, newcomer: Newcomer) {
        let place = usize::from(newcomer.id.place);
        let scheduler = scheduler(newcomer.backend.as_ref(), newcomer.settings.clone(), self.outbox.clone());
        while self.residents.len() <= place {
            self.residents.push(None);
        }
        assert!(self.residents[place].is_none(), "a place is given to one model at a time");
        let resident = Resident::new(newcomer, scheduler);
        self.pool.note_came(resident.kv_bytes());
        self.residents[place] = Some(resident);
    }

    fn note_remove(&mut self, model: ModelId) {
        if let Some(place) = self.place_of(model) {
            self.resident(place).change = Change::Leave;
        }
    }

    fn is_under_way(&self, place: usize) -> bool {
        self.under_way.iter().any(|&(of, _)| of == place)
    }

    /// Brings models on in what is to become of them, as far as the steps under way allow.
    fn change_residents(&mut self) -> Result<(), EngineFailure> {
        for place in 0..self.residents.len() {
            if self.is_under_way(place) {
                continue;
            }
            let Self { residents, commons, gone, outbox, .. } = self;
            let Some(resident) = &mut residents[place] else { continue };
            if let Health::Failing(failure) = &resident.health {
                let failure = failure.clone();
                gone.add(resident.end_all(&EngineError::Failed(failure.clone()), commons, outbox));
                resident.health = Health::Failed(failure);
                let id = resident.id;
                self.forget_archive_of(id);
            }
            let Self { residents, commons, gone, departed, pool, .. } = self;
            let Some(resident) = &mut residents[place] else { continue };
            if resident.change == Change::Leave {
                let resident = residents[place].take().expect("it was there");
                let id = resident.id;
                pool.note_left(resident.kv_bytes());
                let (contexts, backend) = resident.leave(&EngineError::Unloaded, commons);
                gone.add(contexts);
                departed.push((id, backend));
                self.forget_archive_of(id);
            }
        }
        self.move_memory()?;
        self.go_on_archiving()
    }

    fn oldest(&mut self) -> (usize, Plan) {
        self.under_way.pop_front().expect("what was collected was under way")
    }

    fn take_in(&mut self, now: Instant, collected: Collected) -> Result<(), EngineFailure> {
        let Collected { outputs, elapsed } = collected;
        let (place, plan) = self.oldest();
        plan.show(now, elapsed);
        let Self { residents, commons, .. } = self;
        let resident = residents[place].as_mut().expect("a model with a step under way is there");
        resident.health.note_success();
        let has_waited = resident.backend.take_waited_for_host_pages();
        let as_ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let of_moves = self.oldest_since.map(|since| now.duration_since(since).saturating_sub(elapsed));
        self.oldest_since = (!self.under_way.is_empty()).then_some(now);
        let mut scheduler = resident.lend(commons);
        if let Some(of_moves) = of_moves.filter(|_| !has_waited) {
            scheduler.learn_of_moves(&plan, as_ns(of_moves));
        }
        scheduler.note_ride(now, elapsed, &plan);
        scheduler.complete(plan, outputs, as_ns(elapsed));
        let cells = scheduler.take_cell_moves();
        drop(scheduler);
        self.note_taken_in(now, elapsed);
        self.move_cells(place, &cells)
    }

    /// Has tokens copied, before any other step or move of their model.
    fn move_cells(&mut self, place: usize, cells: &[CellMove]) -> Result<(), EngineFailure> {
        if cells.is_empty() {
            return Ok(());
        }
        let Self { residents, commons, .. } = self;
        let resident = residents[place].as_mut().expect("a model whose step was taken in is there");
        let Err(error) = resident.backend.move_cells(cells) else { return Ok(()) };
        resident.lend(commons).lose_cells(cells);
        self.note_failed(place, &Plan::default(), 0, error)
    }

    /// Plans and submits as many steps as the device takes.
    fn submit_steps(&mut self, now: Instant) -> Result<(), EngineFailure> {
        let mut passed: SmallVec<[usize; 8]> = SmallVec::new();
        self.moves_until = self.moves_until.filter(|&until| now < until);
        self.commons.set_link_busy(self.moves_until.is_some());
        while !self.waits_for_masks()
            && self.lingers_until(now).is_none()
            && let Some(place) = self.next_place(&passed)
        {
            let Self { residents, commons, under_way, rows, .. } = self;
            let resident = residents[place].as_mut().expect("it was chosen");
            if under_way.len() >= resident.backend.limits().n_steps_under_way {
                break;
            }
            let plan = resident.lend(commons).plan();
            (resident.last_planned, resident.held_at) = (commons.step(), None);
            if plan.is_empty() {
                passed.push(place);
                continue;
            }
            let mut n_moved = 0;
            match resident.submit(&plan, &mut n_moved, rows) {
                Ok(()) if plan.has_rows() => {
                    if under_way.is_empty() {
                        self.linger.note_begun(now);
                        // What still moves would be taken for moves of this step.
                        self.oldest_since = self.moves_until.is_none().then_some(now);
                    }
                    let writes_rows = resident.lend(commons).note_rows_written(&plan);
                    under_way.push_back((place, plan));
                    self.note_step(place);
                    self.archiving.note_step();
                    if writes_rows {
                        self.note_rows_ready();
                    }
                }
                Ok(()) => {
                    passed.push(place);
                    // Nor is it known when a step behind it begins.
                    self.oldest_since = None;
                    let pause_ns = resident.lend(commons).pause_after_ns(&plan);
                    if let Some(ns) = pause_ns {
                        self.moves_until = Some(now + Duration::from_nanos(ns));
                        commons.set_link_busy(under_way.is_empty());
                    }
                }
                Err(error) => self.note_failed(place, &plan, n_moved, error)?,
            }
        }
        Ok(())
    }

    /// Draws whose rows are in the stream of the device wait no longer.
    fn note_rows_ready(&mut self) {
        for id in self.commons.kept.take_ready() {
            if let Some(place) = self.place_of(id.model) {
                let Self { residents, commons, .. } = self;
                let resident = residents[place].as_mut().expect("it was found");
                resident.lend(commons).note_rows_ready(id);
            }
        }
    }

    /// The place of the model whose step is next: that of a user that is late, or whose users are furthest behind, or that
    /// waits longest.
    fn next_place(&mut self, passed: &[usize]) -> Option<usize> {
        let mut next: Option<(VirtualTimes, u64, usize)> = None;
        let mut held: SmallVec<[usize; 8]> = SmallVec::new();
        for (place, resident) in self.residents.iter().enumerate() {
            let Some(resident) = resident else { continue };
            if passed.contains(&place) || !resident.may_step() || self.archiving.holds == Some(place) {
                continue;
            }
            if !resident.scheduler.has_work_among(&self.commons) {
                continue;
            }
            if self.waits_for_draws(resident) {
                held.push(place);
                continue;
            }
            // The next step waits for guests that will have asked again when this one is done.
            let last = self.under_way.iter().rev().find(|&&(of, _)| of == place);
            if resident.scheduler.has_returning_guests(last.map(|(_, plan)| plan)) {
                continue;
            }
            if self.commons.latest_at(place).is_some() {
                return Some(place);
            }
            let times = resident.scheduler.next_virtual_times(&mut self.commons);
            let is_first = next.as_ref().is_none_or(|(first, last_planned, _)| {
                times.compare(first).then(resident.last_planned.cmp(last_planned)).is_lt()
            });
            if is_first {
                next = Some((times, resident.last_planned, place));
            }
        }
        let newest = self.under_way.back().map(|(_, plan)| plan.step);
        for place in held {
            let resident = self.resident(place);
            resident.held_at = resident.held_at.or(newest);
        }
        next.map(|(.., place)| place)
    }

    /// Whether all that a model would compute are rows for draws, and a step that was under way when that was seen first answers
    /// draws from such rows whose guests will want the next ones at once: then all ride together.
    fn waits_for_draws(&self, resident: &Resident) -> bool {
        let (first, kept) = (resident.held_at.unwrap_or(u64::MAX), &self.commons.kept);
        let may_wait = |(place, plan): &(usize, Plan)| {
            let drawing = self.residents[*place].as_ref().filter(|_| plan.step <= first);
            drawing.is_some_and(|it| it.scheduler.has_returning_draws_from(resident.id, plan, kept))
        };
        kept.n_wanted() > 0
            && resident.scheduler.waits_for_kept_rows_alone(resident.id, &self.commons)
            && self.under_way.iter().any(may_wait)
    }

    /// Takes a failed step back; ends the model if it is the one too many, or the engine if that was the last that worked.
    fn note_failed(
        &mut self,
        place: usize,
        plan: &Plan,
        n_moved: usize,
        error: BackendError,
    ) -> Result<(), EngineFailure> {
        if error.damage() == Damage::Device {
            return Err(EngineFailure::Device(error));
        }
        tracing::warn!(%error, n_rows = plan.n_rows(), "a step failed");
        let resident = self.resident(place);
        if let Some(failure) = resident.health.note_failure(&error) {
            let id = resident.id;
            if !self.residents.iter().flatten().any(|resident| resident.health.works()) {
                return Err(failure);
            }
            self.failed.push((id, failure));
        }
        let Self { residents, commons, .. } = self;
        let resident = residents[place].as_mut().expect("a model with a step under way is there");
        let error = resident.health.error(error);
        resident.lend(commons).fail_step(plan, n_moved, &error);
        Ok(())
    }
}

/// A scheduler for a model, with the pages that it has now.
pub(super) fn scheduler(backend: &dyn Backend, settings: SchedulerSettings, outbox: Outbox) -> Scheduler {
    let limits = Limits { n_pages: backend.n_pages(), ..backend.limits().clone() };
    Scheduler::new(limits, backend.weights().n_bytes, settings, outbox)
}

#[cfg(test)]
mod tests;
