//! A sequence that leaves the engine, and comes back without its KV, or with some of it.

use std::sync::Arc;

use super::Sequence;
use super::steered::SteeredFrom;
use crate::account::Account;
use crate::backend::PAGE_LEN;
use crate::batch::Token;
use crate::kv::{BlockId, Evictions, PageTable, PrefixKey};
use crate::steering::Steering;

impl Sequence {
    /// The blocks from the first on whose KV can be kept elsewhere, and for how many tokens they have it. Once tokens were
    /// evicted, those are the full ones before the first hole: what comes after it has seen what is gone.
    pub(crate) fn n_to_keep(&self) -> (usize, usize) {
        match self.n_blocks_before_holes() {
            Some(n_blocks) => {
                let n_blocks = n_blocks.min(self.n_computed / PAGE_LEN).min(self.blocks.len());
                (n_blocks, n_blocks * PAGE_LEN)
            }
            None => (self.n_blocks_to(self.n_computed), self.n_computed),
        }
    }

    /// The same tokens as one had that was kept, with nothing computed.
    pub(crate) fn restored(
        root: PrefixKey,
        account: Arc<Account>,
        tokens: &[Token],
        steered: Option<(Arc<Steering>, usize)>,
        evictions: Option<Evictions>,
        pages: &mut PageTable,
    ) -> Self {
        let mut sequence = Self::new(root, account);
        sequence.append(tokens, pages);
        sequence.steered = steered.map(|(steering, start)| SteeredFrom::new(steering, start));
        if let Some(evictions) = evictions.filter(|evictions| !evictions.is_empty()) {
            sequence.restore_evictions(evictions, pages);
        }
        sequence
    }

    /// Takes blocks with the KV of its first tokens, of which so many are computed.
    ///
    /// # Panics
    /// Some were computed already.
    pub(crate) fn take_restored(&mut self, blocks: &[BlockId], n_computed: usize, pages: &mut PageTable) {
        assert!(self.n_computed == 0 && self.blocks.is_empty(), "nothing was computed of it");
        blocks.iter().for_each(|&block| self.push_block(block));
        self.advance(n_computed, pages);
    }
}
