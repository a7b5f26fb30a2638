//! Steps of the device that go by while work could be computed and is not in them.

use super::fair::Class;
use super::{ContextState, Scheduler};
use crate::command::ContextId;

/// What work waits for that could be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// A row: others were served first, or with other models.
    Row(Class),
    /// Its turn in the line for pages.
    Pages,
}

impl Scheduler {
    /// The number of the step that is planned now.
    pub(super) fn step_planned(&self) -> u64 {
        self.commons.step + 1
    }

    /// A context has waited long enough for what it waited for, in the plan that is being made; from now on it waits for
    /// something else, or for nothing any more.
    pub(super) fn note_waited(&mut self, context: &mut ContextState, waited_for: WaitsFor) {
        let Some(since) = context.ready_since.replace(self.commons.step) else { return };
        let n_steps = self.commons.step - since;
        context.owner.account.note_steps_waited(n_steps);
        let total = match waited_for {
            WaitsFor::Row(Class::Decode) => &mut self.stats.n_steps_waited_to_decode,
            WaitsFor::Row(Class::Prompt) => &mut self.stats.n_steps_waited_with_prompt,
            WaitsFor::Pages => &mut self.stats.n_steps_waited_for_pages,
        };
        *total += n_steps;
    }

    /// As [`Self::note_waited`], of a context that gets a row.
    pub(super) fn note_placed(&mut self, id: ContextId, context: &mut ContextState) {
        context.last_step = self.step_planned();
        self.holders.note_changed(id, &mut context.listing);
        self.note_waited(context, WaitsFor::Row(context.class()));
        context.ready_since = None;
    }
}
