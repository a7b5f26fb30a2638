//! What a context finds in the prefix cache.

use super::Plan;
use crate::backend::PAGE_LEN;
use crate::fair::Class;
use crate::scheduler::cost::Costs;
use crate::scheduler::{ContextState, Scheduler};

/// Pages that one plan looks up in the prefix cache, or as many as one context finds: decoding does not wait for the
/// hashing of many prompts.
pub(in crate::scheduler) const N_BLOCKS_FOUND_MAX: usize = 1024;

impl Scheduler {
    /// Takes over the pages in front of its first output that are in the prefix cache. Whether it can have a row of this class
    /// then.
    pub(super) fn adopt_cached(
        &mut self,
        context: &mut ContextState,
        first_output: usize,
        plan: &mut Plan,
    ) -> bool {
        if plan.n_blocks_found >= N_BLOCKS_FOUND_MAX {
            return false;
        }
        let (class, n_held) = (context.class(), context.kv.blocks().len());
        let n_lost = context.kv.n_lost();
        let n_cached = context.kv.adopt_prefix(first_output, &mut self.pages);
        if n_cached > 0 {
            let n_blocks = n_cached / PAGE_LEN;
            plan.n_blocks_found += n_blocks;
            // Fewer pages may have been found than it held with nothing in them, or they are in host memory.
            let blocks = context.kv.blocks();
            let found = &blocks[blocks.len() - n_blocks..];
            let n_away = found.iter().filter(|&&block| self.pages.page(block).is_none()).count();
            self.note_let_go_by(context, (n_held + n_away).saturating_sub(blocks.len()));
            self.mark_found(context);
            self.commons.queue.charge(&context.seat, Costs::found_ns(n_blocks));
            context.owner.account.note_cached(n_cached as u64);
            self.stats.n_tokens_cached += n_cached as u64;
            // What it had before it lost its pages is no more of a prompt than it was.
            self.stats.n_tokens_found += n_cached.saturating_sub(n_lost) as u64;
        }
        // A tree whose context is there now is as many rows as it has places, and decodes.
        class == Class::Decode || context.n_tree_rows().is_none()
    }
}
