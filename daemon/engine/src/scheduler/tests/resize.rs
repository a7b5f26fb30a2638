//! Pages that come and go, among random operations.

use std::collections::BTreeSet;

use super::World;
use crate::kv::BlockId;
use crate::scheduler::{Move, Scheduler, Taking};

impl Scheduler {
    /// The blocks on the device of contexts that are within their terms.
    fn kept(&self) -> BTreeSet<BlockId> {
        let over = self.over();
        let within = self.contexts.iter().filter(|(id, context)| context.is_admitted() && !over.contains(id));
        let blocks = within.flat_map(|(_, context)| context.kv.blocks());
        blocks.copied().filter(|&block| self.pages.page(block).is_some()).collect()
    }
}

impl World {
    /// Another number of pages, as when models come and go. Whatever was there goes on.
    pub(super) fn resize(&mut self) {
        if !self.under_way.is_empty() {
            return;
        }
        let n_pages = self.n_pages_min + self.random.below(self.backend.n_pages() - self.n_pages_min + 1);
        if n_pages >= self.scheduler.limits.n_pages {
            return self.scheduler.grow(n_pages);
        }
        let n_given = self.scheduler.limits.n_pages - n_pages;
        let plan = match self.scheduler.sacrifice(n_given, None) {
            Some(sacrifice) => {
                let kept = self.scheduler.kept();
                let plan = self.scheduler.part_with(n_pages, None).expect("it was said to be there");
                assert!(kept.is_subset(&self.scheduler.kept()), "who is within its term keeps what it has");
                self.n_parted[sacrifice.kind() as usize] += 1;
                plan
            }
            None => self.scheduler.vacate(n_pages, Taking::Any),
        };
        self.n_moved_within += plan.moves.iter().filter(|m| matches!(m, Move::Within(..))).count();
        self.backend.make(&plan.moves);
        self.backend.forget_from(n_pages);
        self.check();
    }
}
