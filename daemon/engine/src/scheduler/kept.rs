//! Rows of logits that are kept for draws of other models, and those draws.
//!
//! A draw that names a row may be asked for together with the row. It waits until a step that writes the row was submitted,
//! and rides in one behind that: what the one writes the other reads, and the device does not stand still in between.

use super::{Commons, Plan, Scheduler};
use crate::command::{Ask, ContextId, ModelId};
use crate::fair::Class;
use crate::job::{AskWork, Work};
use crate::kept::{KeptRow, KeptRows, RowName};

/// Rows that one guest holds at most: a device has room for about twice as many.
const N_ROWS_OF_GUEST: usize = 64;

impl AskWork {
    /// Takes the rows that it has to do with: `next` for its own, which gets the name of the question. `false` if there are
    /// not as many.
    pub(super) fn take_rows(
        &mut self,
        (id, name): (ContextId, RowName),
        next: &mut Option<KeptRow>,
        kept: &mut KeptRows,
    ) -> bool {
        match self.ask() {
            Ask::Keep => {
                if kept.n_of(name.caller) >= N_ROWS_OF_GUEST {
                    return false;
                }
                let Some(row) = next.take() else { return false };
                kept.hold(name, id, row.clone());
                self.rows.push(row);
            }
            Ask::Mix { rows: names, .. } => {
                let Some(rows) = kept.get(names) else { return false };
                let waits = !kept.are_written(names);
                if waits {
                    kept.wait(id, names.clone());
                }
                (self.rows, self.waits_for_rows) = (rows, waits);
            }
            _ => {}
        }
        true
    }
}

impl Scheduler {
    /// Whether a place is wanted for a row that is about to be asked for.
    pub(crate) fn lacks_row(&self) -> bool {
        self.next_row.is_none()
    }

    /// Takes a place for a row.
    pub(crate) fn give_row(&mut self, row: Option<KeptRow>) {
        self.next_row = row;
    }

    /// Notes which rows a step writes that was submitted; whether there are any.
    pub(crate) fn note_rows_written(&mut self, plan: &Plan) -> bool {
        let mut writes_any = false;
        for row in plan.rows.iter().filter(|row| row.n_outputs > 0) {
            let Some(context) = self.contexts.get(&row.id) else { continue };
            if let Some(Work::Ask(work)) = &context.work
                && matches!(work.ask(), Ask::Keep)
            {
                let name = RowName { caller: context.caller, tag: work.reply.tag() };
                self.commons.kept.note_written(name, row.id);
                writes_any = true;
            }
        }
        writes_any
    }

    /// Whether nothing waits for a step of the model but rows that are to be kept for draws, each right behind what is
    /// computed of its context.
    pub(crate) fn waits_for_kept_rows_alone(&self, model: ModelId, commons: &Commons) -> bool {
        let n_waiting = |class| commons.queue.len(self.lane(class));
        let n_rows = n_waiting(Class::Decode);
        if n_rows == 0 || n_waiting(Class::Prompt) > 0 || self.jobs.have_waiting() || !self.line.is_empty() {
            return false;
        }
        let is_kept = |id: &ContextId| {
            let context = self.contexts.get(id);
            context.is_some_and(|it| it.under_way.is_none() && it.work.as_ref().is_some_and(Work::keeps_row))
        };
        commons.kept.wanted_of(model).filter(is_kept).count() >= n_rows
    }

    /// Whether a step under way answers draws from rows of this model, for guests that draw again at once and then want more
    /// such rows.
    pub(crate) fn has_returning_draws_from(&self, model: ModelId, plan: &Plan, kept: &KeptRows) -> bool {
        let is_such = |work: &Work| match work {
            Work::Ask(work) => matches!(work.ask(), Ask::Mix { rows, .. } if kept.has_rows_of(model, rows)),
            _ => false,
        };
        self.answers_returning(plan, is_such)
    }

    /// The rows of a draw are there.
    pub(crate) fn note_rows_ready(&mut self, id: ContextId) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        if let Some(Work::Ask(work)) = &mut context.work
            && work.waits_for_rows
            && let Ask::Mix { rows, .. } = work.ask()
            && self.commons.kept.are_written(rows)
        {
            work.waits_for_rows = false;
            self.enqueue(id);
        }
    }
}
