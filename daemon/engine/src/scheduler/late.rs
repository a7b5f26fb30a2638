//! Runs whose callers make the mask of each draw once they know the token before it.
//!
//! A row is planned before its mask has come. Nothing that follows from its draw is planned before it is known to draw:
//! it sits out when the mask is not there by the end of the layers. Then it is asked again once the mask has come, by the
//! head alone where the device kept the state of its token. Until its mask comes, a run is not queued: no other work waits
//! for a caller.

use std::sync::Arc;

use super::plan::{Placed, PlannedRow};
use super::{ContextState, Plan, Scheduler};
use crate::batch::{LateMask, Token};
use crate::causes::Cause;
use crate::command::ContextId;
use crate::completion::Tag;
use crate::error::EngineError;
use crate::job::{LateMasks, RunWork, Work};
use crate::run::{Finish, RunEvent};
use crate::sampling::TokenMask;

/// The masks that have come for a step that waits for some.
#[derive(Debug)]
pub(crate) struct MasksOfStep<'a> {
    pub(crate) masks: Vec<LateMask<'a>>,
    /// Rows whose masks are missing and wanted.
    pub(crate) n_missing: usize,
}

impl Plan {
    /// Whether it has draws whose masks are late, and has not been let draw.
    pub(crate) fn waits_for_masks(&self) -> bool {
        self.waits_for_masks
    }

    /// With their numbers among the rows as the backend has them.
    fn late_rows(&self) -> impl Iterator<Item = (usize, &PlannedRow)> {
        let numbers = self.rows.iter().scan(0, |n_before, row| {
            let number = *n_before;
            *n_before += row.n_rows();
            Some(number)
        });
        numbers.zip(&self.rows).filter(|(_, row)| row.waits_for_mask)
    }
}

impl Scheduler {
    /// Takes in the mask of a run's next draw, or of one behind those that have theirs. One for another place comes too
    /// late: the run was interrupted, or its draws have gone another way.
    pub(super) fn take_mask(
        &mut self,
        (id, tag): (ContextId, Tag),
        position: usize,
        turn: u32,
        mask: Arc<TokenMask>,
        expected: Option<Token>,
    ) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        // Its guest counts the tokens that are there.
        let position = position.saturating_add(context.kv.n_evicted());
        let is_held_up = context.is_held_up_by_mask();
        if let Some(Work::Run(run)) = &mut context.work
            && run.queue.tag() == tag
            && let Some(masks) = &mut run.masks
            && masks.put(position, turn, mask, expected)
        {
            if is_held_up {
                context.note_waited(Cause::StepsForMasks, self.commons.step, &mut self.stats.causes);
            }
            self.enqueue(id);
        }
    }

    /// Ends a run where it comes to a draw that has no mask. A row of it that is under way then is thrown away.
    pub(super) fn end_run_at(
        &mut self,
        (id, tag): (ContextId, Tag),
        position: usize,
        turn: u32,
        end: Result<Finish, EngineError>,
    ) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        let position = position.saturating_add(context.kv.n_evicted());
        let masks = match &mut context.work {
            Some(Work::Run(run)) if run.queue.tag() == tag => run.masks.as_mut(),
            _ => None,
        };
        let Some(end) = masks.and_then(|masks| masks.put_end(position, turn, end)) else { return };
        let job = context.job();
        let event = end.map_or_else(RunEvent::Failed, RunEvent::Finished);
        context.end_run(event, &mut self.pages, &mut self.stats.causes);
        job.into_iter().for_each(|job| self.end_mixture(job));
        self.leave_by_id(id);
        self.enqueue(id);
    }

    /// The masks that have come for a step under way.
    pub(crate) fn masks_of(&self, plan: &Plan) -> MasksOfStep<'_> {
        let mut found = MasksOfStep { masks: Vec::new(), n_missing: 0 };
        for (row_idx, row) in plan.late_rows() {
            // What comes of a row whose work has ended is dropped.
            let Some(context) = self.contexts.get(&row.id).filter(|context| context.epoch == row.epoch)
            else {
                continue;
            };
            match context.masks().and_then(|masks| masks.get(row.n_tokens)) {
                Some(mask) => found.masks.push(LateMask { row_idx, mask }),
                None => found.n_missing += 1,
            }
        }
        found
    }

    /// Notes that a step draws now, with the masks that have come, but for rows that sit out all the same: what follows
    /// from those draws can be planned.
    pub(crate) fn let_draw(&mut self, plan: &mut Plan, sat_out: &[usize]) {
        plan.waits_for_masks = false;
        let mut n_thousandths_of_all = 0;
        for (row_idx, row) in plan.late_rows() {
            if sat_out.contains(&row_idx) {
                continue;
            }
            let Some(context) = self.contexts.get_mut(&row.id).filter(|context| context.epoch == row.epoch)
            else {
                continue;
            };
            if context.masks().is_some_and(|masks| masks.get(row.n_tokens).is_some()) {
                let under_way = context.under_way.as_mut().expect("a row of this epoch is under way");
                under_way.waits_for_mask = false;
                let work = context.work.as_ref().expect("a row of this epoch is of its work");
                let n_thousandths =
                    work.programs_cost(row.start..row.end, row.n_tokens, self.limits.logits_tokens);
                n_thousandths_of_all += n_thousandths;
                self.commons.queue.charge(&context.seat, self.costs.thousandths_ns(n_thousandths));
                if self.limits.n_steps_under_way > 1 && self.goes_ahead(row.id).is_some() {
                    self.enqueue(row.id);
                }
            }
        }
        plan.work.n_thousandths_beside += n_thousandths_of_all;
    }

    /// What becomes of a run that cannot have an ordinary row now because of its masks; `None` if it can.
    pub(super) fn place_masked(
        &mut self,
        context: &mut ContextState,
        id: ContextId,
        plan: &mut Plan,
    ) -> Option<Placed> {
        let masks = context.masks()?;
        if context.under_way.is_some_and(|under_way| under_way.waits_for_mask) {
            return Some(Placed::UnderWay);
        }
        let n_tokens = context.n_tokens_expected();
        if context.under_way.is_some() && (masks.ends_at(n_tokens) || self.pays_to_wait(context)) {
            return Some(Placed::UnderWay);
        }
        let is_here = !context.lacks_mask();
        let (may_be_late, n_left) = (masks.may_be_late(), n_tokens - context.start());
        let is_under_way = context.under_way.is_some();
        match (n_left, is_here) {
            // It sat out.
            (0, false) => Some(context.without_mask()),
            (0, true) if is_under_way => Some(Placed::UnderWay),
            (0, true) if context.kv.has_state() && context.asks_state_kept() => {
                Some(self.place_of_head(context, id, plan))
            }
            (0, true) => {
                let n_held = context.kv.blocks().len();
                context.kv.rewind(n_tokens - 1, &mut self.pages);
                // Of one with holes the last page may have begun with that token, which has room in the one before by now; those
                // that come after it need a page again.
                self.note_let_go_by(context, n_held - context.kv.blocks().len());
                context.kv.forget_shared_unwritten(&mut self.pages);
                // With that token its last page may have been full, and entered in the prefix cache.
                context.hide_what_it_writes(&mut self.pages);
                // A page that another found in the cache in this plan can only be copied now, and no page was promised for that.
                if self.needs_more(context) {
                    if context.job().is_some() {
                        // Its job asks again, for all its members.
                        self.leave(id, context);
                    } else if !self.admit(id, context) {
                        return Some(Placed::Nothing);
                    }
                }
                None
            }
            (1, false) if !may_be_late => Some(context.without_mask()),
            _ => None,
        }
    }
}

impl ContextState {
    /// The masks of its run, if they come from the run's caller.
    pub(super) fn masks(&self) -> Option<&LateMasks> {
        match &self.work {
            Some(Work::Run(run)) => run.masks.as_ref(),
            _ => None,
        }
    }

    /// What becomes of its next draw, whose mask has not come.
    fn without_mask(&mut self) -> Placed {
        let window = self.window;
        match &mut self.work {
            _ if self.under_way.is_some() => Placed::UnderWay,
            Some(work) => {
                if work.wants_more(window, 0) {
                    Placed::LacksMask
                } else {
                    Placed::Nothing
                }
            }
            None => Placed::Nothing,
        }
    }

    /// Whether its next draw waits for its mask and for nothing else: it sat out, or is not planned before the mask is there.
    fn is_held_up_by_mask(&self) -> bool {
        let Some(Work::Run(RunWork { masks: Some(masks), mixture, .. })) = &self.work else { return false };
        let n_left = self.n_tokens_expected() - self.start();
        let is_planned_behind = !masks.may_be_late() || mixture.is_some();
        self.under_way.is_none() && (n_left == 0 || n_left == 1 && is_planned_behind) && self.lacks_mask()
    }

    /// Whether what it asks comes of the state that the device keeps, that after all layers.
    fn asks_state_kept(&self) -> bool {
        match &self.work {
            Some(Work::Run(run)) => run.settings.sampler.looks.hidden.is_empty(),
            _ => true,
        }
    }

    /// Whether the mask of its next draw is to come: the one after all its tokens, where none of those is only expected.
    pub(super) fn lacks_mask(&self) -> bool {
        let n_expected = self.work.as_ref().map_or(0, Work::n_expected);
        self.masks().is_some_and(|masks| masks.get(self.n_tokens_expected() - n_expected).is_none())
    }
}
