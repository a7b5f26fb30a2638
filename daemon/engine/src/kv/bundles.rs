//! Runs of blocks that contexts with a common beginning hold together.
//!
//! An account holds each block of a bundle once, however many of its contexts share the bundle: one more or one less of
//! them is one count, and no block is touched. So bundles change neither which account pays for a block nor since when. Which
//! blocks are in a bundle its holders know, all of them the same. Nothing is written to them: a context that is about to
//! write to one, or to let go of a part of them, holds each by itself first.

use std::sync::Arc;

use super::holders::Holders;
use super::{BlockId, PageTable};
use crate::account::Account;

/// A bundle, while any context shares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BundleId(u32);

/// All bundles of one page table.
#[derive(Debug)]
pub(super) struct Bundles {
    n_blocks: usize,
    holders: Vec<Holders>,
    free: Vec<BundleId>,
    /// Bundles that a context took apart while others shared them.
    #[cfg(test)]
    n_taken_apart: usize,
}

impl Bundles {
    pub(super) fn new(n_blocks: usize) -> Self {
        assert!(n_blocks > 0, "a bundle has blocks");
        Self {
            n_blocks,
            holders: Vec::new(),
            free: Vec::new(),
            #[cfg(test)]
            n_taken_apart: 0,
        }
    }

    fn get_mut(&mut self, id: BundleId) -> &mut Holders {
        &mut self.holders[id.0 as usize]
    }

    /// Takes one hold of an account away; returns whether that was its last.
    fn remove(&mut self, id: BundleId, account: &Arc<Account>) -> bool {
        let holders = self.get_mut(id);
        holders.remove(account);
        let is_last = holders.n_of(account) == 0;
        if holders.is_empty() {
            self.free.push(id);
        }
        is_last
    }
}

impl PageTable {
    /// Blocks in one bundle.
    pub(crate) fn n_bundle_blocks(&self) -> usize {
        self.bundles.n_blocks
    }

    /// A bundle of blocks each of which the account held once by itself, and holds through the bundle from now on.
    pub(crate) fn bundle(&mut self, account: &Arc<Account>) -> BundleId {
        let holders = Holders::one(account);
        match self.bundles.free.pop() {
            Some(id) => {
                *self.bundles.get_mut(id) = holders;
                id
            }
            None => {
                self.bundles.holders.push(holders);
                BundleId(u32::try_from(self.bundles.holders.len() - 1).expect("bundle counts fit 32 bits"))
            }
        }
    }

    /// One more context of an account shares a bundle of these blocks.
    pub(crate) fn hold_bundle(&mut self, id: BundleId, blocks: &[BlockId], account: &Arc<Account>) {
        let holders = self.bundles.get_mut(id);
        let is_first = holders.n_of(account) == 0;
        holders.add(account);
        if is_first {
            blocks.iter().for_each(|&block| self.hold(block, account));
        }
    }

    /// One context of an account shares a bundle of these blocks no more. The last ones go first, as
    /// [`PageTable::release`] wants it.
    pub(crate) fn release_bundle(&mut self, id: BundleId, blocks: &[BlockId], account: &Arc<Account>) {
        if self.bundles.remove(id, account) {
            blocks.iter().rev().for_each(|&block| self.release(block, account));
        }
    }

    /// One context of an account holds each of these blocks by itself from now on, and not through their bundle.
    pub(crate) fn unbundle(&mut self, id: BundleId, blocks: &[BlockId], account: &Arc<Account>) {
        // What the account held through the bundle alone, the context holds now.
        if !self.bundles.remove(id, account) {
            blocks.iter().for_each(|&block| self.hold(block, account));
        }
        #[cfg(test)]
        {
            self.bundles.n_taken_apart += usize::from(!self.bundles.get_mut(id).is_empty());
        }
    }

    /// Whether more than one context shares the bundle.
    pub(crate) fn is_bundle_shared(&self, id: BundleId) -> bool {
        self.bundles.holders[id.0 as usize].n() > 1
    }

    /// Bundles that a context took apart while others shared them.
    #[cfg(test)]
    pub(crate) fn n_bundles_taken_apart(&self) -> usize {
        self.bundles.n_taken_apart
    }

    /// Checks that the bundles are shared by so many contexts, for each account.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn check_bundles(&self, holders: &std::collections::HashMap<BundleId, Vec<Arc<Account>>>) {
        for (idx, bundle) in self.bundles.holders.iter().enumerate() {
            let id = BundleId(idx as u32);
            let accounts = holders.get(&id).map_or(&[][..], Vec::as_slice);
            assert_eq!(bundle.n() as usize, accounts.len(), "contexts that share {id:?}");
            for account in accounts {
                let n = accounts.iter().filter(|other| Arc::ptr_eq(other, account)).count();
                assert_eq!(bundle.n_of(account) as usize, n, "contexts of one account that share {id:?}");
            }
            assert_eq!(self.bundles.free.contains(&id), accounts.is_empty());
        }
    }
}
