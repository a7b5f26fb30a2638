//! The next step: decode rows first, then chunks of prompts, within the step's tokens.

use super::kv::Kv;
use super::work::Work;
use super::{ContextState, Scheduler};
use crate::account::Resource;
use crate::backend::PAGE_LEN;
use crate::batch::{Batch, FollowUp, HostPageId, PageCopy, PageId, Row};
use crate::command::{Answer, ContextId};
use crate::error::EngineError;
use crate::pages::{BlockId, PageTable};

/// Rows of which one is kept for prompts that wait.
const N_ROWS_PER_PREFILL: usize = 16;

/// What one step does, in this order: the moves, the copies, the rows.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) moves: Vec<Move>,
    pub(crate) copies: Vec<PageCopy>,
    pub(super) rows: Vec<PlannedRow>,
    /// So many pages could not be freed for this step, whoever made room: it is not tried again for as many.
    pub(super) n_pages_out_of_reach: Option<usize>,
}

/// A page that changes place. The order of moves matters: a page freed by one is filled by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    Out(PageId, HostPageId),
    In(HostPageId, PageId),
}

/// The tokens `start..end` of a context, over its first `n_pages` pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedRow {
    pub(super) id: ContextId,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) n_pages: usize,
    pub(super) follow_up: FollowUp,
}

impl Plan {
    /// Whether there is nothing to compute. Moves may have been planned all the same.
    pub(crate) fn has_rows(&self) -> bool {
        !self.rows.is_empty()
    }
}

/// What became of a context that was looked at for a step.
enum Placed {
    /// It has a row of so many tokens.
    Row { n_tokens: usize },
    /// It has to wait for pages.
    Waits,
    /// It has nothing to do, or its work has failed.
    Nothing,
}

impl Scheduler {
    /// Plans the next step.
    pub(crate) fn plan(&mut self) -> Plan {
        self.step += 1;
        let mut plan = Plan::default();
        let mut waiting = Vec::new();
        let mut n_tokens_left = self.settings.n_step_tokens;
        for is_decode in [true, false] {
            // Each context is looked at once, also when it comes back into the queue.
            let queue = if is_decode { &self.decodes } else { &self.prefills };
            let n_rows_max = self.limits.n_rows_max - if is_decode { self.n_rows_for_prefills() } else { 0 };
            for _ in 0..queue.len() {
                if plan.rows.len() == n_rows_max || n_tokens_left == 0 {
                    break;
                }
                let queue = if is_decode { &mut self.decodes } else { &mut self.prefills };
                let Some(id) = queue.pop() else { break };
                let Some(context) = self.contexts.get_mut(&id) else { continue };
                context.is_queued = false;
                if is_decode && context.n_pending() > 1 {
                    // Its KV was forgotten while it stood in the queue.
                    self.enqueue(id);
                    continue;
                }
                match self.place(id, n_tokens_left, &mut plan) {
                    Placed::Row { n_tokens } => {
                        n_tokens_left -= n_tokens;
                        let owner = &self.contexts[&id].owner;
                        let queue = if is_decode { &mut self.decodes } else { &mut self.prefills };
                        queue.charge(owner, n_tokens);
                    }
                    Placed::Waits => {
                        // It counts as active until the step is planned, so that its pages are not the first to go.
                        self.contexts.entry(id).and_modify(|context| context.is_queued = true);
                        waiting.push(id);
                    }
                    Placed::Nothing => {}
                }
            }
        }
        if waiting.is_empty() {
            self.take_pages_ahead(&mut plan);
        }
        for id in waiting {
            self.contexts.entry(id).and_modify(|context| context.is_queued = false);
            self.enqueue(id);
        }
        plan
    }

    /// Rows that decoding leaves to the prompts that wait: a user with as many streams as there are rows would
    /// otherwise keep everybody else's prompts from ever being computed. Where rows are few, every second step.
    fn n_rows_for_prefills(&self) -> usize {
        (self.limits.n_rows_max / N_ROWS_PER_PREFILL).max((self.step % 2) as usize).min(self.prefills.len())
    }

    fn place(&mut self, id: ContextId, n_tokens_max: usize, plan: &mut Plan) -> Placed {
        let Some(mut context) = self.contexts.remove(&id) else { return Placed::Nothing };
        let placed = self.place_context(&mut context, id, n_tokens_max, plan);
        let placed = placed.unwrap_or_else(|error| {
            context.fail(error, &mut self.pages);
            Placed::Nothing
        });
        self.contexts.insert(id, context);
        placed
    }

    /// Gives the context a row and everything that the row needs. The context is out of the table meanwhile,
    /// so that making room cannot take its own pages.
    fn place_context(
        &mut self,
        context: &mut ContextState,
        id: ContextId,
        n_tokens_max: usize,
        plan: &mut Plan,
    ) -> Result<Placed, EngineError> {
        let Some(work) = &context.work else { return Ok(Placed::Nothing) };
        if work.is_cancelled() {
            let Some(Work::Ask(work)) = context.work.take() else { return Ok(Placed::Nothing) };
            context.kv.truncate(work.n_base, &mut self.pages);
            return Ok(Placed::Nothing);
        }
        let n_tokens = context.kv.tokens.len();
        let (target, first_output) = (work.target(n_tokens), work.first_output(n_tokens));
        if target - context.kv.n_computed <= 1 && !work.wants_more(context.window) {
            return Ok(Placed::Nothing);
        }
        let account = context.owner.account.clone();
        let n_cached = context.kv.adopt_prefix(first_output, self.step, &mut self.pages, &account);
        account.note_cached(n_cached as u64);
        self.stats.n_tokens_cached += n_cached as u64;

        let start = context.kv.n_computed;
        if start == target {
            // A prefill that others have done before.
            if let Some(Work::Ask(work)) = context.work.take() {
                work.answer(Ok(Answer::Prefilled));
            }
            return Ok(Placed::Nothing);
        }
        let end = target.min(start + n_tokens_max);
        // Charged before anything is planned: a copy without its row would never be made.
        let n_charged = (end - start) as u64;
        account.charge(Resource::Tokens, n_charged)?;
        let unpinned =
            context.kv.blocks.iter().copied().filter(|&block| !self.pages.is_pinned(block, self.step));
        let pinned_here: Vec<BlockId> = unpinned.collect();
        for &block in &pinned_here {
            self.pages.pin(block, self.step);
        }
        let brought = self.bring_pages(context, start, end, plan);
        if !matches!(brought, Ok(true)) {
            account.release(Resource::Tokens, n_charged);
            // Not kept in place while it waits, or two that wait could hold each other up for ever.
            for &block in &pinned_here {
                self.pages.unpin(block);
            }
        }
        if !brought? {
            return Ok(Placed::Waits);
        }
        context.last_step = self.step;
        self.stats.n_tokens += (end - start) as u64;
        let follow_up = context.follow_up(end, self.limits.n_positions_max);
        plan.rows.push(PlannedRow { id, start, end, n_pages: end.div_ceil(PAGE_LEN), follow_up });
        Ok(Placed::Row { n_tokens: end - start })
    }

    /// Sees to it that all pages up to `end` are on the device and that those from `start` on are the context's
    /// own. Returns whether there was room.
    fn bring_pages(
        &mut self,
        context: &mut ContextState,
        start: usize,
        end: usize,
        plan: &mut Plan,
    ) -> Result<bool, EngineError> {
        let n_blocks = end.div_ceil(PAGE_LEN);
        let n_held = context.kv.blocks.len();
        let first_written = start / PAGE_LEN;
        let written = first_written.min(n_held)..n_blocks.min(n_held);
        let n_shared = |pages: &PageTable, kv: &Kv| {
            kv.blocks[written.clone()].iter().filter(|&&block| pages.is_shared(block)).count()
        };
        let n_new = n_blocks.saturating_sub(n_held);
        let n_away = context.kv.blocks.iter().filter(|&&b| self.pages.page(b).is_none()).count();
        let n_needed = n_new + n_shared(&self.pages, &context.kv) + n_away;
        if !self.make_room(n_needed, plan) {
            if plan.has_rows() {
                return Ok(false);
            }
            let n_needed = n_held + n_needed - n_away;
            return Err(EngineError::NoPages { n_needed, n_pages: self.limits.n_pages });
        }
        // Making room may have ended the sharing of a page. The whole is charged before any part of it is planned.
        let account = context.owner.account.clone();
        let n_charged = (n_new + n_shared(&self.pages, &context.kv)) as u64;
        if account.charge(Resource::Pages, n_charged).is_err() {
            self.forget_pages_ahead(&account);
            account.charge(Resource::Pages, n_charged)?;
        }
        for &block in &context.kv.blocks {
            if let Some((from, to)) = self.pages.move_in(block) {
                plan.moves.push(Move::In(from, to));
                context.resident_since = self.step;
            }
        }
        for block_idx in written {
            let block = context.kv.blocks[block_idx];
            if !self.pages.is_shared(block) {
                self.pages.forget_key(block);
                continue;
            }
            let own = self.pages.allocate(&account).expect("room was made");
            self.pages.pin(own, self.step);
            // Positions before `start` are kept; a page that is written from its beginning needs no copy.
            if start > block_idx * PAGE_LEN {
                let page = |id| self.pages.page(id).expect("brought to the device above");
                plan.copies.push(PageCopy { src: page(block), dst: page(own) });
            }
            context.kv.blocks[block_idx] = own;
            self.pages.release(block);
        }
        for _ in n_held..n_blocks {
            let own = self.pages.allocate(&account).expect("room was made");
            self.pages.pin(own, self.step);
            context.kv.blocks.push(own);
        }
        Ok(true)
    }

    /// The plan as the backend sees it.
    pub(crate) fn batch(&self, plan: &Plan) -> Batch<'_> {
        let rows = plan.rows.iter().map(|row| {
            let context = &self.contexts[&row.id];
            let kv = &context.kv;
            let work = context.work.as_ref().expect("a planned context has work");
            let page = |&block| self.pages.page(block).expect("planned pages are on the device");
            Row {
                slot: context.slot,
                tokens: &kv.tokens[..row.end],
                start: row.start,
                pages: kv.blocks[..row.n_pages].iter().map(page).collect(),
                outputs: work.outputs(row.start, row.end, kv.tokens.len()),
                follow_up: row.follow_up,
            }
        });
        Batch { copies: plan.copies.clone(), rows: rows.collect() }
    }
}
