//! Invariants of the page table, held against all that contexts hold.

use std::collections::HashMap;
use std::sync::Arc;

use super::World;
use crate::account::{Account, Resource};
use crate::kv::{Holdings, Sequence};

impl World {
    pub(super) fn kvs(&self) -> impl Iterator<Item = &Sequence> {
        let contexts = self.scheduler.contexts.values().map(|context| &context.kv);
        contexts.chain(self.scheduler.saved.values().map(|saved| &saved.kv))
    }

    pub(super) fn check_sequences(&self) {
        self.kvs().for_each(|kv| {
            kv.check_keys(&self.scheduler.pages);
            kv.check_own(&self.scheduler.pages);
        });
    }

    pub(super) fn check(&self) {
        self.scheduler.check_holders();
        self.scheduler.check_admitted();
        let mut holders = HashMap::new();
        let mut bundles: HashMap<_, Vec<Arc<Account>>> = HashMap::new();
        for context in self.scheduler.contexts.values() {
            let n_blocks_max = context.kv.n_blocks_until(context.n_tokens_expected());
            assert!(context.kv.blocks().len() <= n_blocks_max, "a page that no token needs");
        }
        for kv in self.kvs() {
            assert!(kv.n_computed <= kv.tokens.len());
            assert!(kv.blocks().len() >= kv.n_blocks_to(kv.n_computed));
            let Holdings { account, bundled, single } = kv.holdings(&self.scheduler.pages);
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
        self.scheduler.pages.check(&holders);
        self.scheduler.pages.check_bundles(&bundles);
        self.scheduler.pages.tokens.check(self.kvs().flat_map(Sequence::lists));
        let n_charged: u64 = self.users.iter().map(|user| user.used(Resource::Pages)).sum();
        let n_held: usize = holders.keys().map(|&block| self.scheduler.pages.n_payers(block)).sum();
        assert_eq!(n_charged, n_held as u64, "every held page is charged once to each user who holds it");
    }
}
