//! The tokens of one context and the blocks that hold their KV.

use crate::account::Account;
use crate::backend::PAGE_LEN;
use crate::batch::Token;
use crate::pages::{BlockId, PageTable};
use crate::prefix::PrefixKey;
use std::sync::Arc;

/// A token sequence, of which the first `n_computed` tokens have their KV in `blocks`. A block past those is held for
/// the token that is computed next.
///
/// Owners are never cloned: [`Kv::fork`] takes part in the count of holders.
#[derive(Debug)]
pub(super) struct Kv {
    pub(super) tokens: Vec<Token>,
    pub(super) n_computed: usize,
    pub(super) blocks: Vec<BlockId>,
    /// Key of each full block, as far as they have been computed.
    keys: Vec<PrefixKey>, // at most n_computed / PAGE_LEN
    root: PrefixKey,
}

impl Kv {
    pub(super) fn new(root: PrefixKey) -> Self {
        Self { tokens: Vec::new(), n_computed: 0, blocks: Vec::new(), keys: Vec::new(), root }
    }

    /// The same tokens over the same blocks, as far as anything is in them.
    pub(super) fn fork(&self, pages: &mut PageTable) -> Self {
        let blocks = self.blocks[..self.n_blocks_written()].to_vec();
        for &block in &blocks {
            pages.hold(block);
        }
        Self {
            tokens: self.tokens.clone(),
            n_computed: self.n_computed,
            blocks,
            keys: self.keys.clone(),
            root: self.root,
        }
    }

    /// Keeps the first `n_tokens` tokens and lets go of the blocks past them.
    pub(super) fn truncate(&mut self, n_tokens: usize, pages: &mut PageTable) {
        self.tokens.truncate(n_tokens);
        self.rewind(n_tokens);
        self.trim(pages);
    }

    /// Lets go of the blocks past the last token.
    pub(super) fn trim(&mut self, pages: &mut PageTable) {
        for block in self.blocks.drain(self.tokens.len().div_ceil(PAGE_LEN).min(self.blocks.len())..) {
            pages.release(block);
        }
    }

    /// Blocks with anything in them.
    fn n_blocks_written(&self) -> usize {
        self.n_computed.div_ceil(PAGE_LEN)
    }

    /// Lets go of the blocks that nothing is in, unless the step has a part in them.
    pub(super) fn forget_unwritten(&mut self, step: u64, pages: &mut PageTable) {
        while self.blocks.len() > self.n_blocks_written() {
            let Some(block) = self.blocks.pop_if(|block| !pages.is_pinned(*block, step)) else { break };
            pages.release(block);
        }
    }

    /// Treats tokens from `n_tokens` on as not computed; their blocks stay to be written again.
    pub(super) fn rewind(&mut self, n_tokens: usize) {
        self.n_computed = self.n_computed.min(n_tokens);
        self.keys.truncate(self.n_computed / PAGE_LEN);
    }

    /// Keeps the first `n_blocks` blocks; the KV past them is computed again when it is needed.
    pub(super) fn forget_after(&mut self, n_blocks: usize, pages: &mut PageTable) {
        self.rewind(n_blocks * PAGE_LEN);
        for block in self.blocks.drain(n_blocks..) {
            pages.release(block);
        }
    }

    /// Lets go of all blocks.
    pub(super) fn forget(&mut self, pages: &mut PageTable) {
        self.forget_after(0, pages);
    }

    /// Takes full pages from the prefix cache up to position `end`; returns how many tokens that spares.
    pub(super) fn adopt_prefix(
        &mut self,
        end: usize,
        step: u64,
        pages: &mut PageTable,
        payer: &Arc<Account>,
    ) -> usize {
        let start = self.n_computed;
        if start + PAGE_LEN <= end {
            self.forget_unwritten(step, pages);
        }
        while self.n_computed + PAGE_LEN <= end && self.blocks.len() * PAGE_LEN == self.n_computed {
            let key = self.next_key();
            let Some(block) = pages.adopt(&key, payer) else { break };
            self.blocks.push(block);
            self.keys.push(key);
            self.n_computed += PAGE_LEN;
        }
        self.n_computed - start
    }

    /// Notes that the KV of all tokens before `end` is computed, and enters pages that became full in the
    /// prefix cache.
    pub(super) fn advance(&mut self, end: usize, pages: &mut PageTable) {
        self.n_computed = end;
        while (self.keys.len() + 1) * PAGE_LEN <= end {
            let key = self.next_key();
            pages.enter_key(self.blocks[self.keys.len()], key);
            self.keys.push(key);
        }
    }

    fn next_key(&self) -> PrefixKey {
        let start = self.keys.len() * PAGE_LEN;
        self.keys.last().unwrap_or(&self.root).next(&self.tokens[start..start + PAGE_LEN])
    }
}
