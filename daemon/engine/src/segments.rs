//! Lists that forks share.

use std::sync::Arc;

/// Entries in full segments that forks share, and a tail of the list's own: a fork counts the segments and copies the tail,
/// however long the list is.
#[derive(Debug, PartialEq)]
pub(crate) struct Segments<T, const N: usize> {
    segments: Vec<Arc<[T]>>, // of N entries each
    tail: Vec<T>,            // fewer than N
}

impl<T, const N: usize> Default for Segments<T, N> {
    fn default() -> Self {
        Self { segments: Vec::new(), tail: Vec::new() }
    }
}

impl<T: Copy, const N: usize> Segments<T, N> {
    pub(crate) fn len(&self) -> usize {
        self.segments.len() * N + self.tail.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn segments(&self) -> &[Arc<[T]>] {
        &self.segments
    }

    pub(crate) fn tail(&self) -> &[T] {
        &self.tail
    }

    pub(crate) fn last(&self) -> Option<&T> {
        self.tail.last().or_else(|| self.segments.last()?.last())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.segments.iter().flat_map(|segment| segment.iter()).chain(&self.tail)
    }

    /// The same entries, for another context.
    pub(crate) fn fork(&self) -> Self {
        Self { segments: self.segments.clone(), tail: self.tail.clone() }
    }

    pub(crate) fn push(&mut self, entry: T) {
        self.tail.push(entry);
        if self.tail.len() == N {
            self.seal();
        }
    }

    pub(crate) fn append(&mut self, mut entries: &[T]) {
        while !entries.is_empty() {
            let (first, rest) = entries.split_at(entries.len().min(N - self.tail.len()));
            self.tail.extend_from_slice(first);
            if self.tail.len() == N {
                self.seal();
            }
            entries = rest;
        }
    }

    fn seal(&mut self) {
        self.segments.push(self.tail.as_slice().into());
        self.tail.clear();
    }

    /// Keeps the first `n`, if there are more.
    pub(crate) fn truncate(&mut self, n: usize) {
        let n_segments = n / N;
        if n_segments >= self.segments.len() {
            return self.tail.truncate(n - self.segments.len() * N);
        }
        self.tail.clear();
        self.tail.extend_from_slice(&self.segments[n_segments][..n % N]);
        self.segments.truncate(n_segments);
    }
}

impl<T: Copy, const N: usize> From<Vec<T>> for Segments<T, N> {
    fn from(entries: Vec<T>) -> Self {
        let mut list = Self::default();
        list.append(&entries);
        list
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::Token;

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
            let mut all = vec![(Segments::<Token, 5>::default(), Vec::new())];
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
                    prop_assert_eq!(history.last(), tokens.last());
                    prop_assert_eq!(&history.iter().copied().collect::<Vec<_>>(), tokens);
                }
            }
        }
    }
}
