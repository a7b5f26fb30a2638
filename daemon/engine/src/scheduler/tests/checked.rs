//! Invariants of the page table, held against all that contexts hold.

use std::collections::HashMap;
use std::sync::Arc;

use super::World;
use crate::account::{Account, Resource};
use crate::kv::{Holdings, Sequence};
use crate::scheduler::Scheduler;

impl World {
    pub(super) fn kvs(&self) -> impl Iterator<Item = &Sequence> {
        self.scheduler.kvs()
    }

    pub(super) fn check_sequences(&self) {
        self.kvs().for_each(|kv| {
            kv.check_keys(&self.scheduler.pages);
            kv.check_own(&self.scheduler.pages);
        });
    }

    pub(super) fn check(&self) {
        let n_held = self.scheduler.check();
        let n_charged: u64 = self.users.iter().map(|user| user.used(Resource::Pages)).sum();
        assert_eq!(n_charged, n_held as u64, "every held page is charged once to each user who holds it");
    }
}

impl Scheduler {
    fn kvs(&self) -> impl Iterator<Item = &Sequence> {
        let contexts = self.contexts.values().map(|context| &context.kv);
        contexts.chain(self.saved.values().map(|saved| &saved.kv))
    }

    /// Checks what is between two turns; returns the pages that are held, each counted for each user who holds it.
    pub(crate) fn check(&self) -> usize {
        self.check_holders();
        self.check_admitted();
        let mut holders = HashMap::new();
        let mut bundles: HashMap<_, Vec<Arc<Account>>> = HashMap::new();
        for context in self.contexts.values() {
            let n_blocks_max = context.kv.n_blocks_until(context.n_tokens_expected());
            let (n_blocks, n_tokens) = (context.kv.blocks().len(), context.n_tokens_expected());
            assert!(
                n_blocks <= n_blocks_max,
                "a page that no token needs: {n_blocks} of {n_blocks_max} for {n_tokens} tokens, {:?}",
                context.kv
            );
        }
        for kv in self.kvs() {
            assert!(kv.n_computed <= kv.tokens.len());
            assert!(kv.blocks().len() >= kv.n_blocks_to(kv.n_computed));
            let Holdings { account, bundled, single } = kv.holdings(&self.pages);
            for &block in single {
                *holders.entry(block).or_insert(0) += 1;
            }
            for (bundle, blocks) in bundled {
                let sharers = bundles.entry(bundle).or_default();
                if !sharers.iter().any(|sharer| Arc::ptr_eq(sharer, account)) {
                    blocks.iter().for_each(|&block| *holders.entry(block).or_insert(0) += 1);
                }
                sharers.push(account.clone());
            }
        }
        self.pages.check(&holders);
        self.pages.check_bundles(&bundles);
        self.pages.tokens.check(self.kvs().flat_map(Sequence::lists));
        holders.keys().map(|&block| self.pages.n_payers(block)).sum()
    }
}
