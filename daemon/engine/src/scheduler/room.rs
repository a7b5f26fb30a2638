//! Finding device pages when none are free.
//!
//! In this order: cached pages that nobody holds; pages of contexts that wait for nothing, moved to host
//! memory; pages of contexts that could go on but are not part of the step. When host memory is full too, the
//! KV of such a context is forgotten and computed again later.

use super::{Move, Plan, Scheduler};
use crate::account::ActorId;
use crate::command::ContextId;

/// Steps that a context which could go on keeps its pages after they came back from host memory, so that two
/// that do not fit together take turns of some length instead of moving at every step.
const N_STEPS_RESIDENT: u64 = 32;

enum Victim {
    Context(ContextId),
    Saved((ActorId, String)),
}

impl Scheduler {
    /// Sees to it that `n` pages are free, if that is possible without touching the pages of this step.
    pub(super) fn make_room(&mut self, n: usize, plan: &mut Plan) -> bool {
        while self.pages.n_free() < n && self.pages.reclaim_one() {}
        if self.pages.n_free() >= n {
            return true;
        }
        // Only a step that has rows can leave others to the next one.
        if plan.has_rows() && plan.n_pages_out_of_reach.is_some_and(|n_failed| n >= n_failed) {
            return false;
        }
        for victim in self.victims(plan) {
            self.evict(&victim, n, plan);
            while self.pages.n_free() < n && self.pages.reclaim_one() {}
            if self.pages.n_free() >= n {
                return true;
            }
        }
        plan.n_pages_out_of_reach = Some(n);
        false
    }

    /// Whose pages may go, the least deserving first.
    fn victims(&self, plan: &Plan) -> Vec<Victim> {
        let is_last_resort = !plan.has_rows();
        let mut victims: Vec<(bool, u64, Victim)> = Vec::new();
        // What holds nothing has nothing to give; a user may have saved thousands.
        for (key, saved) in self.saved.iter().filter(|(_, saved)| !saved.kv.blocks.is_empty()) {
            victims.push((false, saved.last_step, Victim::Saved(key.clone())));
        }
        for (&id, context) in &self.contexts {
            let is_active = context.work.is_some() && context.is_queued;
            let had_its_turn = self.step - context.resident_since >= N_STEPS_RESIDENT;
            if !is_active || had_its_turn || is_last_resort {
                victims.push((is_active, context.last_step, Victim::Context(id)));
            }
        }
        victims.sort_by_key(|&(is_active, last_step, _)| (is_active, last_step));
        victims.into_iter().map(|(_, _, victim)| victim).collect()
    }

    fn evict(&mut self, victim: &Victim, n: usize, plan: &mut Plan) {
        let kv = match victim {
            Victim::Context(id) => &mut self.contexts.get_mut(id).expect("a victim is in the table").kv,
            Victim::Saved(key) => &mut self.saved.get_mut(key).expect("a victim is in the table").kv,
        };
        // Nothing has to be kept of a page that nothing is in.
        kv.forget_unwritten(self.step, &mut self.pages);
        // Its last pages first: they are the least likely to be shared.
        for &block in kv.blocks.iter().rev() {
            if self.pages.n_free() >= n {
                return;
            }
            if self.pages.is_pinned(block, self.step) || self.pages.page(block).is_none() {
                continue;
            }
            if let Some((from, to)) = self.pages.move_out(block) {
                plan.moves.push(Move::Out(from, to));
                self.stats.n_swaps_out += 1;
            }
        }
        if self.pages.n_free() < n && self.pages.n_host_free() == 0 {
            // What it shares with a context of this step is the beginning of both.
            let is_pinned = |&block| self.pages.is_pinned(block, self.step);
            let n_kept = kv.blocks.iter().rposition(is_pinned).map_or(0, |idx| idx + 1);
            if n_kept < kv.blocks.len() {
                kv.forget_after(n_kept, &mut self.pages);
                self.stats.n_recomputed += 1;
            }
        }
    }
}
