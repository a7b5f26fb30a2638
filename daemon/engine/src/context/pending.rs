//! An answer that is on its way.

use crate::command::{Answer, ContextId, Operation};
use crate::completion::{CallerId, Done};
use crate::error::EngineError;
use crate::kept::RowName;
use crate::mailbox::Ticket;
use crate::model_handle::ModelHandle;

/// An answer that is on its way. Dropping it cancels the question.
#[derive(Debug)]
pub struct Pending {
    place: Ticket,
    model: ModelHandle,
    caller: CallerId,
    /// The context that was asked about, while the answer is wanted.
    asked: Option<ContextId>,
}

impl Pending {
    pub(super) fn new(place: Ticket, model: ModelHandle, caller: CallerId, asked: ContextId) -> Self {
        Self { place, model, caller, asked: Some(asked) }
    }

    /// The name of the row that it asks to be kept.
    pub(super) fn row_name(&self) -> RowName {
        RowName { caller: self.caller, tag: self.place.tag() }
    }

    /// The answer, once the engine has computed it.
    ///
    /// # Errors
    /// What the engine found wrong.
    pub async fn answer(mut self) -> Result<Answer, EngineError> {
        let done = self.place.take().await;
        self.asked = None;
        match done {
            Some(Done::Answer(answer)) => answer,
            Some(other) => unreachable!("asked a question, answered with {other:?}"),
            None => Err(self.model.ended()),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(id) = self.asked {
            // A stopped engine computes nothing.
            let _ = self.model.post_unbounded(self.caller, Operation::Cancel { id, tag: self.place.tag() });
        }
    }
}
