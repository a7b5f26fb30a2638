//! Which contexts wait for a plan to look at them, and in which order those of one guest do.

use super::{ContextState, Plan, Scheduler};
use crate::command::ContextId;
use crate::fair::{Class, Lane};
use crate::job::{JobId, Work};

/// Full steps of prompts within which a prompt that goes on before others of its guest has to be done.
const N_STEPS_BEFORE_OTHERS: usize = 8;

/// Which end of what its guest waits for a context is put at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Front,
    Back,
}

impl Scheduler {
    /// Puts a context that has work into the queue, unless it stands in the line for pages.
    pub(super) fn enqueue(&mut self, id: ContextId) {
        self.enqueue_at(id, End::Back);
    }

    /// As [`Self::enqueue`], for a context that was just looked at. While others wait for pages, prompts of one guest are
    /// computed one after the other: the pages of the first come free before the last has begun. A long one takes turns with
    /// the others until little of it is left.
    pub(super) fn enqueue_again(&mut self, id: ContextId) {
        let n_tokens_most = N_STEPS_BEFORE_OTHERS.saturating_mul(self.settings.n_step_tokens);
        let is_short = |context: &ContextState| context.n_pending() <= n_tokens_most;
        let is_prompt = |context: &ContextState| context.class() == Class::Prompt;
        let is_first = !self.line.is_empty()
            && self.contexts.get(&id).is_some_and(|context| is_prompt(context) && is_short(context));
        self.enqueue_at(id, if is_first { End::Front } else { End::Back });
    }

    /// As [`Self::enqueue_again`], so that they keep their order.
    pub(super) fn enqueue_all_again(&mut self, ids: impl DoubleEndedIterator<Item = ContextId> + Clone) {
        for id in ids.clone() {
            if self.contexts.get(&id).is_some_and(|context| context.class() == Class::Decode) {
                self.enqueue(id);
            }
        }
        ids.rev().for_each(|id| self.enqueue_again(id));
    }

    fn enqueue_at(&mut self, id: ContextId, end: End) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        context.note_prefill();
        let n_members = match &context.work {
            None => return,
            Some(Work::Ask(work)) if work.waits_for_rows => return,
            // Its next row comes with those of all.
            Some(Work::Mixed(work)) if context.is_led_up() => {
                let first = self.jobs.first(work.member.job);
                return first.into_iter().for_each(|first| self.enqueue_at(first, end));
            }
            Some(Work::Joint(work)) => self.jobs.n_rows_with(id, work.member.job),
            Some(work) => work.n_members(),
        };
        self.push(id, end, n_members);
    }

    /// Puts a job that found no room before what else its guest waits for; its first member stands for all.
    pub(super) fn enqueue_job_first(&mut self, job: JobId) {
        if let Some(first) = self.jobs.first(job) {
            self.push(first, End::Front, self.jobs.n_rows_of(job));
        }
    }

    /// Puts what is left of a job into the queue, for which this member stands.
    pub(super) fn enqueue_rest(&mut self, first: ContextId, n_rows: usize) {
        self.push(first, End::Back, n_rows);
    }

    /// Puts a context into the queue that has work, and with whose row so many come.
    fn push(&mut self, id: ContextId, end: End, n_rows: usize) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        context.ready_since.get_or_insert(self.commons.step);
        if context.is_queued || context.is_in_line() {
            return;
        }
        context.is_queued = true;
        self.holders.note_changed(id, &mut context.listing);
        let class = context.class();
        let n_rows = match class {
            // As many as it has tokens, if that is a verification, or its mixture or its search has members.
            Class::Decode => context.n_pending().max(n_rows),
            Class::Prompt => 1,
        };
        let (seat, lane) = (&context.seat, Lane::of(self.settings.place, class));
        let is_first_of_user = match end {
            End::Front => self.commons.queue.push_first(seat, lane, id, n_rows),
            End::Back => self.commons.queue.push(seat, lane, id, n_rows),
        };
        if is_first_of_user {
            self.commons.arrears.note_waits(context.owner.actor);
        }
    }

    /// Puts contexts that have a row in the step just planned into the queue for the next one, if that is planned before this
    /// one is taken in.
    pub(super) fn enqueue_ahead(&mut self, plan: &Plan) {
        if self.limits.n_steps_under_way == 1 {
            return;
        }
        for row in &plan.rows {
            if self.goes_ahead(row.id) == Some(Class::Decode) {
                self.enqueue(row.id);
            }
        }
        for row in plan.rows.iter().rev() {
            if self.goes_ahead(row.id) == Some(Class::Prompt) {
                self.enqueue_again(row.id);
            }
        }
    }

    /// What a context waits for that has a row under way, if more of it can be computed before that is taken in.
    pub(super) fn goes_ahead(&self, id: ContextId) -> Option<Class> {
        let context = self.contexts.get(&id)?;
        (context.n_pending() > 0 || context.n_draws_under_way() > 0).then(|| context.class())
    }
}
