//! The tokens of one context and the blocks that hold their KV.

mod branch;
mod evicted;
mod restored;
mod steered;

use self::evicted::Holed;
use self::steered::SteeredFrom;
use super::bundles::BundleId;
use super::shared::Shared;
use super::tokens::TokenList;
use super::{BlockId, PageTable, PrefixKey};
use crate::account::Account;
use crate::backend::PAGE_LEN;
use crate::batch::{PageId, Token, Tokens};
use crate::history::History;
use std::cell::Cell;
use std::sync::Arc;

/// A token sequence, of which the first `n_computed` tokens have their KV in `blocks`. A block past those is held for
/// the token that is computed next.
///
/// ```text
/// 16 · n_keys  ≤  n_computed  ≤  n_once_computed  ≤  tokens      and      n_computed  ≤  16 · blocks
/// ```
///
/// Of the blocks, the first `bundles` times the length of a bundle are held through bundles, and they are full; each of
/// the others is held by itself. So all that is written to is held by itself.
///
/// Tokens past the context's own, and the KV of them, are spares: what a question has computed beyond its end.
///
/// Once tokens were evicted (`evicted`), blocks without any are let go of, and what is said of blocks is said of cells: of
/// the places in them up to the one that takes the next token.
///
/// Owners are never cloned: [`Sequence::fork`] takes part in the count of holders.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// All that it has had, those that were evicted included: what is called a number of tokens here counts them.
    pub(crate) tokens: TokenList,
    pub(crate) n_computed: usize,
    blocks: Shared<BlockId>,
    /// Blocks from this one on have no other holder and no key, as far as is known. A decoded token is written to the last of
    /// them without a look at what says so of each block, which lies far from all else that a row touches.
    own_from: usize,
    /// What the first blocks are held through.
    bundles: Vec<BundleId>,
    /// Where the blocks are, as far as [`Sequence::locate`] has looked.
    places: BlockPages,
    /// Tokens from the first on whose KV was computed once. Those past `n_computed` lost it for want of room:
    /// computing them again is charged to no account.
    n_once_computed: usize,
    /// The number of tokens up to the one whose hidden state the device keeps for the context.
    n_to_state: Option<usize>,
    /// The account that pays for the blocks.
    account: Arc<Account>,
    /// Full blocks from the first on whose keys are known.
    n_keys: usize, // at most n_computed / PAGE_LEN
    root: PrefixKey,
    steered: Option<SteeredFrom>,
    /// What there is to know once tokens were evicted.
    holed: Option<Box<Holed>>,
}

/// The pages of a sequence's blocks. They are looked up again only after blocks of any context have moved.
#[derive(Debug, Default)]
struct BlockPages {
    table: Shared<PageId>,
    /// Blocks from the first on that are the ones that were looked up.
    n_same: usize,
    /// Blocks in host memory among those that were looked up; their entries in the table mean nothing.
    n_away: usize,
    /// Entries of the table from the first on that the backend was told and that have not changed since.
    n_told: Cell<usize>,
    /// [`PageTable::n_tellings_lost`] at the time.
    n_tellings_lost: Cell<u64>,
    /// [`PageTable::n_moves`] at the time.
    n_moves: u64,
}

impl BlockPages {
    /// Those of the first `n_blocks` blocks, for another context that holds the same.
    fn beginning(&mut self, n_blocks: usize) -> Self {
        let n_same = self.n_same.min(n_blocks);
        match self.n_away {
            0 => Self { table: self.table.fork(n_same), n_same, n_moves: self.n_moves, ..Self::default() },
            _ => Self::default(),
        }
    }

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
            match self.table.get(block_idx) {
                Some(&known) if known == page => {}
                Some(_) => {
                    self.table.own()[block_idx] = page;
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

/// What the backend was told of a slot's pages.
#[derive(Debug)]
pub(crate) struct Told(BlockPages);

impl Sequence {
    pub(crate) fn new(root: PrefixKey, account: Arc<Account>) -> Self {
        Self {
            tokens: TokenList::default(),
            n_computed: 0,
            blocks: Shared::default(),
            own_from: 0,
            bundles: Vec::new(),
            places: BlockPages::default(),
            n_once_computed: 0,
            n_to_state: None,
            account,
            n_keys: 0,
            root,
            steered: None,
            holed: None,
        }
    }

    /// The same tokens over the same blocks, as far as anything is in them, for an account of the same user.
    ///
    /// For the same account that is a count for each segment of the tokens and for each bundle of blocks; for another one,
    /// which may come to pay, each block is held. Long lists of blocks are copied when either side changes its own.
    pub(crate) fn fork(&mut self, account: Arc<Account>, pages: &mut PageTable) -> Self {
        self.bundle_up(pages);
        let n_blocks = self.n_blocks_written();
        let (bundled, rest) = self.blocks[..n_blocks].split_at(self.n_bundled(pages));
        for (&bundle, blocks) in self.bundles.iter().zip(bundled.chunks(pages.n_bundle_blocks())) {
            pages.hold_bundle(bundle, blocks, &account);
        }
        rest.iter().for_each(|&block| pages.hold(block, &account));
        self.own_from = self.own_from.max(n_blocks);
        Self {
            tokens: self.tokens.fork(&mut pages.tokens),
            n_computed: self.n_computed,
            blocks: self.blocks.fork(n_blocks),
            own_from: n_blocks,
            bundles: self.bundles.clone(),
            places: self.places.beginning(n_blocks),
            // What was lost is computed again at the cost of the context that lost it, once.
            n_once_computed: self.n_computed,
            n_to_state: None,
            account,
            n_keys: self.n_keys,
            root: self.root,
            steered: self.steered.clone(),
            holed: self.fork_holed(pages),
        }
    }

    /// All tokens, those that are gone included.
    pub(crate) fn view<'a>(&'a self, pages: &'a PageTable) -> Tokens<'a> {
        self.tokens.view(&pages.tokens)
    }

    /// Whether these are the tokens that are there.
    pub(crate) fn are_tokens(&self, tokens: &History, pages: &PageTable) -> bool {
        let n_tokens = self.n_kept();
        tokens.len() == n_tokens
            && match self.is_holed() {
                true => self.kept_tokens(pages).eq(tokens.iter().copied()),
                false => self.view(pages).n_common(tokens.view()) == n_tokens,
            }
    }

    /// Appends a token.
    pub(crate) fn push(&mut self, token: Token, pages: &mut PageTable) {
        self.append(&[token], pages);
    }

    /// Appends tokens.
    pub(crate) fn append(&mut self, tokens: &[Token], pages: &mut PageTable) {
        self.tokens.extend(tokens, &mut pages.tokens);
        self.list_appended(tokens, pages);
    }

    /// Holds full blocks through bundles, as far as they make some. The last token is left out: it is the one that is
    /// computed again when its output is asked for.
    fn bundle_up(&mut self, pages: &mut PageTable) {
        // Pages of a context with evictions may come to be let go of one by one.
        while !self.is_holed()
            && (self.bundles.len() + 1) * pages.n_bundle_blocks() * PAGE_LEN < self.n_computed
        {
            self.bundles.push(pages.bundle(&self.account));
        }
    }

    /// Holds each block by itself that is in a bundle with one that is not full.
    fn unbundle_unwritten(&mut self, pages: &mut PageTable) {
        let n_full = self.block_of(self.n_computed) / pages.n_bundle_blocks();
        while self.bundles.len() > n_full {
            self.unbundle_last(pages);
        }
    }

    fn unbundle_last(&mut self, pages: &mut PageTable) {
        let (end, n_blocks) = (self.n_bundled(pages), pages.n_bundle_blocks());
        let bundle = self.bundles.pop().expect("there is one");
        pages.unbundle(bundle, &self.blocks[end - n_blocks..end], &self.account);
    }

    /// Blocks that are held through bundles.
    fn n_bundled(&self, pages: &PageTable) -> usize {
        self.bundles.len() * pages.n_bundle_blocks()
    }

    /// Blocks that no other context holds.
    pub(crate) fn n_alone(&self, pages: &PageTable) -> usize {
        let (bundled, rest) = self.blocks.split_at(self.n_bundled(pages));
        let n_of = |blocks: &[BlockId]| blocks.iter().filter(|&&block| !pages.is_shared(block)).count();
        let bundled = self.bundles.iter().zip(bundled.chunks(pages.n_bundle_blocks()));
        let bundled = bundled.filter(|&(&bundle, _)| !pages.is_bundle_shared(bundle));
        bundled.map(|(_, blocks)| n_of(blocks)).sum::<usize>() + n_of(rest)
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
        let n_lost = pages.n_tellings_lost();
        let is_heard = self.places.n_tellings_lost.replace(n_lost) == n_lost;
        let n_told = self.places.n_told.replace(n_blocks).min(n_blocks);
        (&self.places.table[..n_blocks], if is_heard { n_told } else { 0 })
    }

    /// The backend knows nothing of its pages: it has another slot.
    pub(crate) fn forget_told(&mut self) {
        self.places.n_told.set(0);
    }

    /// What the backend knows, before all is forgotten.
    pub(crate) fn take_told(&mut self) -> Told {
        Told(std::mem::take(&mut self.places))
    }

    /// The sequence comes to the slot of which the backend was told this.
    pub(crate) fn come_to(&self, Told(told): &Told) {
        let known = &told.table[..told.n_told.get()];
        let own = &self.places.table[..self.places.n_same];
        let n_same = known.iter().zip(own).take_while(|(known, own)| known == own).count();
        self.places.n_told.set(n_same);
        self.places.n_tellings_lost.set(told.n_tellings_lost.get());
    }

    /// As [`Self::tell_pages`], of all tokens, where they were computed and their pages are on the device; else none.
    pub(crate) fn tell_pages_there(&self, pages: &PageTable) -> (&[PageId], usize) {
        let n_blocks = self.n_blocks_to(self.tokens.len());
        let is_computed = self.n_computed >= self.tokens.len();
        match is_computed && self.places.are_there(n_blocks, pages) {
            true => self.tell_pages(n_blocks, pages),
            false => (&[], 0),
        }
    }

    /// Adds a block for the tokens that follow.
    pub(crate) fn push_block(&mut self, block: BlockId) {
        self.own_from = self.own_from.min(self.blocks.len());
        self.blocks.push(block);
    }

    /// Blocks from this one on have no other holder and no key.
    pub(crate) fn own_from(&self) -> usize {
        self.own_from
    }

    /// Notes that the block has no other holder and no key.
    pub(crate) fn note_own(&mut self, block_idx: usize) {
        if self.own_from.min(self.blocks.len()) == block_idx + 1 {
            self.own_from = block_idx;
        }
    }

    /// Puts another block in a block's place; the caller lets go of the one that is returned.
    pub(crate) fn replace_block(&mut self, block_idx: usize, block: BlockId) -> BlockId {
        debug_assert!(block_idx >= self.block_of(self.n_computed), "what is full is not written to");
        self.places.n_same = self.places.n_same.min(block_idx);
        self.note_own(block_idx);
        std::mem::replace(&mut self.blocks.own()[block_idx], block)
    }

    /// Keeps the first `n_tokens` tokens and lets go of the blocks past them.
    pub(crate) fn truncate(&mut self, n_tokens: usize, pages: &mut PageTable) {
        if n_tokens < self.tokens.len() {
            self.tokens.truncate(n_tokens, &mut pages.tokens);
            self.truncate_holed(n_tokens, pages);
        }
        self.note_rewound(n_tokens);
        self.trim(pages);
        self.unbundle_unwritten(pages);
    }

    /// Brings the tokens to these: the first `n_kept` that are there, then `appended`. What lay past the first `n_kept`
    /// stays as far as it is the same.
    pub(crate) fn edit(&mut self, n_kept: usize, appended: &[Token], pages: &mut PageTable) {
        let n_kept = self.n_numbers(n_kept);
        if self.has_holes_from(n_kept) {
            self.truncate(n_kept, pages);
        }
        let behind = self.view(pages).iter_range(n_kept..self.tokens.len()).zip(appended);
        let n_same = behind.take_while(|(held, wanted)| held == *wanted).count();
        self.truncate(n_kept + n_same, pages);
        self.append(&appended[n_same..], pages);
    }

    /// Lets go of the blocks past the last token.
    pub(crate) fn trim(&mut self, pages: &mut PageTable) {
        self.release_after(self.n_blocks_until(self.tokens.len()), pages);
    }

    /// The last blocks first: what the prefix cache gives up first is then the end of a text, and its beginning, which
    /// most will share, stays to be found.
    fn release_after(&mut self, n_blocks: usize, pages: &mut PageTable) {
        let n_blocks = n_blocks.min(self.blocks.len());
        self.places.n_same = self.places.n_same.min(n_blocks);
        self.release_single(n_blocks.max(self.n_bundled(pages)), pages);
        let n_bundle_blocks = pages.n_bundle_blocks();
        while self.n_bundled(pages) >= n_blocks + n_bundle_blocks {
            let start = self.n_bundled(pages) - n_bundle_blocks;
            let bundle = self.bundles.pop().expect("there is one");
            pages.release_bundle(bundle, &self.blocks[start..], &self.account);
            self.blocks.truncate(start);
        }
        if self.n_bundled(pages) > n_blocks {
            self.unbundle_last(pages);
            self.release_single(n_blocks, pages);
        }
    }

    /// Lets go of the blocks past the first `n_blocks`, none of which is in a bundle.
    fn release_single(&mut self, n_blocks: usize, pages: &mut PageTable) {
        for &block in self.blocks[n_blocks..].iter().rev() {
            pages.release(block, &self.account);
        }
        self.blocks.truncate(n_blocks);
    }

    /// Blocks with anything in them.
    fn n_blocks_written(&self) -> usize {
        self.n_blocks_to(self.n_computed)
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
    pub(crate) fn rewind(&mut self, n_tokens: usize, pages: &mut PageTable) {
        self.note_rewound(n_tokens);
        if self.is_holed() {
            // The cells behind a hole follow those before it.
            self.trim(pages);
        }
        self.unbundle_unwritten(pages);
    }

    fn note_rewound(&mut self, n_tokens: usize) {
        self.note_computed(self.n_computed.min(n_tokens));
        self.n_once_computed = self.n_once_computed.min(n_tokens);
        self.n_to_state = self.n_to_state.filter(|&n| n <= n_tokens);
        self.n_keys = self.n_keys.min(self.n_computed / PAGE_LEN);
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
        self.lose_after(self.blocks.len().saturating_sub(1), pages);
    }

    /// Gives up the blocks past the first `n_blocks`, because what is in them is unknown; their KV is computed again when it
    /// is needed. Where it was computed before an eviction, so is all from the first hole on.
    pub(crate) fn lose_after(&mut self, n_blocks: usize, pages: &mut PageTable) {
        let n_blocks = match self.is_holed() {
            true => self.lose_holed(n_blocks, pages),
            false => {
                self.n_computed = self.n_computed.min(n_blocks * PAGE_LEN);
                n_blocks
            }
        };
        self.n_keys = self.n_keys.min(self.n_computed / PAGE_LEN);
        self.release_after(n_blocks, pages);
    }

    /// Lets go of everything.
    pub(crate) fn forget(&mut self, pages: &mut PageTable) {
        self.truncate(0, pages);
    }

    /// Takes full pages from the prefix cache up to position `end`; returns how many tokens that spares.
    pub(crate) fn adopt_prefix(&mut self, end: usize, pages: &mut PageTable) -> usize {
        let start = self.n_computed;
        if self.is_holed() {
            return 0;
        }
        while self.n_computed + PAGE_LEN <= end && self.n_computed.is_multiple_of(PAGE_LEN) {
            let key = self.next_key(pages);
            let Some(block) = pages.adopt(&key, &self.account) else { break };
            // What is found takes the place of a block that nothing is in.
            self.forget_unwritten(pages);
            self.blocks.push(block);
            self.note_key(key, pages);
            self.n_computed += PAGE_LEN;
        }
        self.n_once_computed = self.n_once_computed.max(self.n_computed);
        self.n_computed - start
    }

    /// Holds the full pages of another sequence of the same user too, up to the first `n_blocks` of them: so far the tokens
    /// of both are the same. What it has computed itself ends with a full page.
    pub(crate) fn adopt_from(&mut self, other: &Self, n_blocks: usize, pages: &mut PageTable) {
        assert!(self.n_computed.is_multiple_of(PAGE_LEN), "pages follow a full one");
        let range = self.n_keys..n_blocks.min(other.n_keys);
        if !range.is_empty() {
            self.forget_unwritten(pages);
        }
        for block_idx in range {
            let key = other.tokens.key(block_idx, &pages.tokens);
            debug_assert!(key == self.next_key(pages), "the tokens of both are the same");
            pages.hold(other.blocks[block_idx], &self.account);
            self.blocks.push(other.blocks[block_idx]);
            self.note_key(key, pages);
            self.n_computed += PAGE_LEN;
        }
        self.n_once_computed = self.n_once_computed.max(self.n_computed);
    }

    /// Notes that the KV of all tokens before `end` is computed. Pages that became full are entered in the prefix cache,
    /// or evictions take effect that were made here.
    pub(crate) fn advance(&mut self, end: usize, pages: &mut PageTable) {
        self.note_computed(end);
        self.n_once_computed = self.n_once_computed.max(end);
        match self.is_holed() {
            true => self.apply_due(pages),
            false => self.enter_keys(pages),
        }
    }

    /// Enters full pages in the prefix cache.
    fn enter_keys(&mut self, pages: &mut PageTable) {
        while (self.n_keys + 1) * PAGE_LEN <= self.n_computed {
            let key = self.next_key(pages);
            pages.enter_key(self.blocks[self.n_keys], key);
            self.note_key(key, pages);
        }
    }

    fn next_key(&self, pages: &PageTable) -> PrefixKey {
        let before = self.n_keys.checked_sub(1).map(|idx| self.tokens.key(idx, &pages.tokens));
        let key = before.as_ref().unwrap_or(&self.root).next(self.tokens.page(self.n_keys, &pages.tokens));
        self.key_of_page(self.n_keys, key)
    }

    /// The key of a page, of the one that its tokens have where they are not steered.
    fn key_of_page(&self, page_idx: usize, key: PrefixKey) -> PrefixKey {
        self.steered.as_ref().map_or(key, |steered| steered.of_page(page_idx, key))
    }

    fn note_key(&mut self, key: PrefixKey, pages: &mut PageTable) {
        self.tokens.note_key(self.n_keys, key, &mut pages.tokens);
        self.n_keys += 1;
        self.own_from = self.own_from.max(self.n_keys);
    }

    /// Checks that the keys that it knows are those of its tokens.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn check_keys(&self, pages: &PageTable) {
        assert!(self.n_keys * PAGE_LEN <= self.n_computed, "the keys of full pages");
        let mut key = self.root;
        for (idx, page) in self.view(pages).to_vec().chunks(PAGE_LEN).take(self.n_keys).enumerate() {
            key = self.key_of_page(idx, key.next(page));
            assert_eq!(self.tokens.key(idx, &pages.tokens), key, "the key of page {idx}");
        }
    }

    /// Checks that what it takes for its own is.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn check_own(&self, pages: &PageTable) {
        for (idx, &block) in self.blocks.iter().enumerate().skip(self.own_from) {
            assert!(!pages.is_shared(block) && !pages.has_key(block), "block {idx} of {}", self.blocks.len());
        }
    }

    /// What it holds its blocks through.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn holdings(&self, pages: &PageTable) -> Holdings<'_> {
        assert!(self.n_bundled(pages) <= self.block_of(self.n_computed), "what is in a bundle is full");
        let (bundled, single) = self.blocks.split_at(self.n_bundled(pages));
        let bundled = self.bundles.iter().copied().zip(bundled.chunks(pages.n_bundle_blocks())).collect();
        Holdings { account: &self.account, bundled, single }
    }
}

/// Bundles with their blocks, then blocks by themselves.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) struct Holdings<'a> {
    pub(crate) account: &'a Arc<Account>,
    pub(crate) bundled: Vec<(BundleId, &'a [BlockId])>,
    pub(crate) single: &'a [BlockId],
}
