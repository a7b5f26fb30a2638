//! The decode rows of a step.

use crate::command::ContextId;
use crate::scheduler::bounds::DecodeBound;
use crate::scheduler::fair::Class;
use crate::scheduler::{Plan, Scheduler};

impl Scheduler {
    /// Gives rows to contexts that decode: as many as the step takes of them.
    pub(super) fn place_decode(&mut self, n_rows_max: usize, plan: &mut Plan, waiting: &mut Vec<ContextId>) {
        plan.decode_bound = self.decode_bound();
        if plan.decode_bound.is_look() {
            // A job that waits would be all that the step shows.
            let n_tokens = self.n_decode_tokens(plan);
            self.place_class(Class::Decode, n_rows_max, n_tokens, plan, waiting);
            if plan.has_rows() {
                return;
            }
            // What the step was to show has no row.
            plan.decode_bound = DecodeBound::None;
            self.enqueue_all_again(std::mem::take(waiting).into_iter());
        }
        self.place_waiting_jobs(n_rows_max, plan);
        plan.n_rows_ahead = plan.work.n_decode_rows;
        let n_tokens = self.n_decode_tokens(plan);
        self.place_class(Class::Decode, n_rows_max, n_tokens, plan, waiting);
    }

    /// What comes next, if it is left out of a step that shows how long few rows last, having more than that, which come
    /// together.
    pub(super) fn pop_beyond_look(&mut self, class: Class, plan: &Plan) -> Option<ContextId> {
        if class == Class::Prompt || !plan.decode_bound.is_look() {
            return None;
        }
        let lane = self.lane(class);
        let id = *self.commons.queue.peek(lane)?;
        let context = self.contexts.get_mut(&id)?;
        let n_members = context.job().map_or(1, |job| self.jobs.n_members(job));
        let n_rows = n_members.max(context.n_pending());
        if plan.work.n_decode_rows + n_rows <= plan.decode_bound.n_rows() {
            return None;
        }
        context.is_queued = false;
        self.holders.note_changed(id, &mut context.listing);
        self.commons.queue.pop_unserved(lane)
    }
}
