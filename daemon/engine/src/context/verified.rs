//! Tokens that a verification of guesses drew, until they are pulled.

use std::collections::VecDeque;
use std::sync::Arc;

use super::states::Leaves;
use super::{Context, RunKey};
use crate::batch::{Drawn, Token};
use crate::command::{Answer, Ask};
use crate::error::EngineError;
use crate::guess::Guess;
use crate::sampling::Sampler;

/// What was drawn, in the order in which it is pulled.
#[derive(Debug)]
pub(super) struct Verified {
    key: RunKey,
    drawn: VecDeque<Drawn>,
    leaves: Option<Leaves>,
}

impl Context {
    /// Draws tokens as `ask(Ask::Verify)` does, for [`Self::take_verified`] with the same key; returns how many. Whatever
    /// else is done with the context meanwhile forgets those that were not taken. `None` where the constraint of the context
    /// is complete: nothing is drawn then, and a guess ends where it will be.
    ///
    /// # Errors
    /// As for a verification.
    pub async fn verify(
        &mut self,
        key: RunKey,
        sampler: &Arc<Sampler>,
        guess: Guess,
    ) -> Result<Option<usize>, EngineError> {
        let Some(guess) = self.up_to_completion(guess).await? else { return Ok(None) };
        let leaves = Leaves::of(sampler);
        let ask = Ask::Verify { sampler: sampler.clone(), guess };
        let drawn = match self.ask(ask).await?.answer().await? {
            Answer::Verified(drawn) => VecDeque::from(drawn),
            other => unreachable!("asked for a verification, answered with {other:?}"),
        };
        let n_drawn = drawn.len();
        self.verified = Some(Verified { key, drawn, leaves });
        Ok(Some(n_drawn))
    }

    /// Appends the next token that a verification with this key drew, if there is one.
    ///
    /// # Errors
    /// A budget is used up; the token stays where it is.
    pub fn take_verified(&mut self, key: RunKey) -> Result<Option<Drawn>, EngineError> {
        let verified = self.verified.as_ref().filter(|verified| verified.key == key);
        let Some(leaves) =
            verified.filter(|verified| !verified.drawn.is_empty()).map(|verified| verified.leaves)
        else {
            return Ok(None);
        };
        self.footprint.set_with(self.tokens.len() + 1, self.n_bytes_with(leaves, 1))?;
        let drawn = self.verified.as_mut().and_then(|verified| verified.drawn.pop_front());
        let drawn = drawn.expect("it is not empty");
        // The engine is told with the next question, and has computed it already.
        self.tokens.push(drawn.candidate.token);
        self.note_left(self.tokens.len(), &drawn, leaves);
        Ok(Some(drawn))
    }

    /// What was drawn under this key, has come and was not pulled: by a verification, or else ahead. Under other settings it
    /// is a guess, which a verification keeps as far as they agree.
    #[must_use]
    pub fn ahead(&self, key: RunKey) -> Vec<Token> {
        let verified = self.verified.as_ref().filter(|verified| verified.key == key);
        let run = self.run.as_ref().filter(|run| run.key == key);
        match (verified, run) {
            (Some(verified), _) => verified.drawn.iter().map(|drawn| drawn.candidate.token).collect(),
            (None, Some(run)) => run.queue.ahead(),
            (None, None) => Vec::new(),
        }
    }

    /// How often tokens were taken away from the end: as long as it stays the same, those that were there are.
    #[must_use]
    pub fn n_truncations(&self) -> u64 {
        self.n_truncations
    }
}
