//! The tokens of a context on its caller's side.

use std::sync::Arc;

use crate::batch::{Token, Tokens};

/// Tokens that forks share as a whole.
const N_SEGMENT_TOKENS: usize = 4096;

/// Tokens in full segments that forks share, and a tail of the context's own: a fork counts the segments and copies the
/// tail, however long the context is.
#[derive(Debug, Default)]
pub(super) struct History<const N: usize = N_SEGMENT_TOKENS> {
    segments: Vec<Arc<[Token]>>, // of N tokens each
    tail: Vec<Token>,            // fewer than N
}

impl<const N: usize> History<N> {
    pub(super) fn len(&self) -> usize {
        self.segments.len() * N + self.tail.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn view(&self) -> Tokens<'_> {
        Tokens::shared(&self.segments, &self.tail, N)
    }

    /// The same tokens, for another context.
    pub(super) fn fork(&self) -> Self {
        Self { segments: self.segments.clone(), tail: self.tail.clone() }
    }

    pub(super) fn push(&mut self, token: Token) {
        self.tail.push(token);
        if self.tail.len() == N {
            self.seal();
        }
    }

    pub(super) fn append(&mut self, mut tokens: &[Token]) {
        while !tokens.is_empty() {
            let (first, rest) = tokens.split_at(tokens.len().min(N - self.tail.len()));
            self.tail.extend_from_slice(first);
            if self.tail.len() == N {
                self.seal();
            }
            tokens = rest;
        }
    }

    fn seal(&mut self) {
        self.segments.push(self.tail.as_slice().into());
        self.tail.clear();
    }

    /// Keeps the first `n_tokens`, if there are more.
    pub(super) fn truncate(&mut self, n_tokens: usize) {
        let n_segments = n_tokens / N;
        if n_segments >= self.segments.len() {
            return self.tail.truncate(n_tokens - self.segments.len() * N);
        }
        self.tail.clear();
        self.tail.extend_from_slice(&self.segments[n_segments][..n_tokens % N]);
        self.segments.truncate(n_segments);
    }
}

impl<const N: usize> From<Vec<Token>> for History<N> {
    fn from(tokens: Vec<Token>) -> Self {
        let mut history = Self::default();
        history.append(&tokens);
        history
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Act {
        Push(Token),
        Append(Vec<Token>),
        Truncate(usize),
        Fork,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            any::<Token>().prop_map(Act::Push),
            prop::collection::vec(any::<Token>(), 0..20).prop_map(Act::Append),
            (0..60usize).prop_map(Act::Truncate),
            Just(Act::Fork),
        ]
    }

    proptest! {
        #[test]
        fn every_fork_has_its_own_tokens(acts in prop::collection::vec((0..4usize, act()), 0..60)) {
            let mut all = vec![(History::<5>::default(), Vec::new())];
            for (idx, act) in acts {
                let n = all.len();
                let (history, tokens) = &mut all[idx % n];
                match act {
                    Act::Push(token) => {
                        history.push(token);
                        tokens.push(token);
                    }
                    Act::Append(more) => {
                        history.append(&more);
                        tokens.extend(more);
                    }
                    Act::Truncate(n_tokens) => {
                        history.truncate(n_tokens);
                        tokens.truncate(n_tokens);
                    }
                    Act::Fork => {
                        let fork = (history.fork(), tokens.clone());
                        all.push(fork);
                    }
                }
                for (history, tokens) in &all {
                    prop_assert_eq!(history.len(), tokens.len());
                    prop_assert_eq!(&history.view().to_vec(), tokens);
                }
            }
        }
    }
}
