//! The tokens of one context and the blocks that hold their KV.

use super::{BlockId, PageTable, PrefixKey};
use crate::account::Account;
use crate::backend::PAGE_LEN;
use crate::batch::{PageId, Token};
use std::cell::Cell;
use std::sync::Arc;

/// A token sequence, of which the first `n_computed` tokens have their KV in `blocks`. A block past those is held for
/// the token that is computed next.
///
/// ```text
/// 16 · keys  ≤  n_computed  ≤  n_once_computed  ≤  tokens      and      n_computed  ≤  16 · blocks
/// ```
///
/// Tokens past the context's own, and the KV of them, are spares: what a question has computed beyond its end.
///
/// Owners are never cloned: [`Sequence::fork`] takes part in the count of holders.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<Token>,
    pub(crate) n_computed: usize,
    blocks: Vec<BlockId>,
    /// Where the blocks are, as far as [`Sequence::locate`] has looked.
    places: Places,
    /// Tokens from the first on whose KV was computed once. Those past `n_computed` lost it for want of room:
    /// computing them again is charged to nobody.
    n_once_computed: usize,
    /// The number of tokens up to the one whose hidden state the device keeps for the context.
    n_to_state: Option<usize>,
    /// Who pays for the blocks.
    account: Arc<Account>,
    /// Key of each full block, as far as they have been computed.
    keys: Vec<PrefixKey>, // at most n_computed / PAGE_LEN
    root: PrefixKey,
}

/// The pages of a sequence's blocks. They are looked up again only after blocks of anybody's have moved.
#[derive(Clone, Debug, Default)]
struct Places {
    table: Vec<PageId>,
    /// Blocks from the first on that are the ones that were looked up.
    n_same: usize,
    /// Blocks in host memory among those that were looked up; their entries in the table mean nothing.
    n_away: usize,
    /// Entries of the table from the first on that the backend was told and that have not changed since.
    n_told: Cell<usize>,
    /// [`PageTable::n_moves`] at the time.
    n_moves: u64,
}

impl Places {
    fn look_up(&mut self, blocks: &[BlockId], pages: &PageTable) {
        if self.n_moves != pages.n_moves() || self.n_away > 0 {
            (self.n_same, self.n_away, self.n_moves) = (0, 0, pages.n_moves());
        }
        self.table.truncate(blocks.len());
        self.keep_told(blocks.len());
        for (block_idx, &block) in blocks.iter().enumerate().skip(self.n_same) {
            let page = pages.page(block);
            self.n_away += usize::from(page.is_none());
            let page = page.unwrap_or(PageId(u32::MAX));
            match self.table.get_mut(block_idx) {
                Some(entry) if *entry == page => {}
                Some(entry) => {
                    *entry = page;
                    self.keep_told(block_idx);
                }
                None => self.table.push(page),
            }
        }
        self.n_same = blocks.len();
    }

    fn keep_told(&self, n_blocks: usize) {
        self.n_told.set(self.n_told.get().min(n_blocks));
    }

    /// Whether all pages of these blocks are known, and on the device.
    fn are_there(&self, n_blocks: usize, pages: &PageTable) -> bool {
        self.n_same >= n_blocks && self.n_away == 0 && self.n_moves == pages.n_moves()
    }
}

impl Sequence {
    pub(crate) fn new(root: PrefixKey, account: Arc<Account>) -> Self {
        Self {
            tokens: Vec::new(),
            n_computed: 0,
            blocks: Vec::new(),
            places: Places::default(),
            n_once_computed: 0,
            n_to_state: None,
            account,
            keys: Vec::new(),
            root,
        }
    }

    /// The same tokens over the same blocks, as far as anything is in them, for an account of the same user.
    pub(crate) fn fork(&self, account: Arc<Account>, pages: &mut PageTable) -> Self {
        let blocks = self.blocks[..self.n_blocks_written()].to_vec();
        for &block in &blocks {
            pages.hold(block, &account);
        }
        Self {
            tokens: self.tokens.clone(),
            n_computed: self.n_computed,
            blocks,
            places: Places::default(),
            // What was lost is computed again at the cost of whoever lost it, once.
            n_once_computed: self.n_computed,
            n_to_state: None,
            account,
            keys: self.keys.clone(),
            root: self.root,
        }
    }

    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Finds out where the blocks are; returns how many are in host memory.
    pub(crate) fn locate(&mut self, pages: &PageTable) -> usize {
        self.places.look_up(&self.blocks, pages);
        self.places.n_away
    }

    /// The pages of the first `n_blocks` blocks, all of them on the device, as the backend is told them now; and how many
    /// from the first on are as it was told before.
    ///
    /// # Panics
    /// They were not located since they changed, or are not on the device.
    pub(crate) fn tell_pages(&self, n_blocks: usize, pages: &PageTable) -> (&[PageId], usize) {
        assert!(self.places.are_there(n_blocks, pages), "pages are located, and on the device");
        let n_told = self.places.n_told.replace(n_blocks);
        (&self.places.table[..n_blocks], n_told.min(n_blocks))
    }

    /// As [`Self::tell_pages`], of all tokens, where they were computed and their pages are on the device; else none.
    pub(crate) fn tell_pages_there(&self, pages: &PageTable) -> (&[PageId], usize) {
        let n_blocks = self.tokens.len().div_ceil(PAGE_LEN);
        let is_computed = self.n_computed >= self.tokens.len();
        match is_computed && self.places.are_there(n_blocks, pages) {
            true => self.tell_pages(n_blocks, pages),
            false => (&[], 0),
        }
    }

    /// Adds a block for the tokens that follow.
    pub(crate) fn push_block(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// Puts another block in a block's place; the caller lets go of the one that is returned.
    pub(crate) fn replace_block(&mut self, block_idx: usize, block: BlockId) -> BlockId {
        self.places.n_same = self.places.n_same.min(block_idx);
        std::mem::replace(&mut self.blocks[block_idx], block)
    }

    /// Keeps the first `n_tokens` tokens and lets go of the blocks past them.
    pub(crate) fn truncate(&mut self, n_tokens: usize, pages: &mut PageTable) {
        self.tokens.truncate(n_tokens);
        self.rewind(n_tokens);
        self.trim(pages);
    }

    /// Brings the tokens to these: the first `n_kept` that there are, then `appended`. What lay past the first `n_kept`
    /// stays as far as it is the same.
    pub(crate) fn edit(&mut self, n_kept: usize, appended: &[Token], pages: &mut PageTable) {
        let behind = self.tokens[n_kept..].iter().zip(appended);
        let n_same = behind.take_while(|(held, wanted)| held == wanted).count();
        self.truncate(n_kept + n_same, pages);
        self.tokens.extend_from_slice(&appended[n_same..]);
    }

    /// Lets go of the blocks past the last token.
    pub(crate) fn trim(&mut self, pages: &mut PageTable) {
        self.release_after(self.tokens.len().div_ceil(PAGE_LEN), pages);
    }

    /// The last blocks first: what the prefix cache gives up first is then the end of a text, and its beginning, which
    /// most will share, stays to be found.
    fn release_after(&mut self, n_blocks: usize, pages: &mut PageTable) {
        self.places.n_same = self.places.n_same.min(n_blocks);
        for block in self.blocks.drain(n_blocks.min(self.blocks.len())..).rev() {
            pages.release(block, &self.account);
        }
    }

    /// Blocks with anything in them.
    fn n_blocks_written(&self) -> usize {
        self.n_computed.div_ceil(PAGE_LEN)
    }

    /// Of the tokens `start..end`, those whose KV was computed before.
    pub(crate) fn n_computed_again(&self, start: usize, end: usize) -> usize {
        self.n_once_computed.min(end).saturating_sub(start)
    }

    /// Tokens whose KV was forgotten for want of room.
    pub(crate) fn n_lost(&self) -> usize {
        self.n_once_computed - self.n_computed
    }

    /// Lets go of the blocks that nothing is in.
    pub(crate) fn forget_unwritten(&mut self, pages: &mut PageTable) {
        self.release_after(self.n_blocks_written(), pages);
    }

    /// Lets go of blocks that nothing is left in and that others hold: writing there would take other pages anyway, and
    /// none may come free between the copies of a plan.
    pub(crate) fn forget_shared_unwritten(&mut self, pages: &mut PageTable) {
        let n_blocks = self.n_blocks_written();
        if self.blocks.get(n_blocks).is_some_and(|&block| pages.is_shared(block)) {
            self.release_after(n_blocks, pages);
        }
    }

    /// Treats tokens from `n_tokens` on as never computed; their blocks stay to be written again.
    pub(crate) fn rewind(&mut self, n_tokens: usize) {
        self.n_computed = self.n_computed.min(n_tokens);
        self.n_once_computed = self.n_once_computed.min(n_tokens);
        self.n_to_state = self.n_to_state.filter(|&n| n <= n_tokens);
        self.keys.truncate(self.n_computed / PAGE_LEN);
    }

    /// Notes that the device keeps the hidden state of the last of so many tokens, or none that is known.
    pub(crate) fn set_state(&mut self, n_tokens: Option<usize>) {
        self.n_to_state = n_tokens;
    }

    /// Whether the device keeps the hidden state of the last token.
    pub(crate) fn has_state(&self) -> bool {
        self.n_to_state == Some(self.tokens.len())
    }

    /// Gives up the last block for want of room; the KV in it is computed again when it is needed.
    pub(crate) fn give_up_last_block(&mut self, pages: &mut PageTable) {
        let n_blocks = self.blocks.len().saturating_sub(1);
        self.n_computed = self.n_computed.min(n_blocks * PAGE_LEN);
        self.keys.truncate(n_blocks);
        self.release_after(n_blocks, pages);
    }

    /// Gives up the blocks past the first `n_blocks`, because nobody knows any more what is in them; their KV is computed
    /// again when it is needed.
    pub(crate) fn lose_after(&mut self, n_blocks: usize, pages: &mut PageTable) {
        self.n_computed = self.n_computed.min(n_blocks * PAGE_LEN);
        self.keys.truncate(self.n_computed / PAGE_LEN);
        self.release_after(n_blocks, pages);
    }

    /// Lets go of all blocks.
    pub(crate) fn forget(&mut self, pages: &mut PageTable) {
        self.rewind(0);
        self.release_after(0, pages);
    }

    /// Takes full pages from the prefix cache up to position `end`; returns how many tokens that spares.
    pub(crate) fn adopt_prefix(&mut self, end: usize, pages: &mut PageTable) -> usize {
        let start = self.n_computed;
        if start + PAGE_LEN <= end {
            self.forget_unwritten(pages);
        }
        while self.n_computed + PAGE_LEN <= end && self.blocks.len() * PAGE_LEN == self.n_computed {
            let key = self.next_key();
            let Some(block) = pages.adopt(&key, &self.account) else { break };
            self.blocks.push(block);
            self.keys.push(key);
            self.n_computed += PAGE_LEN;
        }
        self.n_once_computed = self.n_once_computed.max(self.n_computed);
        self.n_computed - start
    }

    /// Notes that the KV of all tokens before `end` is computed, and enters pages that became full in the
    /// prefix cache.
    pub(crate) fn advance(&mut self, end: usize, pages: &mut PageTable) {
        self.n_computed = end;
        self.n_once_computed = self.n_once_computed.max(end);
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
