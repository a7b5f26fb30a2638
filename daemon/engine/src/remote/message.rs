//! What goes between an engine and a process of guests.

use serde::{Deserialize, Serialize};

use crate::account::GuestId;
use crate::batch::{Drawn, Token, Top};
use crate::command::{Answer, Operation};
use crate::completion::{CallerId, Completion, Done};
use crate::kv::Evictions;
use crate::run::RunEvent;

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

    /// Bytes of the lists and texts in it, roughly; 0 for what is short. Whatever a process can make long is counted: an engine
    /// writes by itself what is short, and what waits for the process is bounded by this.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        match &self.0.done {
            Done::Answer(Ok(answer)) => of_answer(answer),
            Done::Run { event: RunEvent::Token(drawn), .. } => of_drawn(drawn),
            Done::Opened(Ok(opened)) => {
                let evictions = opened.evictions.as_ref().map_or(0, Evictions::n_bytes);
                opened.tokens.len() * size_of::<Token>() + evictions
            }
            Done::Answer(Err(error))
            | Done::Opened(Err(error))
            | Done::Kept(Err(error))
            | Done::Run { event: RunEvent::Failed(error), .. } => error.n_text_bytes(),
            _ => 0,
        }
    }
}

fn of_answer(answer: &Answer) -> usize {
    match answer {
        Answer::Full(row) | Answer::Scores(row) | Answer::Embedding(row) | Answer::Attention(row) => {
            size_of_val(row.as_slice())
        }
        Answer::Hidden(states) => of_states(states),
        Answer::Top { candidates, .. } | Answer::Together(candidates) => size_of_val(candidates.as_slice()),
        Answer::Tops(tops) => tops.iter().map(of_top).sum(),
        Answer::Sampled(drawn) => of_drawn(drawn),
        Answer::Verified(all) => size_of_val(all.as_slice()) + all.iter().map(of_drawn).sum::<usize>(),
        Answer::Beams { search, order } => {
            size_of::<Token>() * search.n_tokens() + size_of_val(order.as_slice())
        }
        Answer::Prefilled | Answer::Kept | Answer::NotKept => 0,
    }
}

fn of_drawn(drawn: &Drawn) -> usize {
    drawn.seen.as_ref().map_or(0, |seen| seen.top.as_ref().map_or(0, of_top) + of_states(&seen.hidden))
}

fn of_top(top: &Top) -> usize {
    size_of::<Top>() + size_of_val(top.candidates.as_slice())
}

fn of_states(states: &[Vec<f32>]) -> usize {
    states.iter().map(|state| size_of::<Vec<f32>>() + size_of_val(state.as_slice())).sum()
}
