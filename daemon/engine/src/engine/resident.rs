//! A model on a device: its backend, and what is computed for which contexts.

use std::ops::{Deref, DerefMut};

use rustc_hash::FxHashSet;

use super::KvBounds;
use super::core::{Newcomer, scheduler};
use crate::archive::ArchiveOf;
use crate::backend::{Backend, BackendError, Damage, Limits};
use crate::batch::{self, PageId, Row};
use crate::command::{ContextId, ModelId};
use crate::completion::{CallerId, Outbox};
use crate::error::{EngineError, EngineFailure};
use crate::scheduler::{Commons, Move, Plan, Scheduler, SchedulerSettings};

/// So many steps of a model that fail, with none of its own between them that succeeds, are taken for a model that is lost;
/// where no other on the device works, for a device that is.
const N_STEPS_FAILED_MAX: usize = 3;

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
    /// The newest step that was under way when its own was first put off for draws from its rows.
    pub(super) held_at: Option<u64>,
    /// Pages that it may have.
    bounds: KvBounds,
    /// Steps for which it keeps the pages that it got from another model.
    pub(super) n_steps_kept: u64,
    /// The context for which it got them.
    pub(super) helped: Option<ContextId>,
    /// What keeps the contexts that are saved of it.
    pub(super) archive: Option<ArchiveOf>,
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
    /// It gives up pages once no step of it is under way.
    Part,
    /// It goes once no step of it is under way.
    Leave,
}

impl Resident {
    pub(super) fn new(newcomer: Newcomer, scheduler: Scheduler) -> Self {
        let Newcomer { id, settings, bounds, backend, archive } = newcomer;
        Self {
            id,
            settings,
            scheduler,
            backend,
            change: Change::None,
            health: Health::GOOD,
            last_planned: 0,
            held_at: None,
            bounds,
            n_steps_kept: 0,
            helped: None,
            archive,
        }
    }

    /// Ends all that is computed of it with an error, and begins with nothing. Returns which contexts there were, and whose.
    pub(super) fn end_all(
        &mut self,
        error: &EngineError,
        commons: &mut Commons,
        outbox: &Outbox,
    ) -> Vec<(ContextId, CallerId)> {
        let anew = scheduler(self.backend.as_ref(), self.settings.clone(), outbox.clone());
        end(std::mem::replace(&mut self.scheduler, anew), error, commons)
    }

    /// As [`Self::end_all`], of a model that goes; returns its backend as well.
    pub(super) fn leave(
        self,
        error: &EngineError,
        commons: &mut Commons,
    ) -> (Vec<(ContextId, CallerId)>, Box<dyn Backend>) {
        (end(self.scheduler, error, commons), self.backend)
    }

    /// Lends it what all models share.
    pub(super) fn lend<'a>(&'a mut self, commons: &'a mut Commons) -> Lent<'a> {
        self.scheduler.exchange(commons);
        Lent { scheduler: &mut self.scheduler, commons }
    }

    /// Whether a step may be planned for it.
    pub(super) fn may_step(&self) -> bool {
        self.health.works() && self.change == Change::None
    }

    /// Bytes of its pages.
    pub(super) fn kv_bytes(&self) -> u64 {
        self.backend.n_pages() as u64 * self.page_bytes()
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.backend.limits().page_bytes as u64
    }

    /// Bytes that get their memory, and lose it, together.
    pub(super) fn granule_bytes(&self) -> u64 {
        self.backend.limits().n_granule_pages as u64 * self.page_bytes()
    }

    /// The least that it has to have, in bytes of whole granules.
    pub(super) fn kv_bytes_min(&self) -> u64 {
        self.n_pages_min() as u64 * self.page_bytes()
    }

    fn n_pages_min(&self) -> usize {
        let Limits { n_pages, n_granule_pages, .. } = *self.backend.limits();
        self.bounds.n_pages_min.next_multiple_of(n_granule_pages).min(n_pages)
    }

    /// How many pages it has with so many bytes more or less than those of whole granules; `None` if that is no more.
    pub(super) fn n_pages_with(&self, n_bytes: u64) -> Option<usize> {
        let Limits { n_pages: n_most, n_granule_pages, .. } = *self.backend.limits();
        let now = self.backend.n_pages();
        let n_granules = usize::try_from(n_bytes / self.granule_bytes()).unwrap_or(usize::MAX);
        // One that has no memory is of the last granule, which may be shorter.
        let whole = now / n_granule_pages * n_granule_pages;
        let n_pages = whole.saturating_add(n_granules.saturating_mul(n_granule_pages));
        let n_pages = n_pages.min(self.bounds.n_pages_max).min(n_most);
        let n_pages = if n_pages == n_most { n_most } else { n_pages / n_granule_pages * n_granule_pages };
        (n_pages > now).then_some(n_pages)
    }

    /// How many pages it has without so many bytes, or a little more, as far as it can do without; `None` if it cannot do
    /// without any.
    pub(super) fn n_pages_without(&self, n_bytes: u64) -> Option<usize> {
        let now = self.backend.n_pages();
        let n_given = usize::try_from(n_bytes.div_ceil(self.page_bytes())).unwrap_or(usize::MAX);
        let n_granule_pages = self.backend.limits().n_granule_pages;
        let n_pages = now.saturating_sub(n_given) / n_granule_pages * n_granule_pages;
        let n_pages = n_pages.max(self.n_pages_min());
        (n_pages < now).then_some(n_pages)
    }

    /// Takes memory for pages that it did not have.
    pub(super) fn grow(&mut self, n_pages: usize) -> Result<(), BackendError> {
        self.backend.resize(n_pages)?;
        self.scheduler.grow(self.backend.n_pages());
        Ok(())
    }

    /// Gives up the pages that a plan has vacated; returns how many of them moved. No step of it may be under way.
    pub(super) fn part(&mut self, plan: &Plan, commons: &mut Commons) -> Result<usize, BackendError> {
        let mut n_moved = 0;
        if let Err(error) = self.make_moves(plan, &mut n_moved) {
            if error.damage() == Damage::Device {
                return Err(error);
            }
            // The places have changed hands all the same; what did not arrive is computed again.
            self.lend(commons).fail_step(plan, n_moved, &EngineError::Step(error));
        }
        let n_pages = self.scheduler.n_pages();
        let resized = self.backend.resize(n_pages);
        if self.backend.n_pages() > n_pages {
            self.scheduler.grow(self.backend.n_pages());
        }
        resized.map(|()| n_moved)
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

fn end(mut scheduler: Scheduler, error: &EngineError, commons: &mut Commons) -> Vec<(ContextId, CallerId)> {
    scheduler.fail_all(error);
    scheduler.exchange(commons);
    let (contexts, lent) = scheduler.disband();
    *commons = lent;
    contexts
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
