//! The decode rows of a step.

use crate::command::ContextId;
use crate::fair::Class;
use crate::scheduler::arrears::Latest;
use crate::scheduler::bounds::DecodeBound;
use crate::scheduler::{Plan, Scheduler};

impl Scheduler {
    /// Gives rows to contexts that decode: as many as the step takes of them.
    pub(super) fn place_decode(&mut self, n_rows_max: usize, plan: &mut Plan, waiting: &mut Vec<ContextId>) {
        self.enqueue_all_jobs_but_first();
        plan.decode_bound = self.decode_bound();
        plan.beside_ns_most = self.beside_ns_most(plan.decode_bound);
        if plan.decode_bound.is_look() {
            // A job that goes before all others would be what the step shows.
            let n_tokens = self.n_decode_tokens(plan);
            self.place_class(Class::Decode, n_rows_max, n_tokens, plan, waiting);
            if plan.n_tokens() > 0 {
                return;
            }
            // Nothing that could ride has as few rows.
            plan.decode_bound = plan.decode_bound.without_look();
            self.enqueue_all_again(std::mem::take(waiting).into_iter());
        }
        if let Some(Latest { user, is_very_late }) = plan.latest {
            let n_tokens = self.n_decode_tokens(plan);
            plan.of_user = Some(user);
            self.place_class(Class::Decode, n_rows_max, n_tokens, plan, waiting);
            plan.of_user = None;
            // What waits of it may wait for something else.
            plan.is_kept = is_very_late && plan.has_rows();
            if plan.is_kept {
                return;
            }
        }
        let n_rows_before = plan.work.n_decode_rows;
        self.place_waiting_job(n_rows_max, plan);
        plan.n_rows_of_waiting_job = plan.work.n_decode_rows - n_rows_before;
        let n_tokens = self.n_decode_tokens(plan);
        self.place_class(Class::Decode, n_rows_max, n_tokens, plan, waiting);
    }

    /// In a look, takes what comes next out of the queue if it alone has more rows than the look.
    pub(super) fn pop_beyond_look(&mut self, class: Class, plan: &Plan) -> Option<ContextId> {
        let DecodeBound::Look { n_rows: n_rows_looked_at, .. } = plan.decode_bound else { return None };
        if class == Class::Prompt {
            return None;
        }
        let lane = self.lane(class);
        let id = *self.commons.queue.peek(lane)?;
        let context = self.contexts.get_mut(&id)?;
        let n_rows_of_job = context.job().map_or(1, |job| self.jobs.n_rows_least(job));
        if n_rows_of_job.max(context.n_pending()) <= n_rows_looked_at {
            return None;
        }
        context.is_queued = false;
        self.holders.note_changed(id, &mut context.listing);
        self.commons.queue.pop_unserved(lane)
    }
}
