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
    /// The key of a page without steering, with what is to be said on this page.
    pub(super) fn of_page(&self, page_idx: usize, key: PrefixKey) -> PrefixKey {
        match self.start / PAGE_LEN == page_idx {
            true => key.steered(self.steering.fingerprint(), self.start),
            false => key,
        }
    }
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
        let starts = [&self.steered, &steered].into_iter().flatten().map(|steered| steered.start);
        let n_alike = starts.min().unwrap_or(usize::MAX).min(self.tokens.len());
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

    /// Whether the same is added to the same tokens of another.
    pub(crate) fn is_steered_as(&self, other: &Self) -> bool {
        self.steered == other.steered
    }

    /// Bytes of what is added.
    pub(crate) fn steering_bytes(&self) -> u64 {
        self.steering().map_or(0, |steering| steering.n_bytes() as u64)
    }
}
