//! Steps of the device that go by while work could be computed and is not in them.

use super::{ContextState, Scheduler};
use crate::causes::{Cause, Causes};
use crate::command::ContextId;
use crate::fair::Class;
use crate::job::Work;

impl Scheduler {
    /// The number of the step that is planned now.
    pub(super) fn step_planned(&self) -> u64 {
        self.commons.step + 1
    }

    /// Contexts that wait for a step and will not be in the one that was just planned.
    pub(super) fn note_left_waiting(&mut self) {
        self.n_left_waiting = self.n_in_queue_and_line();
    }

    /// Those of them that may still wait.
    pub(super) fn n_waiting(&self) -> usize {
        self.n_left_waiting.min(self.n_in_queue_and_line())
    }

    /// Runs that have the right to their pages, or that wait for it.
    pub(super) fn n_runs(&self, are_admitted: bool) -> usize {
        let runs = self.contexts.values().filter(|context| matches!(context.work, Some(Work::Run(_))));
        runs.filter(|context| context.is_admitted() == are_admitted).count()
    }

    fn n_in_queue_and_line(&self) -> usize {
        self.n_queued(Class::Decode) + self.n_queued(Class::Prompt) + self.line.len()
    }

    /// A context has waited long enough for a row: it gets one.
    pub(super) fn note_placed(&mut self, id: ContextId, context: &mut ContextState) {
        context.last_step = self.step_planned();
        self.holders.note_changed(id, &mut context.listing);
        context.note_waited_for_row(self.commons.step, &mut self.stats.causes);
        context.ready_since = None;
    }
}

impl ContextState {
    /// It has waited long enough for what it waited for, up to this step of the device; from now on it waits for something
    /// else, or for nothing any more.
    pub(super) fn note_waited(&mut self, waited_for: Cause, step: u64, causes: &mut Causes) {
        if let Some(since) = self.ready_since.replace(step) {
            self.note(waited_for, step - since, causes);
        }
    }

    /// As [`Self::note_waited`]: others were served first, or with other models.
    pub(super) fn note_waited_for_row(&mut self, step: u64, causes: &mut Causes) {
        let waited_for = match self.class() {
            Class::Decode => Cause::StepsToDecode,
            Class::Prompt => Cause::StepsWithPrompt,
        };
        self.note_waited(waited_for, step, causes);
    }

    /// Counts what was computed in vain for it or what it waited for, for the model and for its guest.
    pub(super) fn note(&self, cause: Cause, n: u64, causes: &mut Causes) {
        if n > 0 {
            causes.add(cause, n);
            self.owner.account.note(cause, n);
        }
    }
}
