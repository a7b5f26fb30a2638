//! An answer that is waited for as a whole.

use super::exchange::{Reason, Reply, Token, Usage};
use super::failure::Failure;
use super::run::Run;

/// All that a guest has replied.
#[derive(Debug, Default)]
pub(super) struct Whole {
    pub(super) model: String,
    pub(super) choices: Vec<Choice>,
    /// The vectors of the inputs.
    pub(super) vectors: Vec<Vec<f32>>,
    pub(super) usage: Usage,
}

#[derive(Debug, Default)]
pub(super) struct Choice {
    pub(super) thought: Option<String>,
    pub(super) text: String,
    pub(super) tokens: Vec<Token>,
    /// Names and arguments.
    pub(super) calls: Vec<(String, String)>,
    pub(super) reason: Option<Reason>,
    pub(super) stop: Option<String>,
}

impl Whole {
    /// Waits for the end.
    pub(super) async fn of(mut run: Run) -> Result<Self, Failure> {
        let mut whole = Self { model: run.begun().await?.0, ..Self::default() };
        while let Some(reply) = run.next().await {
            whole.take(reply?);
        }
        Ok(whole)
    }

    fn take(&mut self, reply: Reply) {
        match reply {
            Reply::Thought { choice, text } => {
                self.choice(choice).thought.get_or_insert_default().push_str(&text);
            }
            Reply::Piece { choice, text, tokens } => {
                let choice = self.choice(choice);
                choice.text.push_str(&text);
                choice.tokens.extend(tokens);
            }
            Reply::Call { choice, name, arguments } => self.choice(choice).calls.push((name, arguments)),
            Reply::Finished { choice, reason, stop } => {
                let choice = self.choice(choice);
                (choice.reason, choice.stop) = (Some(reason), stop);
            }
            Reply::Embedding { index, vector } => {
                if let Some(place) = at(&mut self.vectors, index) {
                    *place = vector;
                }
            }
            Reply::Ended(usage) => self.usage = usage,
            Reply::Begun { model, .. } => self.model = model,
            // A refusal is a failure by now.
            Reply::Refused(_) => {}
        }
    }

    fn choice(&mut self, idx: usize) -> &mut Choice {
        let idx = idx.min(N_MAX - 1);
        at(&mut self.choices, idx).expect("it is no more than there may be")
    }
}

/// More choices or inputs than any request has: a guest that counts wrongly takes no memory for it.
const N_MAX: usize = 4096;

fn at<T: Default>(list: &mut Vec<T>, idx: usize) -> Option<&mut T> {
    if idx >= list.len() && idx < N_MAX {
        list.resize_with(idx + 1, T::default);
    }
    list.get_mut(idx)
}
