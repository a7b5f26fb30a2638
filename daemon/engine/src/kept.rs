//! Rows of logits that stay on their device, for draws in steps of other models.
//!
//! A backend gives out the places of rows; a step of one model writes a row, and the steps behind it read it. The engine
//! holds a row by the name of the question that it is the answer to, as long as its guest does, and with each draw that
//! reads it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use crate::command::{ContextId, ModelId, Operation};
use crate::completion::{CallerId, Tag};
use crate::model_handle::ModelHandle;

/// The place of a row of logits on a device, as its backends know it. It is free again when the last clone is dropped.
#[derive(Clone)]
pub struct KeptRow(Arc<dyn Any + Send + Sync>);

impl KeptRow {
    /// A backend's own.
    pub fn new<T: Any + Send + Sync>(row: T) -> Self {
        Self(Arc::new(row))
    }

    /// What a backend has put into it.
    ///
    /// # Panics
    /// It is another backend's.
    #[must_use]
    pub fn get<T: Any>(&self) -> &T {
        self.0.downcast_ref().expect("rows stay on their device")
    }

    /// Tells whether it is held by anything.
    #[cfg(test)]
    pub(crate) fn weak(&self) -> std::sync::Weak<dyn Any + Send + Sync> {
        Arc::downgrade(&self.0)
    }
}

impl fmt::Debug for KeptRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptRow").finish_non_exhaustive()
    }
}

/// Names a kept row: by the question that asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RowName {
    pub(crate) caller: CallerId,
    pub(crate) tag: Tag,
}

impl RowName {
    /// As one of a caller's, in an order.
    pub(crate) fn key(self) -> (CallerId, u64) {
        (self.caller, self.tag.number())
    }

    /// The one with this key.
    pub(crate) fn of((caller, number): (CallerId, u64)) -> Self {
        Self { caller, tag: Tag::of_number(number) }
    }
}

/// A guest's hold of a kept row. Dropping it lets go of the row.
#[derive(Debug)]
pub(crate) struct RowHold {
    name: RowName,
    model: ModelHandle,
}

impl RowHold {
    /// Of the row that was asked for under this name.
    pub(crate) fn new(name: RowName, model: ModelHandle) -> Self {
        Self { name, model }
    }

    pub(crate) fn name(&self) -> RowName {
        self.name
    }
}

impl Drop for RowHold {
    fn drop(&mut self) {
        // A stopped engine keeps nothing.
        let _ = self.model.post_unbounded(self.name.caller, Operation::LetGo { row: self.name });
    }
}

/// The rows that guests hold, and the draws that wait until theirs are in the stream of the device.
#[derive(Debug, Default)]
pub(crate) struct KeptRows {
    rows: FxHashMap<RowName, Held>,
    waiting: Vec<(ContextId, Vec<RowName>)>,
}

#[derive(Debug)]
struct Held {
    row: KeptRow,
    /// The context that it is of.
    id: ContextId,
    /// Whether a step that writes it was submitted: those behind it may read.
    is_written: bool,
}

impl KeptRows {
    /// A row of this context is asked for.
    pub(crate) fn hold(&mut self, name: RowName, id: ContextId, row: KeptRow) {
        self.rows.insert(name, Held { row, id, is_written: false });
    }

    /// The contexts of a model whose rows are not written yet.
    pub(crate) fn wanted_of(&self, model: ModelId) -> impl Iterator<Item = ContextId> {
        let wanted = self.rows.values().filter(|held| !held.is_written).map(|held| held.id);
        wanted.filter(move |id| id.model == model)
    }

    /// Rows that are held.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn n(&self) -> usize {
        self.rows.len()
    }

    /// Rows that are not written yet.
    pub(crate) fn n_wanted(&self) -> usize {
        self.rows.values().filter(|held| !held.is_written).count()
    }

    /// Whether any of these rows is of this model.
    pub(crate) fn has_rows_of(&self, model: ModelId, names: &[RowName]) -> bool {
        names.iter().any(|name| self.rows.get(name).is_some_and(|held| held.id.model == model))
    }

    /// The rows of these names; `None` if any is not held.
    pub(crate) fn get(&self, names: &[RowName]) -> Option<Vec<KeptRow>> {
        names.iter().map(|name| self.rows.get(name).map(|held| held.row.clone())).collect()
    }

    /// Whether steps that write all of these were submitted.
    pub(crate) fn are_written(&self, names: &[RowName]) -> bool {
        names.iter().all(|name| self.rows.get(name).is_some_and(|held| held.is_written))
    }

    /// A step that writes the row was submitted, where it is that of this context: the name may be that of another one's by
    /// now.
    pub(crate) fn note_written(&mut self, name: RowName, id: ContextId) {
        if let Some(held) = self.rows.get_mut(&name).filter(|held| held.id == id) {
            held.is_written = true;
        }
    }

    /// A draw of this context waits for these rows, and none before it does any more.
    pub(crate) fn wait(&mut self, id: ContextId, names: Vec<RowName>) {
        self.waiting.retain(|(waiting, _)| *waiting != id);
        self.waiting.push((id, names));
    }

    /// Contexts whose draws wait no longer: their rows are there.
    pub(crate) fn take_ready(&mut self) -> Vec<ContextId> {
        let mut waiting = std::mem::take(&mut self.waiting);
        let ready = waiting.extract_if(.., |(_, names)| self.are_written(names)).map(|(id, _)| id).collect();
        self.waiting = waiting;
        ready
    }

    /// Rows that a guest holds.
    pub(crate) fn n_of(&self, caller: CallerId) -> usize {
        self.rows.keys().filter(|name| name.caller == caller).count()
    }

    /// A guest holds a row no longer. It has given up the draw before that, if it waited for the row still.
    pub(crate) fn let_go(&mut self, name: RowName) {
        // No draw waits for a row that is not there.
        if self.rows.remove(&name).is_some() {
            self.waiting.retain(|(_, names)| !names.contains(&name));
        }
    }

    /// A guest has gone.
    pub(crate) fn forget(&mut self, caller: CallerId) {
        self.rows.retain(|name, _| name.caller != caller);
        self.waiting.retain(|(_, names)| names.iter().all(|name| name.caller != caller));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_waits_until_all_its_rows_are_written_or_one_is_let_go_of() {
        let name = |caller, idx| RowName { caller: CallerId(caller), tag: Tag::new(idx, 0) };
        let id = |number| ContextId { number, ..ContextId::LEAST };
        let mut kept = KeptRows::default();
        let names = [name(1, 0), name(1, 1), name(2, 0)];
        names.iter().for_each(|&name| kept.hold(name, id(0), KeptRow::new(())));
        assert!(kept.get(&names).is_some() && kept.get(&[name(2, 1)]).is_none());
        kept.wait(id(1), vec![names[0], names[1]]);
        kept.wait(id(2), vec![names[2]]);
        kept.wait(id(3), vec![names[1]]);
        kept.note_written(names[0], id(0));
        assert!(kept.take_ready().is_empty());
        kept.note_written(names[2], id(0));
        assert_eq!(kept.take_ready(), [id(2)]);
        assert_eq!(kept.waiting.len(), 2);
        kept.let_go(names[0]);
        kept.note_written(names[1], id(9));
        assert!(kept.take_ready().is_empty(), "a row of another context");
        kept.note_written(names[1], id(0));
        assert_eq!((kept.take_ready(), kept.waiting.len()), (vec![id(3)], 0));
        kept.wait(id(4), vec![names[1]]);
        kept.forget(CallerId(1));
        assert_eq!((kept.rows.len(), kept.waiting.len()), (1, 0));
    }
}
