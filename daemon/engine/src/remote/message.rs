//! What goes between an engine and a process of guests.

use serde::{Deserialize, Serialize};

use crate::account::GuestId;
use crate::batch::Token;
use crate::command::{Answer, Operation};
use crate::completion::{CallerId, Completion, Done};

/// Something that a process of guests asks of an engine.
#[derive(Debug, Serialize, Deserialize)]
pub struct Asked(pub(super) Question);

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Question {
    /// A guest that asks from now on.
    Enter { caller: CallerId, guest: GuestId },
    /// A guest that has asked its last.
    Leave { caller: CallerId },
    /// What a guest asks.
    Operation { caller: CallerId, operation: Operation },
}

/// Something that an engine gives back to a process of guests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answered(pub(super) Completion);

impl From<Completion> for Answered {
    fn from(completion: Completion) -> Self {
        Self(completion)
    }
}

impl Answered {
    /// What the process has asked that none of our guests would.
    #[must_use]
    pub fn violation(&self) -> Option<String> {
        match &self.0.done {
            Done::Expelled(violation) => Some(violation.to_string()),
            _ => None,
        }
    }

    /// Bytes of the longest list in it, roughly; 0 for what is short.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        const CANDIDATE_BYTES: usize = 12;
        match &self.0.done {
            Done::Answer(Ok(answer)) => match answer {
                Answer::Full(row) | Answer::Scores(row) | Answer::Embedding(row) | Answer::Attention(row) => {
                    size_of_val(row.as_slice())
                }
                Answer::Hidden(states) => states.iter().map(|state| size_of_val(state.as_slice())).sum(),
                Answer::Top { candidates, .. } | Answer::Together(candidates) => {
                    candidates.len() * CANDIDATE_BYTES
                }
                Answer::Tops(tops) => tops.iter().map(|top| top.candidates.len() * CANDIDATE_BYTES).sum(),
                Answer::Verified(drawn) => size_of_val(drawn.as_slice()),
                _ => 0,
            },
            Done::Opened(Ok(opened)) => opened.tokens.len() * size_of::<Token>(),
            _ => 0,
        }
    }
}
