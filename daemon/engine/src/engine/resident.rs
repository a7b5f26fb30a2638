//! A model on a device: its backend, and what is computed for whom.

use std::ops::{Deref, DerefMut};

use rustc_hash::FxHashSet;

use super::core::limits;
use crate::backend::{Backend, BackendError, Damage};
use crate::batch::{self, PageId, Row};
use crate::command::{ContextId, ModelId};
use crate::completion::{CallerId, Outbox, Tag};
use crate::error::{EngineError, EngineFailure};
use crate::scheduler::{Commons, Move, Plan, Scheduler, SchedulerSettings};

/// So many steps of a model that fail, with none of its own between them that succeeds, are taken for a model that is lost;
/// where no other on the device works, for a device that is.
const N_STEPS_FAILED_MAX: usize = 3;

/// Memory that changes hands between two steps, in bytes: what a device copies in some milliseconds at most.
const RESIZED_BYTES: usize = 64 << 20;

/// A model, its contexts and its backend.
pub(super) struct Resident {
    pub(super) id: ModelId,
    settings: SchedulerSettings,
    pub(super) scheduler: Scheduler,
    pub(super) backend: Box<dyn Backend>,
    pub(super) change: Change,
    pub(super) health: Health,
    /// When a step was last planned for it.
    pub(super) last_planned: u64,
}

/// Whether anything can be computed for a model.
#[derive(Debug)]
pub(super) enum Health {
    Works {
        /// Since the last that succeeded.
        n_steps_failed: usize,
    },
    /// Not any more; what is there of it ends once no step of it is under way.
    Failing(EngineFailure),
    /// Nothing is left of it but its memory.
    Failed(EngineFailure),
}

impl Health {
    pub(super) const GOOD: Self = Self::Works { n_steps_failed: 0 };

    pub(super) fn works(&self) -> bool {
        matches!(self, Self::Works { .. })
    }

    /// A step was computed.
    pub(super) fn note_success(&mut self) {
        if self.works() {
            *self = Self::GOOD;
        }
    }

    /// A step failed; what that means for the model, if it is the one too many.
    pub(super) fn note_failure(&mut self, error: &BackendError) -> Option<EngineFailure> {
        let Self::Works { n_steps_failed } = self else { return None };
        *n_steps_failed += 1;
        if *n_steps_failed < N_STEPS_FAILED_MAX {
            return None;
        }
        let failure = EngineFailure::Steps { n_steps: *n_steps_failed, last: error.clone() };
        *self = Self::Failing(failure.clone());
        Some(failure)
    }

    /// What work of the model ends with whose step failed.
    pub(super) fn error(&self, step: BackendError) -> EngineError {
        match self {
            Self::Works { .. } => EngineError::Step(step),
            Self::Failing(failure) | Self::Failed(failure) => EngineError::Failed(failure.clone()),
        }
    }
}

/// What is about to become of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    None,
    /// It gets pages or gives them up, part by part. It may have a step after each part.
    Resize {
        n_pages: usize,
        tag: Tag,
        may_step: bool,
    },
    /// It goes once no step of it is under way.
    Leave,
}

impl Resident {
    pub(super) fn new(
        id: ModelId,
        settings: SchedulerSettings,
        scheduler: Scheduler,
        backend: Box<dyn Backend>,
    ) -> Self {
        Self { id, settings, scheduler, backend, change: Change::None, health: Health::GOOD, last_planned: 0 }
    }

    /// Ends all that is computed of it with an error, and begins with nothing. Returns which contexts there were, and whose.
    pub(super) fn end_all(
        &mut self,
        error: &EngineError,
        commons: &mut Commons,
        outbox: &Outbox,
    ) -> Vec<(ContextId, CallerId)> {
        let anew = Scheduler::new(limits(self.backend.as_ref()), self.settings.clone(), outbox.clone());
        let mut scheduler = std::mem::replace(&mut self.scheduler, anew);
        scheduler.fail_all(error);
        scheduler.exchange(commons);
        let (contexts, lent) = scheduler.disband();
        *commons = lent;
        contexts
    }

    /// Lends it what all models share.
    pub(super) fn lend<'a>(&'a mut self, commons: &'a mut Commons) -> Lent<'a> {
        self.scheduler.exchange(commons);
        Lent { scheduler: &mut self.scheduler, commons }
    }

    /// Whether a step may be planned for it.
    pub(super) fn may_step(&self) -> bool {
        self.health.works()
            && match self.change {
                Change::None => true,
                Change::Resize { n_pages, may_step, .. } => may_step || n_pages >= self.backend.n_pages(),
                Change::Leave => false,
            }
    }

    /// Where its number of pages comes next on the way to `n_pages`.
    fn next_n_pages(&self, n_pages: usize) -> usize {
        let limits = self.backend.limits();
        let n_granules = (RESIZED_BYTES / limits.page_bytes / limits.n_granule_pages).max(1);
        let n_at_once = n_granules * limits.n_granule_pages;
        let now = self.backend.n_pages();
        match n_pages >= now {
            true => (now / n_at_once * n_at_once).saturating_add(n_at_once).min(n_pages),
            false => (now.div_ceil(n_at_once) * n_at_once - n_at_once).max(n_pages),
        }
    }

    /// Takes or gives up one part of the pages that it is to have; returns whether that was the last. No step of it may
    /// be under way if it gives up any.
    pub(super) fn resize(&mut self, n_pages: usize, commons: &mut Commons) -> Result<bool, BackendError> {
        let next = self.next_n_pages(n_pages);
        if next >= self.backend.n_pages() {
            self.backend.resize(next)?;
            self.scheduler.grow(self.backend.n_pages());
            return Ok(next == n_pages);
        }
        let plan = self.lend(commons).vacate(next);
        let mut n_moved = 0;
        if let Err(error) = self.make_moves(&plan, &mut n_moved) {
            if error.damage() == Damage::Device {
                return Err(error);
            }
            // The places have changed hands all the same; what did not arrive is computed again.
            self.lend(commons).fail_step(&plan, n_moved, &EngineError::Step(error));
        }
        self.backend.resize(next)?;
        Ok(next == n_pages)
    }

    /// Puts a plan into effect; `n_moved` counts the pages whose moves the backend has taken. `rows` is memory for those
    /// of the step.
    pub(super) fn submit(
        &mut self,
        plan: &Plan,
        n_moved: &mut usize,
        rows: &mut Vec<Row<'static>>,
    ) -> Result<(), BackendError> {
        self.make_moves(plan, n_moved)?;
        if plan.has_rows() {
            let batch = self.scheduler.batch(plan, std::mem::take(rows));
            let submitted = self.backend.submit(&batch);
            *rows = batch::reused(batch.rows);
            submitted?;
        }
        Ok(())
    }

    fn make_moves(&mut self, plan: &Plan, n_moved: &mut usize) -> Result<(), BackendError> {
        // Moves of one kind that follow each other go to the device together.
        for moves in plan.moves.chunk_by(|a, b| std::mem::discriminant(a) == std::mem::discriminant(b)) {
            match moves[0] {
                Move::Out(..) => self.backend.swap_out(&listed(moves, |m| match m {
                    Move::Out(page, to) => Some((page, to)),
                    _ => None,
                }))?,
                Move::In(..) => self.backend.swap_in(&listed(moves, |m| match m {
                    Move::In(from, page) => Some((from, page)),
                    _ => None,
                }))?,
                Move::Within(..) => self.backend.move_pages(&within(moves))?,
            }
            *n_moved += moves.len();
        }
        Ok(())
    }
}

/// Of moves to one page the last: what the others brought there was given up since.
fn within(moves: &[Move]) -> Vec<(PageId, PageId)> {
    let mut taken = FxHashSet::default();
    let mut pairs = listed(moves, |m| if let Move::Within(from, to) = m { Some((from, to)) } else { None });
    pairs.reverse();
    pairs.retain(|&(_, to)| taken.insert(to));
    pairs.reverse();
    pairs
}

fn listed<T>(moves: &[Move], pair: impl Fn(Move) -> Option<T>) -> Vec<T> {
    moves.iter().filter_map(|&m| pair(m)).collect()
}

/// A scheduler whose turn it is; what it was lent goes back with this.
pub(super) struct Lent<'a> {
    scheduler: &'a mut Scheduler,
    commons: &'a mut Commons,
}

impl Deref for Lent<'_> {
    type Target = Scheduler;

    fn deref(&self) -> &Scheduler {
        self.scheduler
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut Scheduler {
        self.scheduler
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.scheduler.exchange(self.commons);
    }
}
