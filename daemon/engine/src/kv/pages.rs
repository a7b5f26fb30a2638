//! KV pages: which contexts hold which, where they are, and which the prefix cache can give again.
//!
//! Contexts hold *blocks*. A block is sixteen positions of KV with a count of its holders and a place: a page
//! of the device or of host memory. Moving a block moves it for all its holders. A full block can be entered
//! in the prefix cache under its key; when its last holder lets go, it stays until its page is needed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::bundles::Bundles;
use super::free_pages::FreePages;
use super::holders::{Holders, resources};
use super::{PrefixKey, SegmentLengths, TokenStore};
use crate::account::{Account, Resource};
use crate::backend::KvPlace;
use crate::batch::{HostPageId, PageId};

/// A block, while a context holds it or the prefix cache remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    Device(PageId),
    Host(HostPageId),
}

#[derive(Debug)]
struct Block {
    place: Location,
    holders: Holders,
    key: Option<PrefixKey>,
    /// The last marking that reached it.
    marked_in: u64,
    /// The last count of a guest's pages that it was in.
    counted_in: u64,
    /// The last plan in which it has to stay where it is.
    pinned_in: u64,
    /// The plan that copies to it what it begins with; 0 where it begins with what is computed.
    copied_in: u64,
    /// Its place in the order of the cached blocks without a holder.
    idle_since: IdleSince,
}

impl Block {
    fn is_on_host(&self) -> bool {
        matches!(self.place, Location::Host(_))
    }
}

/// When the last holder let go of a cached block: the device's step, and its number among the blocks let go of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct IdleSince {
    step: u64,
    number: u64,
}

/// All blocks of one backend, and the tokens whose KV they hold.
#[derive(Debug)]
pub(crate) struct PageTable {
    pub(crate) tokens: TokenStore,
    pub(super) bundles: Bundles,
    blocks: Vec<Option<Block>>,
    free_blocks: Vec<BlockId>,
    free_pages: FreePages,
    /// Pages of pinned blocks that have lost their last holder: they come free when the plan is done.
    freed_later: Vec<PageId>,
    free_host_pages: FreePages,
    n_pages: usize,
    n_host_pages: usize,
    by_key: HashMap<PrefixKey, BlockId>,
    /// Cached blocks without a holder, all on the device, least recently held first.
    idle: BTreeMap<IdleSince, BlockId>,
    /// When what is let go of now is let go of.
    now: IdleSince,
    /// Blocks that changed place so far.
    n_moves: u64,
    /// How often the backend may not have heard, or may have forgotten, where blocks are.
    n_tellings_lost: u64,
    /// Counts the plans of steps, from 1: what was pinned for an earlier one may move.
    plan: u64,
    /// Numbers the counts of guests' pages.
    counting: u64,
}

impl PageTable {
    pub(crate) fn new(n_pages: usize, n_host_pages: usize, lengths: SegmentLengths) -> Self {
        Self {
            tokens: TokenStore::new(lengths.n_tokens, n_pages),
            bundles: Bundles::new(lengths.n_bundle_blocks),
            // As many as there can be: none of these lists has to grow in the middle of a step.
            blocks: Vec::with_capacity(n_pages + n_host_pages),
            free_blocks: Vec::with_capacity(n_pages + n_host_pages),
            free_pages: FreePages::all(n_pages),
            free_host_pages: FreePages::all(n_host_pages),
            n_pages,
            n_host_pages,
            by_key: HashMap::with_capacity(n_pages + n_host_pages),
            idle: BTreeMap::new(),
            now: IdleSince::default(),
            freed_later: Vec::new(),
            n_moves: 0,
            n_tellings_lost: 0,
            plan: 1,
            counting: 0,
        }
    }

    /// The plan of a step is done: what was pinned for it may move from now on.
    pub(crate) fn unpin_all(&mut self) {
        self.plan += 1;
        while let Some(page) = self.freed_later.pop() {
            self.give_page(page);
        }
    }

    /// Takes back a page, unless it lost its memory meanwhile.
    fn give_page(&mut self, page: PageId) {
        if (page.0 as usize) < self.n_pages {
            self.free_pages.give(page);
        }
    }

    fn take_host_page(&mut self) -> Option<HostPageId> {
        self.free_host_pages.take().map(|page| HostPageId(page.0))
    }

    fn give_host_page(&mut self, page: HostPageId) {
        self.free_host_pages.give(PageId(page.0));
    }

    /// From now on there are so many device pages. Blocks on others, if there are any left, have to go elsewhere.
    pub(crate) fn resize(&mut self, n_pages: usize) {
        self.free_pages.resize(self.n_pages, n_pages);
        // As many as there can be, as at the start.
        let n_blocks = n_pages + self.n_host_pages;
        self.blocks.reserve(n_blocks.saturating_sub(self.blocks.len()));
        self.free_blocks.reserve(n_blocks.saturating_sub(self.free_blocks.len()));
        self.by_key.reserve(n_blocks.saturating_sub(self.by_key.len()));
        self.tokens.lay_out(n_pages);
        self.n_pages = n_pages;
    }

    /// A block at this index or after it that is on a device page which there is no more, and the index after it.
    pub(crate) fn next_stray(&self, mut idx: usize) -> Option<(BlockId, usize)> {
        while idx < self.blocks.len() {
            let id = BlockId(idx as u32);
            idx += 1;
            if self.is_stray(id) {
                return Some((id, idx));
            }
        }
        None
    }

    /// Whether the block is on a device page which there is no more.
    pub(crate) fn is_stray(&self, id: BlockId) -> bool {
        let block = self.blocks[id.0 as usize].as_ref();
        block.is_some_and(
            |block| matches!(block.place, Location::Device(page) if page.0 as usize >= self.n_pages),
        )
    }

    /// Moves a block to a free device page; `None` when none is free.
    pub(crate) fn move_within(&mut self, id: BlockId) -> Option<(PageId, PageId)> {
        let from = self.page(id)?;
        let to = self.free_pages.take()?;
        self.block_mut(id).place = Location::Device(to);
        self.n_moves += 1;
        self.give_page(from);
        Some((from, to))
    }

    fn block(&self, id: BlockId) -> &Block {
        self.blocks[id.0 as usize].as_ref().expect("a held block exists")
    }

    fn block_mut(&mut self, id: BlockId) -> &mut Block {
        self.blocks[id.0 as usize].as_mut().expect("a held block exists")
    }

    /// A new block on a free device page, held once; `None` when no page is free. The account has been charged for it.
    pub(crate) fn allocate(&mut self, account: &Arc<Account>) -> Option<BlockId> {
        let page = self.free_pages.take()?;
        Some(self.insert(Location::Device(page), account))
    }

    fn insert(&mut self, place: Location, account: &Arc<Account>) -> BlockId {
        let block = Block {
            place,
            holders: Holders::one(account),
            key: None,
            marked_in: 0,
            counted_in: 0,
            pinned_in: 0,
            copied_in: 0,
            idle_since: IdleSince::default(),
        };
        let id = self.free_blocks.pop().unwrap_or_else(|| {
            self.blocks.push(None);
            BlockId(u32::try_from(self.blocks.len() - 1).expect("block counts fit 32 bits"))
        });
        self.blocks[id.0 as usize] = Some(block);
        id
    }

    /// A new block on a free page of host memory, held once and paid for; `None` when no page is free, or the account has not so
    /// many left.
    pub(crate) fn allocate_on_host(&mut self, account: &Arc<Account>) -> Option<(BlockId, HostPageId)> {
        let page = self.take_host_page()?;
        if account.charge(Resource::Pages, 1).is_err() {
            self.give_host_page(page);
            return None;
        }
        account.charge_beyond(Resource::HostPages, 1);
        Some((self.insert(Location::Host(page), account), page))
    }

    /// Where the block is.
    pub(crate) fn place(&self, id: BlockId) -> KvPlace {
        match self.block(id).place {
            Location::Device(page) => KvPlace::Device(page),
            Location::Host(page) => KvPlace::Host(page),
        }
    }

    /// One holder more. An account of a user that holds the block already pays nothing; another is charged, also past its
    /// limits, since what it holds is there.
    pub(crate) fn hold(&mut self, id: BlockId, account: &Arc<Account>) {
        let block = self.block_mut(id);
        if !block.holders.has_user_of(account) {
            resources(block.is_on_host()).iter().for_each(|&what| account.charge_beyond(what, 1));
        }
        block.holders.add(account);
    }

    /// One holder less. The last one frees the page, unless the prefix cache remembers the block.
    pub(crate) fn release(&mut self, id: BlockId, account: &Arc<Account>) {
        let now = IdleSince { number: self.now.number + 1, ..self.now };
        let block = self.block_mut(id);
        block.holders.remove_payer(account, block.is_on_host());
        if !block.holders.is_empty() {
            return;
        }
        let is_cached = block.key.is_some() && matches!(block.place, Location::Device(_));
        if is_cached {
            block.idle_since = now;
            self.now = now;
            self.idle.insert(now, id);
        } else {
            self.free(id);
        }
    }

    fn free(&mut self, id: BlockId) {
        self.forget_key(id);
        let block = self.blocks[id.0 as usize].take().expect("a freed block exists");
        match block.place {
            Location::Device(page) if block.pinned_in == self.plan => self.freed_later.push(page),
            Location::Device(page) => self.give_page(page),
            Location::Host(page) => self.give_host_page(page),
        }
        self.free_blocks.push(id);
    }

    /// Holds the block that the prefix cache has under this key; the account is charged unless another of its user pays
    /// for the block already.
    pub(crate) fn adopt(&mut self, key: &PrefixKey, account: &Arc<Account>) -> Option<BlockId> {
        let id = *self.by_key.get(key)?;
        let block = self.blocks[id.0 as usize].as_mut().expect("a cached block exists");
        if !block.holders.has_user_of(account) {
            account.charge(Resource::Pages, 1).ok()?;
            if block.is_on_host() {
                account.charge_beyond(Resource::HostPages, 1);
            }
        }
        if block.holders.is_empty() {
            self.idle.remove(&block.idle_since);
        }
        block.holders.add(account);
        Some(id)
    }

    /// Enters a full block in the prefix cache, unless one of that key is there.
    pub(crate) fn enter_key(&mut self, id: BlockId, key: PrefixKey) {
        if self.block(id).key.is_none() && !self.by_key.contains_key(&key) {
            self.by_key.insert(key, id);
            self.block_mut(id).key = Some(key);
        }
    }

    /// Takes a block out of the prefix cache, because it is about to be overwritten.
    pub(crate) fn forget_key(&mut self, id: BlockId) {
        if let Some(key) = self.block_mut(id).key.take() {
            self.by_key.remove(&key);
        }
    }

    /// Whether another holder would see what is written to the block, which is in no bundle of the writer's.
    pub(crate) fn is_shared(&self, id: BlockId) -> bool {
        self.block(id).holders.n() > 1
    }

    /// Whether the prefix cache may give the block.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn has_key(&self, id: BlockId) -> bool {
        self.block(id).key.is_some()
    }

    /// The block's device page, if it is on the device.
    pub(crate) fn page(&self, id: BlockId) -> Option<PageId> {
        match self.block(id).place {
            Location::Device(page) => Some(page),
            Location::Host(_) => None,
        }
    }

    /// Marks the block; returns whether this marking had not reached it before.
    pub(crate) fn mark(&mut self, id: BlockId, marking: u64) -> bool {
        std::mem::replace(&mut self.block_mut(id).marked_in, marking) != marking
    }

    /// Whether this marking has reached the block.
    pub(crate) fn is_marked(&self, id: BlockId, marking: u64) -> bool {
        self.block(id).marked_in == marking
    }

    /// From now on each block is counted once more.
    pub(crate) fn count_anew(&mut self) {
        self.counting += 1;
    }

    /// Whether the block was not counted since [`Self::count_anew`]; now it is.
    pub(crate) fn count_once(&mut self, id: BlockId) -> bool {
        let counting = self.counting;
        std::mem::replace(&mut self.block_mut(id).counted_in, counting) != counting
    }

    /// Keeps the block where it is, and its page from being used again, until the plan being made is done.
    pub(crate) fn pin(&mut self, id: BlockId) {
        self.block_mut(id).pinned_in = self.plan;
    }

    /// The plan of this number copies to the block what it begins with.
    pub(crate) fn note_copied(&mut self, id: BlockId, plan: u64) {
        self.block_mut(id).copied_in = plan;
    }

    /// The plan that copies to the block what it begins with; 0 where there is none.
    pub(crate) fn copied_in(&self, id: BlockId) -> u64 {
        self.block(id).copied_in
    }

    /// Whether the block has to stay where it is.
    pub(crate) fn is_pinned(&self, id: BlockId) -> bool {
        self.block(id).pinned_in == self.plan
    }

    /// Blocks that changed place so far: as long as this is the same, so are all places.
    pub(crate) fn n_moves(&self) -> u64 {
        self.n_moves
    }

    /// Notes that a step has failed: what the backend was told with it, or before, may be lost.
    pub(crate) fn note_tellings_lost(&mut self) {
        self.n_tellings_lost += 1;
    }

    /// How often that has happened.
    pub(crate) fn n_tellings_lost(&self) -> u64 {
        self.n_tellings_lost
    }

    /// Frees the page of the cached block that was let go longest ago.
    pub(crate) fn reclaim_one(&mut self) -> bool {
        match self.idle.pop_first() {
            Some((_, id)) => {
                self.free(id);
                true
            }
            None => false,
        }
    }

    /// Moves a held block to host memory; `None` when host memory is full or the block is there already.
    pub(crate) fn move_out(&mut self, id: BlockId) -> Option<(PageId, HostPageId)> {
        let page = self.page(id)?;
        let host_page = self.take_host_page()?;
        let block = self.block_mut(id);
        block.place = Location::Host(host_page);
        block.holders.payers().for_each(|account| account.charge_beyond(Resource::HostPages, 1));
        self.n_moves += 1;
        self.give_page(page);
        Some((page, host_page))
    }

    /// Moves a block back to a free device page; `None` when none is free or the block is there already.
    pub(crate) fn move_in(&mut self, id: BlockId) -> Option<(HostPageId, PageId)> {
        let Location::Host(host_page) = self.block(id).place else { return None };
        let page = self.free_pages.take()?;
        let block = self.block_mut(id);
        block.place = Location::Device(page);
        block.holders.payers().for_each(|account| account.release(Resource::HostPages, 1));
        self.n_moves += 1;
        self.give_host_page(host_page);
        Some((host_page, page))
    }

    /// Forgets what these places should have got and never did: the prefix cache no longer gives it, and holders of the
    /// blocks that are returned have to let go of them.
    pub(crate) fn lose(&mut self, pages: &[PageId], host_pages: &[HostPageId]) -> BTreeSet<BlockId> {
        let is_lost = |block: &Block| match block.place {
            Location::Device(page) => pages.contains(&page),
            Location::Host(page) => host_pages.contains(&page),
        };
        let blocks = self.blocks.iter().enumerate();
        let lost = blocks.filter(|(_, block)| block.as_ref().is_some_and(is_lost));
        let mut lost: BTreeSet<BlockId> = lost.map(|(idx, _)| BlockId(idx as u32)).collect();
        for &id in &lost {
            self.forget_key(id);
        }
        let idle: Vec<(IdleSince, BlockId)> =
            self.idle.iter().map(|(&at, &id)| (at, id)).filter(|(_, id)| lost.contains(id)).collect();
        for (at, id) in idle {
            self.idle.remove(&at);
            self.free(id);
            lost.remove(&id);
        }
        lost
    }

    /// Gives all accounts back what they were charged for blocks: the table is about to go.
    pub(crate) fn refund(&mut self) {
        for block in self.blocks.iter_mut().flatten() {
            let holders = std::mem::take(&mut block.holders);
            for account in holders.payers() {
                resources(block.is_on_host()).iter().for_each(|&what| account.release(what, 1));
            }
        }
    }

    pub(crate) fn n_pages(&self) -> usize {
        self.n_pages
    }

    pub(crate) fn n_free(&self) -> usize {
        self.free_pages.len()
    }

    /// Cached blocks without a holder.
    pub(crate) fn n_idle(&self) -> usize {
        self.idle.len()
    }

    /// The device's step in which the last of so many cached blocks was let go of, the one that was let go of longest ago
    /// being the first.
    pub(crate) fn idle_since(&self, n: usize) -> Option<u64> {
        self.idle.keys().nth(n.checked_sub(1)?).map(|since| since.step)
    }

    /// What is let go of from now on is let go of in this step of the device.
    pub(crate) fn note_step(&mut self, step: u64) {
        self.now.step = self.now.step.max(step);
    }

    /// Pages of host memory in which no block is.
    pub(crate) fn free_host_pages(&self) -> Vec<HostPageId> {
        self.free_host_pages.iter().map(|page| HostPageId(page.0)).collect()
    }

    /// What was in the first page of each pair is in the second, which was free.
    pub(crate) fn note_gathered(&mut self, moves: &[(HostPageId, HostPageId)]) {
        let place_of: HashMap<HostPageId, HostPageId> = moves.iter().copied().collect();
        let mut n_left = moves.len();
        for block in self.blocks.iter_mut().flatten() {
            if let Location::Host(page) = &mut block.place
                && let Some(&to) = place_of.get(page)
            {
                *page = to;
                n_left -= 1;
            }
        }
        assert_eq!(n_left, 0, "a block was in each page that moved");
        for &(from, to) in moves {
            self.free_host_pages.take_at(PageId(to.0));
            self.give_host_page(from);
        }
    }

    pub(crate) fn n_on_host(&self) -> usize {
        self.n_host_pages - self.free_host_pages.len()
    }

    /// The accounts that pay for the block.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn n_payers(&self, id: BlockId) -> usize {
        self.block(id).holders.payers().count()
    }

    /// Checks that every page is free once or in one block, and that the counts agree with these holders.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn check(&self, holders: &HashMap<BlockId, u32>) {
        let mut pages: Vec<PageId> = self.free_pages.iter().collect();
        pages.extend(&self.freed_later);
        let mut host_pages = self.free_host_pages();
        for (idx, block) in self.blocks.iter().enumerate() {
            let id = BlockId(idx as u32);
            let Some(block) = block else {
                assert!(self.free_blocks.contains(&id));
                continue;
            };
            let n_holders = block.holders.n();
            assert_eq!(n_holders, holders.get(&id).copied().unwrap_or(0), "holders of {id:?}");
            if n_holders == 0 {
                assert_eq!(self.idle.get(&block.idle_since), Some(&id), "an unheld block is a cached one");
            }
            if let Some(key) = &block.key {
                assert_eq!(self.by_key.get(key), Some(&id));
            }
            match block.place {
                Location::Device(page) => pages.push(page),
                Location::Host(page) => host_pages.push(page),
            }
        }
        pages.sort_unstable();
        host_pages.sort_unstable();
        assert_eq!(pages, (0..self.n_pages as u32).map(PageId).collect::<Vec<_>>());
        assert_eq!(host_pages, (0..self.n_host_pages as u32).map(HostPageId).collect::<Vec<_>>());
        assert_eq!(self.by_key.len(), self.blocks.iter().flatten().filter(|b| b.key.is_some()).count());
    }
}
