//! Pages of contexts from which tokens were evicted, as far as so little is left in them that it fits into fewer.
//!
//! The row that is placed copies it first. That is done where a page is at hand; otherwise the context holds what it held.

use super::admission::Standing;
use super::{ContextState, Scheduler};
use crate::account::Resource;

impl Scheduler {
    /// Packs the pages of a context whose row is being planned; all of them are on the device.
    pub(super) fn pack(&mut self, context: &mut ContextState) {
        if !context.kv.is_holed() {
            return;
        }
        let blocks = context.kv.begin_packing(&self.pages);
        // Rows under way find their pages where they were, and those of a job may be planned anew.
        if context.under_way.is_some() || context.job().is_some() {
            return;
        }
        for blocks in blocks {
            let is_at_hand = self.pages.n_free() + self.pages.n_idle() > self.line.n_promised;
            if !is_at_hand {
                return;
            }
            // The page of a cached block that a row of this plan still finds comes free after the plan.
            while self.pages.n_free() == 0 && self.pages.reclaim_one() {}
            if self.pages.n_free() == 0 {
                return;
            }
            let account = &context.owner.account;
            if account.charge(Resource::Pages, 1).is_err() {
                return;
            }
            let own = self.pages.allocate(account).expect("one is free");
            self.pages.note_copied(own, self.step);
            let n_let_go = blocks.len() - 1;
            context.kv.pack(blocks, own, &mut self.pages);
            if let Standing::Admitted(term) = &mut context.standing {
                term.note_let_go(n_let_go);
                self.line.n_promised += n_let_go;
                self.line.forget_count();
            }
        }
    }
}
