//! Jobs that ride in parts: draws and searches, of which each row is for itself.

use super::{Members, Scheduler};
use crate::job::{JobId, Stage, Work};
use crate::scheduler::bounds::n_rows_bound;
use crate::scheduler::{ContextState, Plan};

impl Scheduler {
    /// Members whose last tokens have no rows yet; of a mixture all, whose next tokens ride with one another.
    pub(super) fn rest_of(&self, job: JobId) -> Members {
        let members = self.jobs.members(job);
        match self.jobs.is_run(job) {
            true => members,
            false => members
                .into_iter()
                .zip(self.jobs.have_come(job))
                .filter(|&(id, has_come)| !has_come && !self.contexts[&id].rides())
                .map(|(id, _)| id)
                .collect(),
        }
    }

    /// Rows of `n_left` that a job which may ride in parts gets of a step: as many as there is room for, and none beyond those
    /// that keep it as short as who decodes beside it is due. What is left over then rides in the next one.
    pub(super) fn n_rows_of_part(&self, n_left: usize, n_rows_max: usize, plan: &Plan) -> usize {
        let n_rows_bound = n_rows_bound(plan).saturating_sub(plan.work.n_decode_rows).max(1);
        n_left.min(n_rows_bound).min(n_rows_max.max(1))
    }

    /// Jobs that ride in parts wait for their turn with what is left of them.
    pub(in crate::scheduler) fn enqueue_rests(&mut self, plan: &Plan) {
        for &job in &plan.jobs_in_parts {
            let rest = self.rest_of(job);
            if let Some(&first) = rest.first() {
                self.enqueue_rest(first, rest.len());
            }
        }
    }
}

impl ContextState {
    /// Whether the row of its last token is under way, in a job.
    pub(super) fn rides(&self) -> bool {
        let stage = self.work.as_ref().and_then(Work::member).map(|member| member.stage);
        self.under_way.is_some() && stage == Some(Stage::Rides)
    }
}
