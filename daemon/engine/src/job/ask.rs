//! A question about the end of a context.

use super::states::PooledStates;
use crate::batch::{Drawn, Output, OutputFault, Token, Top};
use crate::command::{Answer, Ask, Pooling};
use crate::completion::{Done, Reply};
use crate::error::EngineError;
use crate::kept::KeptRow;
use crate::sampling::Sampler;

#[derive(Debug)]
pub(crate) struct AskWork {
    pub(super) ask: Ask,
    pub(crate) reply: Reply,
    /// Tokens of the context itself; a continuation lies past them while it is scored.
    pub(crate) n_base: usize,
    /// What is known of the places of the continuation so far, as far as it was asked for.
    scores: Vec<f32>,
    tops: Vec<Top>,
    /// For hidden states.
    states: PooledStates,
    /// Hidden states that a step brings back beside each other.
    n_states_max: usize,
    /// What has to be computed for it.
    pub(crate) part: Part,
    /// The row that is kept, or those that it draws with.
    pub(crate) rows: Vec<KeptRow>,
    /// Whether they may not be there yet.
    pub(crate) waits_for_rows: bool,
}

/// What a question needs computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Tokens from the layers on.
    Tokens,
    /// The head alone, over the state of the context's last token, which the device keeps.
    Head,
}

impl AskWork {
    /// A question to a context of `n_base` tokens; `has_state` if the device keeps the state of the last one. A step
    /// brings back `n_states_max` hidden states, or those of one token.
    pub(crate) fn new(ask: Ask, reply: Reply, n_base: usize, has_state: bool, n_states_max: usize) -> Self {
        let part = match ask {
            // What the device keeps is the state after all layers, and no query.
            Ask::Prefill
            | Ask::Continuation(_)
            | Ask::Tops { .. }
            | Ask::Verify { .. }
            | Ask::Hidden { .. }
            | Ask::Attention { .. } => Part::Tokens,
            Ask::Mix { ref sampler, .. } if !sampler.looks.hidden.is_empty() => Part::Tokens,
            Ask::Sample(_)
            | Ask::Top { .. }
            | Ask::Scores(_)
            | Ask::Full
            | Ask::Logits
            | Ask::Keep
            | Ask::Mix { .. }
            | Ask::Embedding => match has_state {
                true => Part::Head,
                false => Part::Tokens,
            },
        };
        let (scores, tops, states) = (Vec::new(), Vec::new(), PooledStates::default());
        let (rows, waits_for_rows) = (Vec::new(), false);
        Self { ask, reply, n_base, scores, tops, states, n_states_max, part, rows, waits_for_rows }
    }

    pub(crate) fn ask(&self) -> &Ask {
        &self.ask
    }

    pub(crate) fn answer(self, answer: Result<Answer, EngineError>) {
        self.reply.send(Done::Answer(answer));
    }

    /// Tokens that are computed after the context's own: the last one's successor is not asked for.
    pub(crate) fn continuation(&self) -> &[Token] {
        match &self.ask {
            Ask::Continuation(tokens) | Ask::Tops { continuation: tokens, .. } => {
                &tokens[..tokens.len().saturating_sub(1)]
            }
            _ => &[],
        }
    }

    /// The first position whose output is wanted.
    pub(super) fn first_output(&self) -> usize {
        match self.ask {
            Ask::Hidden { pooling: Pooling::MeanFrom(first), .. } => first,
            _ => self.n_base - 1,
        }
    }

    /// Where a row from `start` on ends that may have `n_tokens_max` tokens, of those up to `target`.
    pub(super) fn end(&self, start: usize, target: usize, n_tokens_max: usize) -> usize {
        let n_tokens_max = match &self.ask {
            Ask::Hidden { n_layers, pooling: Pooling::MeanFrom(first) } => match first.checked_sub(start) {
                None | Some(0) => n_tokens_max.min((self.n_states_max / n_layers.len()).max(1)),
                // What comes before brings nothing back.
                Some(n_before) => n_tokens_max.min(n_before),
            },
            _ => n_tokens_max,
        };
        target.min(start + n_tokens_max)
    }

    /// Answers at once what needs no computation.
    pub(crate) fn is_trivial(&self) -> bool {
        match &self.ask {
            Ask::Prefill => self.n_base == 0,
            Ask::Continuation(tokens) | Ask::Tops { continuation: tokens, .. } => tokens.is_empty(),
            Ask::Hidden { n_layers, .. } => n_layers.is_empty(),
            _ => false,
        }
    }

    pub(crate) fn trivial_answer(&self) -> Answer {
        match &self.ask {
            Ask::Continuation(_) => Answer::Scores(Vec::new()),
            Ask::Tops { .. } => Answer::Tops(Vec::new()),
            Ask::Hidden { .. } => Answer::Hidden(Vec::new()),
            _ => Answer::Prefilled,
        }
    }
}

/// What became of an ask after one step.
#[derive(Debug)]
pub(crate) enum AskOutcome {
    /// There is more to compute.
    Unfinished,
    /// The answer.
    Finished(Result<Answer, EngineError>),
}

impl AskWork {
    /// Takes in what the backend returned for the tokens from `start` on; `is_last` when all are computed.
    pub(crate) fn take_outputs(&mut self, start: usize, outputs: Vec<Output>, is_last: bool) -> AskOutcome {
        if let Ask::Hidden { n_layers, .. } = &self.ask {
            let first = self.first_output();
            if let Err(fault) = self.states.take(first, start, n_layers.len(), outputs) {
                return AskOutcome::Finished(Err(fault.into()));
            }
            return match is_last {
                true => AskOutcome::Finished(Ok(Answer::Hidden(self.states.means(n_layers.len())))),
                false => AskOutcome::Unfinished,
            };
        }
        if let Ask::Mix { sampler, .. } = &self.ask
            && is_last
        {
            let drawn = take_mixed(sampler, outputs.into_iter());
            return AskOutcome::Finished(drawn.map(Answer::Sampled).map_err(EngineError::from));
        }
        // KV that was forgotten in between is computed again, and with it outputs that were there already.
        let n_places = (start + 1).saturating_sub(self.n_base);
        self.scores.truncate(n_places);
        self.tops.truncate(n_places);
        let mut answer = match self.ask {
            Ask::Prefill if is_last => Some(Answer::Prefilled),
            _ => None,
        };
        for output in outputs {
            match (output, &self.ask) {
                (Output::Failed(fault), _) => return AskOutcome::Finished(Err(fault.into())),
                (Output::Scores(scores), Ask::Continuation(_)) => self.scores.extend(scores),
                (Output::Scores(scores), _) => answer = Some(Answer::Scores(scores)),
                (Output::Sampled(candidate), _) => answer = Some(Answer::Sampled(candidate.into())),
                (Output::Programmed(candidate, left), _) => {
                    answer = Some(Answer::Sampled(Drawn { candidate, left: Some(left), seen: None }));
                }
                (Output::Top { candidates, entropy }, Ask::Tops { .. }) => {
                    self.tops.push(Top { candidates, entropy });
                }
                (Output::Top { candidates, entropy }, _) => {
                    answer = Some(Answer::Top { candidates, entropy })
                }
                (Output::Full(row), _) => answer = Some(Answer::Full(row)),
                (Output::Embedding(state), _) => answer = Some(Answer::Embedding(state)),
                (Output::Attention(masses), _) => answer = Some(Answer::Attention(masses)),
                (Output::Kept, _) => answer = Some(Answer::Kept),
                (Output::SatOut | Output::Mixed, _) => {
                    unreachable!("a question waits for no mask and mixes nothing")
                }
                (Output::Ranked(_), _) => unreachable!("a search asks for that"),
            }
        }
        if is_last {
            match self.ask {
                Ask::Continuation(_) => answer = Some(Answer::Scores(std::mem::take(&mut self.scores))),
                Ask::Tops { .. } => answer = Some(Answer::Tops(std::mem::take(&mut self.tops))),
                _ => {}
            }
        }
        match answer {
            Some(answer) => AskOutcome::Finished(Ok(answer)),
            None => {
                assert!(!is_last, "the backend left out an output");
                AskOutcome::Unfinished
            }
        }
    }
}

/// A token that was drawn with the rows of others, and what was looked at beside it.
fn take_mixed(sampler: &Sampler, mut outputs: impl Iterator<Item = Output>) -> Result<Drawn, OutputFault> {
    match outputs.next() {
        Some(Output::Programmed(candidate, left)) => {
            Ok(Drawn { candidate, left: Some(left), seen: sampler.looks.take(&mut outputs)? })
        }
        Some(Output::Failed(fault)) => Err(fault),
        other => unreachable!("a program was to draw, and gave {other:?}"),
    }
}
