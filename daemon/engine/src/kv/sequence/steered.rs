//! A sequence whose tokens are steered, from one of them on.
//!
//! The KV of those before it is that of any other sequence with the same tokens. The key of the page with the first of them
//! says how it is steered, and so do those of all pages after it, which follow from it.

use std::sync::Arc;

use super::Sequence;
use crate::backend::PAGE_LEN;
use crate::kv::{PageTable, PrefixKey};
use crate::steering::{Steered, Steering};

/// What is added to the tokens of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SteeredFrom {
    steering: Arc<Steering>,
    /// The first one's number.
    start: usize,
}

impl SteeredFrom {
    /// This is added to the tokens from this number on.
    pub(super) fn new(steering: Arc<Steering>, start: usize) -> Self {
        Self { steering, start }
    }

    /// The key of a page without steering, with what is to be said on this page.
    pub(super) fn of_page(&self, page_idx: usize, key: PrefixKey) -> PrefixKey {
        match self.start / PAGE_LEN == page_idx {
            true => key.steered(self.steering.fingerprint(), self.start),
            false => key,
        }
    }
}

/// Tokens from the first on to which both add the same.
fn n_before_difference(one: &Option<SteeredFrom>, other: &Option<SteeredFrom>) -> usize {
    let starts = [one, other].into_iter().flatten().map(|steered| steered.start);
    if one == other { usize::MAX } else { starts.min().unwrap_or(usize::MAX) }
}

impl Sequence {
    /// Steers the tokens from this index on, or none, in the place of what was added before. What was computed otherwise is
    /// computed anew when it is needed.
    ///
    /// # Panics
    /// Tokens were evicted.
    pub(crate) fn steer(&mut self, steering: Option<Arc<Steering>>, start: usize, pages: &mut PageTable) {
        assert!(!self.is_holed(), "a context is steered before anything of it is evicted");
        let steered = steering.map(|steering| SteeredFrom { steering, start });
        if steered == self.steered {
            return;
        }
        let n_alike = n_before_difference(&self.steered, &steered).min(self.tokens.len());
        // Forks hold the same tokens with keys beside them: from here on its keys are others.
        let tokens = self.view(pages).copy_of(n_alike..self.tokens.len());
        self.truncate(n_alike, pages);
        self.append(&tokens, pages);
        self.steered = steered;
    }

    /// How a row of the tokens `start..end` is steered, if any token of the sequence before its end is.
    pub(crate) fn steered(&self, start: usize, end: usize) -> Option<Steered<'_>> {
        let steered = self.steered.as_ref().filter(|steered| steered.start < end)?;
        let index = self.row_index(start);
        let from = match steered.start.checked_sub(start) {
            Some(n_before) => index + n_before,
            None => steered.start.min(index),
        };
        Some(Steered { steering: &steered.steering, from })
    }

    /// What is added to tokens, from one on that may be there or come.
    pub(crate) fn steering(&self) -> Option<&Steering> {
        self.steered.as_ref().map(|steered| &*steered.steering)
    }

    /// Tokens from the first on, there may be fewer, to which the same is added as to those of another.
    pub(crate) fn n_steered_as(&self, other: &Self) -> usize {
        n_before_difference(&self.steered, &other.steered)
    }

    /// What is added, and from which token on.
    pub(crate) fn steering_from(&self) -> Option<(Arc<Steering>, usize)> {
        self.steered.as_ref().map(|steered| (steered.steering.clone(), steered.start))
    }

    /// Bytes of what is added.
    pub(crate) fn steering_bytes(&self) -> u64 {
        self.steering().map_or(0, |steering| steering.n_bytes() as u64)
    }
}
