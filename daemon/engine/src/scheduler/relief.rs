//! Host memory under pressure: KV that was moved there is given up, and computed again when it is asked about.
//!
//! Contexts that are admitted or stand in line keep theirs: who was promised pages comes to its end by what it has.

use super::Scheduler;
use super::room::Victim;
use crate::batch::HostPageId;

impl Scheduler {
    /// Gives up the KV in so many pages of host memory at most, from the tails of contexts, those first that make room first. Returns
    /// how many pages came free.
    pub(crate) fn give_up_host_pages(&mut self, n_max: usize) -> usize {
        self.put_holders_in_order();
        let mut n_freed = 0;
        for victim in self.holders.in_order() {
            if n_freed >= n_max {
                break;
            }
            let Self { contexts, saved, pages, .. } = self;
            let kv = match &victim {
                // What a step reads and writes stays where it is.
                Victim::Context(id) => contexts
                    .get_mut(id)
                    .filter(|context| context.under_way.is_none())
                    .map(|context| &mut context.kv),
                Victim::Saved(key) => saved.get_mut(key).map(|saved| &mut saved.kv),
            };
            let Some(kv) = kv else { continue };
            let blocks = kv.blocks();
            let n_before_tail =
                blocks.iter().rposition(|&block| pages.page(block).is_some()).map_or(0, |idx| idx + 1);
            let n_kept = n_before_tail.max(blocks.len().saturating_sub(n_max - n_freed));
            if n_kept < blocks.len() {
                let n_before = pages.n_on_host();
                kv.lose_after(n_kept, pages);
                n_freed += n_before - pages.n_on_host();
            }
        }
        if n_freed > 0 {
            self.stats.n_pages_given_up += n_freed as u64;
            self.line.forget_count();
        }
        n_freed
    }

    /// Pages of host memory in which nothing is.
    pub(crate) fn free_host_pages(&self) -> Vec<HostPageId> {
        self.pages.free_host_pages()
    }

    /// The backend has moved pages of host memory to others, which were free.
    pub(crate) fn note_gathered(&mut self, moves: &[(HostPageId, HostPageId)]) {
        self.pages.note_gathered(moves);
    }
}
