//! Guessed tokens, taken over as long as the context would have drawn them itself.
//!
//! One row computes the context's last token and all that were guessed after it, and the context's own draw is made at
//! each of these places. A draw depends on seed, position and the tokens before it alone: as long as the draws equal the
//! guess, each is the one that decoding token by token would have made there. The first that differs is the last that
//! counts, because those after it followed a token that is not there.
//!
//! The nodes of a tree lie behind the context one after the other, in pages that hold them all, and each is a row of its own:
//! it sees the context and the nodes that lead to it, and draws with the history of its own path. The draws walk from the
//! context on, each to the node with its token, as long as there is one (SpecInfer, arXiv 2305.09781, section 4.2).

use std::sync::Arc;

use super::{draw, draw_under};
use crate::batch::{Drawn, Others, Output, OutputFault, OutputRequest, Requests, Start, Token};
use crate::command::Answer;
use crate::completion::{Done, Reply};
use crate::error::EngineError;
use crate::guess::{Guess, GuessTree};
use crate::sampling::Sampler;

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
    /// Of a tree, the nodes that those are.
    pub(crate) branch: Vec<usize>,
}

impl VerifyWork {
    pub(crate) fn new(sampler: Arc<Sampler>, guess: Guess, reply: Reply, n_base: usize) -> Self {
        Self { sampler, guess, reply, n_base }
    }

    /// Leaves so many of the guessed tokens.
    pub(crate) fn cut_guess(&mut self, n_tokens: usize) {
        let guess = std::mem::replace(&mut self.guess, Guess::NOTHING);
        self.guess = guess.within(n_tokens).first(n_tokens);
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

    /// The tree, if it is one.
    pub(crate) fn tree(&self) -> Option<&GuessTree> {
        self.guess.tree()
    }

    /// Where a row from `start` on ends that may have `n_tokens_max` tokens. What leads up to the guess can be cut; the
    /// draws are made in one row, or wait for a step with room for them. Those of a tree begin with it.
    pub(crate) fn end(&self, start: usize, n_tokens_max: usize) -> Option<usize> {
        let target = self.n_base + self.guess().len();
        match start + n_tokens_max {
            end if self.tree().is_some() && start < self.first_draw() => Some(end.min(self.first_draw())),
            end if end >= target => Some(target),
            end => Some(end.min(self.first_draw())).filter(|&end| end > start),
        }
    }

    /// A draw at each place from the context's last token on, then what is looked at beside them. Of a tree, both for each
    /// place: the positions count its nodes one behind the other, as they lie.
    pub(crate) fn outputs(&self, end: usize) -> Requests<'_> {
        let request = |position| {
            let place = position - self.first_draw();
            let start = match (place, self.tree()) {
                (0, _) => Start::At(self.sampler.start()),
                (_, None) => Start::Before,
                (_, Some(tree)) => {
                    Start::After { n_rows: place - tree.parent(place - 1).map_or(0, |parent| parent + 1) }
                }
            };
            let kind = match self.guess.mask(place) {
                None => draw(&self.sampler, start, Others::NONE),
                mask => draw_under(&self.sampler, mask, start, Others::NONE),
            };
            OutputRequest { position, kind }
        };
        let places = self.first_draw()..end;
        if self.tree().is_some() {
            let of_place =
                |position| std::iter::once(request(position)).chain(self.sampler.looks.requests(position));
            return places.flat_map(of_place).collect();
        }
        let looks = places.clone().flat_map(|position| self.sampler.looks.requests(position));
        // One after the other: where nothing is looked at, as mostly, the first is all, of known length.
        let mut requests: Requests<'_> = places.map(request).collect();
        requests.extend(looks);
        requests
    }

    /// Accepts the guess as far as the draws equal it.
    pub(crate) fn take_outputs(&self, outputs: Vec<Output>) -> Result<Verified, EngineError> {
        match self.tree() {
            None => self.take_chain(outputs),
            Some(tree) => self.take_tree(tree, outputs),
        }
    }

    fn take_chain(&self, outputs: Vec<Output>) -> Result<Verified, EngineError> {
        let n_draws = self.guess().len() + 1;
        let mut outputs = outputs.into_iter();
        let draws: Vec<Output> = outputs.by_ref().take(n_draws).collect();
        let mut verified = Verified { drawn: Vec::with_capacity(n_draws), n_accepted: 0, branch: Vec::new() };
        for (idx, output) in draws.into_iter().enumerate() {
            let seen = self.sampler.looks.take(&mut outputs);
            let drawn = match drawn_of(output) {
                Ok(drawn) => drawn,
                // What was drawn before it stands; the next draw from there comes upon the fault.
                Err(_) if idx > 0 => break,
                Err(fault) => return Err(fault.into()),
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

    fn take_tree(&self, tree: &GuessTree, mut outputs: Vec<Output>) -> Result<Verified, EngineError> {
        let n_asked = 1 + self.sampler.looks.n_asked();
        let mut verified = Verified { drawn: Vec::new(), n_accepted: 0, branch: Vec::new() };
        loop {
            let node = verified.branch.last().copied();
            let first = n_asked * node.map_or(0, |node| node + 1);
            let taken = Output::Failed(OutputFault::NothingToDraw);
            let mut of_place = outputs[first..first + n_asked]
                .iter_mut()
                .map(|output| std::mem::replace(output, taken.clone()));
            let drawn = match drawn_of(of_place.next().expect("each place has a draw")) {
                Ok(drawn) => drawn,
                Err(_) if node.is_some() => break,
                Err(fault) => return Err(fault.into()),
            };
            let drawn = Drawn { seen: self.sampler.looks.take(&mut of_place)?, ..drawn };
            let token = drawn.candidate.token;
            verified.drawn.push(drawn);
            match tree.child(node, token) {
                Some(child) => verified.branch.push(child),
                None => break,
            }
        }
        verified.n_accepted = verified.branch.len();
        Ok(verified)
    }
}

fn drawn_of(output: Output) -> Result<Drawn, OutputFault> {
    match output {
        Output::Sampled(candidate) => Ok(candidate.into()),
        Output::Programmed(candidate, left) => Ok(Drawn { left: Some(left), ..candidate.into() }),
        Output::Failed(fault) => Err(fault),
        other => unreachable!("a verification asks for draws, not for {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Candidate;
    use crate::completion::{CallerId, Outbox, Tag};
    use crate::guess::GuessNode;

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
    fn the_draws_of_a_tree_walk_to_the_first_that_no_node_has() {
        let node = |token, parent| GuessNode { token, parent };
        let nodes = [node(1, None), node(2, None), node(3, Some(0)), node(4, Some(1)), node(3, Some(1))];
        let tree = GuessTree::new(&nodes).expect("a tree");
        let reply = Outbox::default().to(CallerId(0), Tag::new(0, 0));
        let work = VerifyWork::new(Arc::new(Sampler::greedy()), tree.into(), reply, 5);
        assert_eq!([work.end(0, 1000), work.end(4, 6), work.end(4, 5)], [Some(4), Some(10), None]);
        assert_eq!((work.outputs(4).len(), work.outputs(10).len()), (0, 6));
        let fault = Output::Failed(OutputFault::NothingToDraw);
        let cases = [
            // The draws behind the context, then those behind each node.
            ([2, 9, 3, 9, 9, 7], vec![2, 3, 7], vec![1, 4]),
            ([2, 9, 4, 9, 8, 9], vec![2, 4, 8], vec![1, 3]),
            ([1, 3, 9, 5, 9, 9], vec![1, 3, 5], vec![0, 2]),
            ([1, 4, 9, 9, 9, 9], vec![1, 4], vec![0]),
            ([3, 9, 9, 9, 9, 9], vec![3], vec![]),
        ];
        for (draws, expected, branch) in cases {
            let verified = work.take_outputs(draws.map(sampled).to_vec()).expect("something was drawn");
            let tokens: Vec<Token> = verified.drawn.iter().map(|drawn| drawn.candidate.token).collect();
            assert_eq!((tokens, verified.n_accepted), (expected, branch.len()), "{draws:?}");
            assert_eq!(verified.branch, branch);
        }
        let mut draws = [2, 9, 3, 9, 9, 7].map(sampled).to_vec();
        draws[5] = fault.clone();
        assert_eq!(work.take_outputs(draws.clone()).expect("two were drawn").drawn.len(), 2);
        draws[0] = fault;
        assert!(work.take_outputs(draws).is_err());
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
