//! Contexts of models that were unloaded or have failed, as long as their guests have not let go of them: a guest that
//! asks about one is told.

use rustc_hash::FxHashMap;

use crate::command::{ContextId, Operation};
use crate::completion::{CallerId, Done, Outbox};
use crate::error::EngineError;
use crate::run::RunEvent;

/// The contexts, and whose they are.
#[derive(Debug, Default)]
pub(super) struct Gone {
    contexts: FxHashMap<ContextId, CallerId>,
}

impl Gone {
    /// How many there are.
    #[cfg(feature = "fuzzing")]
    pub(super) fn n_contexts(&self) -> usize {
        self.contexts.len()
    }

    pub(super) fn add(&mut self, contexts: impl IntoIterator<Item = (ContextId, CallerId)>) {
        self.contexts.extend(contexts);
    }

    /// Answers an operation on a model that is gone, for this reason.
    pub(super) fn apply(&mut self, operation: Operation, reason: &EngineError, outbox: &Outbox) {
        let error = || reason.clone();
        let (id, tag, done) = match operation {
            Operation::Create { id, caller } => return self.add([(id, caller)]),
            Operation::Fork { id, child, .. } => {
                let caller = self.contexts.get(&id).copied();
                return self.add(caller.map(|caller| (child, caller)));
            }
            Operation::Release { id, .. } => {
                self.contexts.remove(&id);
                return;
            }
            Operation::Edit { .. }
            | Operation::Evict { .. }
            | Operation::Steer { .. }
            | Operation::Cancel { .. }
            | Operation::Pulled { .. }
            | Operation::Mask { .. }
            | Operation::EndRun { .. }
            | Operation::LetGo { .. } => return,
            Operation::Open { caller, tag, .. } => {
                return outbox.to(caller, tag).send(Done::Opened(Err(error())));
            }
            Operation::Forget { caller, tag, .. } => {
                return outbox.to(caller, tag).send(Done::Kept(Err(error())));
            }
            Operation::Stats { caller, tag, .. } => {
                return outbox.to(caller, tag).send(Done::Stats(Err(error())));
            }
            Operation::DrawTogether { members, tag, .. } => match members.first() {
                Some(&(id, _)) => (id, tag, Done::Answer(Err(error()))),
                None => return,
            },
            Operation::SearchBeams(asked) => (asked.base, asked.tag, Done::Answer(Err(error()))),
            Operation::Ask { id, tag, .. } => (id, tag, Done::Answer(Err(error()))),
            Operation::Mix { members, tag, .. } => match members.first() {
                Some(&(id, _)) => (id, tag, Done::Run { event: RunEvent::Failed(error()), n_ahead: 0 }),
                None => return,
            },
            Operation::Run { id, tag, .. } => {
                (id, tag, Done::Run { event: RunEvent::Failed(error()), n_ahead: 0 })
            }
            Operation::Save { id, tag, .. } => (id, tag, Done::Kept(Err(error()))),
        };
        if let Some(&caller) = self.contexts.get(&id) {
            outbox.to(caller, tag).send(done);
        }
    }
}
