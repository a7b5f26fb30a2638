//! Which contexts wait for a plan to look at them, and in which order those of one guest do.

use super::fair::{Class, Lane};
use super::{Plan, Scheduler};
use crate::command::ContextId;
use crate::job::Work;

/// Where a context comes among those that its guest waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Among {
    First,
    Last,
}

impl Scheduler {
    /// Puts a context that has work into the queue, unless it stands in the line for pages.
    pub(super) fn enqueue(&mut self, id: ContextId) {
        self.enqueue_among(id, Among::Last);
    }

    /// As [`Self::enqueue`], for a context that was just looked at. While others wait for pages, prompts of one guest are
    /// computed one after the other: the pages of the first come free before the last has begun.
    pub(super) fn enqueue_again(&mut self, id: ContextId) {
        let among = if self.line.is_empty() { Among::Last } else { Among::First };
        self.enqueue_among(id, among);
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

    fn enqueue_among(&mut self, id: ContextId, among: Among) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        let n_members = match &context.work {
            None => return,
            // Its next row comes with those of all.
            Some(Work::Mixed(work)) if context.is_led_up() => {
                let first = self.jobs.first(work.member.job);
                return first.into_iter().for_each(|first| self.enqueue_among(first, among));
            }
            Some(Work::Joint(work)) => self.jobs.n_rows_with_one(work.member.job),
            Some(work) => work.n_members(),
        };
        context.ready_since.get_or_insert(self.commons.step);
        if context.is_queued || context.is_in_line() {
            return;
        }
        context.is_queued = true;
        self.holders.note_changed(id, &mut context.listing);
        let class = context.class();
        let n_rows = match class {
            // As many as it has tokens, if that is a verification, or its mixture or its search has members.
            Class::Decode => context.n_pending().max(n_members),
            Class::Prompt => 1,
        };
        let (seat, lane) = (&context.seat, Lane::of(self.settings.place, class));
        match (class, among) {
            (Class::Prompt, Among::First) => self.commons.queue.push_first(seat, lane, id, n_rows),
            _ => self.commons.queue.push(seat, lane, id, n_rows),
        }
    }

    /// Puts contexts that have a row in the step just planned into the queue for the next one, which is planned before this
    /// one is taken in.
    pub(super) fn enqueue_ahead(&mut self, plan: &Plan) {
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
