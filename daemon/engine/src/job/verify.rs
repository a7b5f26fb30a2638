//! Guessed tokens, taken over as long as the context would have drawn them itself.
//!
//! One row computes the context's last token and all that were guessed after it, and the context's own draw is made at
//! each of these places. A draw depends on seed, position and the tokens before it alone: as long as the draws equal the
//! guess, each is the one that decoding token by token would have made there. The first that differs is the last that
//! counts, because those after it followed a token that is not there.

use std::sync::Arc;

use super::{draw, draw_under};
use crate::batch::{Drawn, Output, OutputRequest, Requests, Start, Token};
use crate::command::{Answer, Guess};
use crate::completion::{Done, Reply};
use crate::error::EngineError;
use crate::sampling::Sampler;

/// The longest guess. With the token before it, it is a row that devices compute as they compute rows of one token.
pub const N_GUESS_MAX: usize = 15;

#[derive(Debug)]
pub(crate) struct VerifyWork {
    sampler: Arc<Sampler>,
    guess: Guess,
    pub(super) reply: Reply,
    /// Tokens of the context itself; the guess lies past them while it is verified.
    pub(crate) n_base: usize,
}

/// What the context drew.
#[derive(Debug)]
pub(crate) struct Verified {
    /// Those that were guessed, and the one that was not, unless the draw after the last that was guessed failed.
    pub(crate) drawn: Vec<Drawn>,
    /// How many of the guess are among them.
    pub(crate) n_accepted: usize,
}

impl VerifyWork {
    pub(crate) fn new(sampler: Arc<Sampler>, guess: Guess, reply: Reply, n_base: usize) -> Self {
        Self { sampler, guess, reply, n_base }
    }

    /// How it draws.
    pub(super) fn sampler(&self) -> &Arc<Sampler> {
        &self.sampler
    }

    /// The guessed tokens, which are computed after the context's own.
    pub(crate) fn guess(&self) -> &[Token] {
        self.guess.tokens()
    }

    pub(crate) fn answer(self, answer: Result<Answer, EngineError>) {
        self.reply.send(Done::Answer(answer));
    }

    /// Position of the context's last token, where the first draw is made.
    pub(crate) fn first_draw(&self) -> usize {
        self.n_base - 1
    }

    /// Where a row from `start` on ends that may have `n_tokens_max` tokens. What leads up to the guess can be cut; the
    /// draws are made in one row, or wait for a step with room for them.
    pub(crate) fn end(&self, start: usize, n_tokens_max: usize) -> Option<usize> {
        let target = self.n_base + self.guess().len();
        match start + n_tokens_max {
            end if end >= target => Some(target),
            end => Some(end.min(self.first_draw())).filter(|&end| end > start),
        }
    }

    /// A draw at each place from the context's last token on, then what is looked at beside them.
    pub(crate) fn outputs(&self, end: usize) -> Requests<'_> {
        let request = |position| {
            let is_first = position == self.first_draw();
            let start = if is_first { Start::At(self.sampler.start()) } else { Start::Before };
            let kind = match &self.guess {
                Guess::Chain(_) => draw(&self.sampler, start, 0),
                Guess::Masked { masks, .. } => {
                    draw_under(&self.sampler, Some(&masks[position - self.first_draw()]), start, 0)
                }
            };
            OutputRequest { position, kind }
        };
        let places = self.first_draw()..end;
        let looks = places.clone().flat_map(|position| self.sampler.looks.requests(position));
        places.map(request).chain(looks).collect()
    }

    /// Accepts the guess as far as the draws equal it.
    pub(crate) fn take_outputs(&self, outputs: Vec<Output>) -> Result<Verified, EngineError> {
        let n_draws = self.guess().len() + 1;
        let mut outputs = outputs.into_iter();
        let draws: Vec<Output> = outputs.by_ref().take(n_draws).collect();
        let mut verified = Verified { drawn: Vec::with_capacity(n_draws), n_accepted: 0 };
        for (idx, output) in draws.into_iter().enumerate() {
            let seen = self.sampler.looks.take(&mut outputs);
            let drawn = match output {
                Output::Sampled(candidate) => Drawn::from(candidate),
                Output::Programmed(candidate, left) => Drawn { left: Some(left), ..candidate.into() },
                // What was drawn before it stands; the next draw from there comes upon the fault.
                Output::Failed(_) if idx > 0 => break,
                Output::Failed(fault) => return Err(fault.into()),
                other => unreachable!("a verification asks for draws, not for {other:?}"),
            };
            // Of what is no number nothing was drawn either.
            let drawn = Drawn { seen: seen?, ..drawn };
            let token = drawn.candidate.token;
            verified.drawn.push(drawn);
            if self.guess().get(idx) != Some(&token) {
                break;
            }
            verified.n_accepted += 1;
        }
        Ok(verified)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{Candidate, OutputFault};
    use crate::completion::{CallerId, Outbox, Tag};

    fn work(n_base: usize, guess: &[Token]) -> VerifyWork {
        let reply = Outbox::default().to(CallerId(0), Tag::new(0, 0));
        VerifyWork::new(Arc::new(Sampler::greedy()), Guess::Chain(guess.to_vec()), reply, n_base)
    }

    fn sampled(token: Token) -> Output {
        Output::Sampled(Candidate { token, logprob: -1.0 })
    }

    #[test]
    fn a_guess_is_accepted_up_to_the_first_draw_that_differs() {
        let fault = Output::Failed(OutputFault::NothingToDraw);
        let cases = [
            (vec![sampled(1), sampled(2), sampled(3)], vec![1, 2, 3], 2),
            (vec![sampled(1), sampled(7), sampled(3)], vec![1, 7], 1),
            (vec![sampled(7), sampled(2), sampled(3)], vec![7], 0),
            // A draw that equals what was guessed elsewhere is not that guess.
            (vec![sampled(2), sampled(2), sampled(3)], vec![2], 0),
            (vec![sampled(1), sampled(2), fault.clone()], vec![1, 2], 2),
            (vec![sampled(7), fault.clone(), fault.clone()], vec![7], 0),
        ];
        for (outputs, expected, n_accepted) in cases {
            let verified = work(5, &[1, 2]).take_outputs(outputs.clone()).expect("something was drawn");
            let tokens: Vec<Token> = verified.drawn.iter().map(|drawn| drawn.candidate.token).collect();
            assert_eq!((tokens, verified.n_accepted), (expected, n_accepted), "{outputs:?}");
        }
        assert!(work(5, &[1, 2]).take_outputs(vec![fault.clone(), fault.clone(), fault]).is_err());
    }

    #[test]
    fn only_what_leads_up_to_the_guess_is_cut() {
        let work = work(100, &[1, 2, 3]);
        for (start, n_tokens_max, end) in [
            (0, 1000, Some(103)),
            (0, 103, Some(103)),
            (0, 102, Some(99)),
            (0, 64, Some(64)),
            (98, 4, Some(99)),
            (98, 5, Some(103)),
            (99, 4, Some(103)),
            (99, 3, None),
        ] {
            assert_eq!(work.end(start, n_tokens_max), end, "{n_tokens_max} tokens from {start} on");
        }
        assert_eq!(work.outputs(99).len(), 0);
        let positions: Vec<usize> = work.outputs(103).iter().map(|request| request.position).collect();
        assert_eq!(positions, [99, 100, 101, 102]);
    }
}
