//! What is left of a step that failed, and of a scheduler whose engine has ended.

use std::sync::Arc;

use super::{Commons, ContextState, Move, Plan, Scheduler};
use crate::account::{Account, Resource};
use crate::backend::PAGE_LEN;
use crate::batch::{HostPageId, PageId};
use crate::command::ContextId;
use crate::completion::CallerId;
use crate::error::EngineError;
use crate::kv::Sequence;

impl Plan {
    /// Whether there is nothing to do for it.
    pub(crate) fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.rows.is_empty()
    }

    /// Contexts that it computes something for.
    pub(crate) fn n_rows(&self) -> usize {
        self.rows.len()
    }
}

impl Scheduler {
    /// Takes back a step that failed after its first `n_moved` moves: the work of its rows ends with the error, and
    /// what it would have written is computed again when it is asked for.
    pub(crate) fn fail_step(&mut self, plan: &Plan, n_moved: usize, error: &EngineError) {
        self.steps_under_way.retain(|under_way| under_way.step != plan.step);
        self.commons.n_under_way -= usize::from(plan.has_rows());
        self.pages.note_tellings_lost();
        let mut jobs = Vec::new();
        for row in &plan.rows {
            row.account.release(Resource::Tokens, row.n_charged);
            let Some(context) = self.contexts.get_mut(&row.id) else { continue };
            let n_kept = context.kv.n_blocks_untouched(row.start);
            if context.epoch != row.epoch {
                // Work that has ended since knows nothing of the step. What came after it may build on a page that was to
                // be copied.
                if row.is_of_head() || context.kv.n_computed <= n_kept * PAGE_LEN {
                    continue;
                }
                context.kv.set_state(None);
                context.kv.lose_after(n_kept, &mut self.pages);
                match (context.under_way, context.job()) {
                    // What it was promised is less than it needs now.
                    (None, _) => {
                        self.leave_by_id(row.id);
                        self.enqueue(row.id);
                    }
                    (Some(_), Some(job)) => jobs.push(job),
                    (Some(_), None) => {
                        context.fail(error.clone(), &mut self.pages, &mut self.stats.causes);
                        self.leave_by_id(row.id);
                    }
                }
                continue;
            }
            self.stats.n_tokens -= (row.end - row.start) as u64;
            self.stats.n_tokens_again -= row.n_again() as u64;
            context.kv.set_state(None);
            if !row.is_of_head() {
                // Of the first page that it wrote, the beginning may be a copy that was never made.
                context.kv.lose_after(n_kept, &mut self.pages);
            }
            match context.job() {
                Some(job) => jobs.push(job),
                None => context.fail(error.clone(), &mut self.pages, &mut self.stats.causes),
            }
            self.leave_by_id(row.id);
        }
        for job in jobs {
            self.end_job(job, error);
        }
        self.end_failed_jobs(None);
        self.lose_moves(&plan.moves[n_moved..]);
    }

    /// The KV of a context for another holder, whose account this is. A step under way that is to copy the beginning of a page
    /// may fail, and takes nothing back but from the contexts of its rows: that page is not shared, and what is in it is
    /// computed again.
    pub(super) fn fork_kv(&mut self, id: ContextId, account: Arc<Account>) -> Option<Sequence> {
        let oldest = self.steps_under_way.front().map(|under_way| under_way.step);
        let kv = &mut self.contexts.get_mut(&id)?.kv;
        let mut fork = kv.fork(account, &mut self.pages);
        if let Some(oldest) = oldest {
            // Rows write to no page before the first that is not full, but for those that evictions left.
            let from = if fork.is_holed() { 0 } else { fork.n_computed / PAGE_LEN };
            let blocks = fork.blocks().iter().enumerate().skip(from);
            let is_copied = |block| self.pages.copied_in(block) >= oldest;
            if let Some((n_kept, _)) = blocks.into_iter().find(|&(_, &block)| is_copied(block)) {
                fork.lose_after(n_kept, &mut self.pages);
            }
        }
        Some(fork)
    }

    /// Gives up what pages would have held that never came where the plan had them.
    pub(super) fn lose_moves(&mut self, moves: &[Move]) {
        if moves.is_empty() {
            return;
        }
        let (mut pages, mut host_pages): (Vec<PageId>, Vec<HostPageId>) = (Vec::new(), Vec::new());
        for planned in moves {
            match *planned {
                Move::Out(_, to) => host_pages.push(to),
                Move::In(_, to) | Move::Within(_, to) => pages.push(to),
            }
        }
        let lost = self.pages.lose(&pages, &host_pages);
        let mut losers: Vec<ContextId> = Vec::new();
        for (&id, context) in &mut self.contexts {
            if let Some(n_kept) = context.kv.blocks().iter().position(|block| lost.contains(block)) {
                context.kv.lose_after(n_kept, &mut self.pages);
                losers.push(id);
            }
        }
        for saved in self.saved.values_mut() {
            if let Some(n_kept) = saved.kv.blocks().iter().position(|block| lost.contains(block)) {
                saved.kv.lose_after(n_kept, &mut self.pages);
            }
        }
        for id in losers {
            // It was admitted for less than it needs now. Contexts in line are asked for their needs once they come first.
            if self.contexts[&id].is_admitted() {
                self.leave_by_id(id);
                self.enqueue(id);
            }
        }
    }

    /// Ends the work of all contexts with an error.
    pub(crate) fn fail_all(&mut self, error: &EngineError) {
        self.end_all_jobs(error);
        for context in self.contexts.values_mut() {
            context.fail(error.clone(), &mut self.pages, &mut self.stats.causes);
        }
    }

    /// Gives up all contexts, saved ones too: their guests stay, and their seats are free for others. Returns which
    /// contexts there were, and whose; and what it was lent.
    pub(crate) fn disband(mut self) -> (Vec<(ContextId, CallerId)>, Commons) {
        let mut gone = Vec::with_capacity(self.contexts.len());
        for (id, context) in self.contexts.drain() {
            let ContextState { caller, seat, .. } = *context;
            self.commons.queue.vacate(seat);
            gone.push((id, caller));
        }
        let mut commons = std::mem::take(&mut self.commons);
        commons.clear(self.settings.place);
        self.dissolve();
        (gone, commons)
    }

    /// Ends everything: callers that wait for something find the engine gone, and the accounts, which live on, get back
    /// what they were charged for. Relies on nothing that a panic may have left half done.
    pub(crate) fn dissolve(mut self) {
        self.pages.refund();
        for saved in self.saved.values() {
            saved.owner.account.release(Resource::Contexts, 1);
        }
    }
}
