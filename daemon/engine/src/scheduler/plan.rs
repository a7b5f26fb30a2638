//! The next step: decode rows first, then chunks of prompts, within the step's tokens and, while contexts decode, its length.

mod cached;
mod decode;
mod head;
mod prompts;
mod row;
mod tree;

use smallvec::SmallVec;

pub(super) use self::cached::N_BLOCKS_FOUND_MAX;
pub(super) use self::row::PlannedRow;
use self::tree::{TreeCells, TreeRows};
use super::arrears::{Latest, Rider};
use super::asked::{Asked, Given};
use super::bounds::DecodeBound;
use super::cost::StepWork;
use super::room::Victims;
use super::{ContextState, Scheduler, StepUnderWay, UnderWay};
use crate::account::{ActorId, Resource};
use crate::batch::{self, Batch, Evicted, HostPageId, Input, PageCopy, PageId, Row};
use crate::command::{Answer, ContextId};
use crate::error::EngineError;
use crate::fair::Class;
use crate::job::{JobId, Work};
use crate::kv::{PageTable, Sequence};

/// Contexts that one plan looks at in vain: the fair order brings them first in the next one.
const N_WAITS_MAX: usize = 1024;

/// What one step does, in this order: the moves, the copies, the rows.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) moves: Vec<Move>,
    pub(crate) copies: Vec<PageCopy>,
    pub(super) rows: Vec<PlannedRow>,
    pub(super) work: StepWork,
    pub(super) decode_bound: DecodeBound,
    /// How long may last what its rows ask beside their tokens, such as the heads of kept states; no bound where nobody else decodes.
    pub(super) beside_ns_most: Option<f64>,
    /// Decode rows of the job that goes before all others, beside which the step takes as many as without it.
    pub(super) n_rows_of_waiting_job: usize,
    /// Jobs of which it has some rows, and a later one has others.
    pub(super) jobs_in_parts: Vec<JobId>,
    /// Whose pages may go, once some had to be taken from other contexts.
    pub(super) victims: Option<Victims>,
    /// Pages that it may move; none where all that has to move does.
    pub(super) n_moves_max: Option<usize>,
    /// Tokens beyond one each of contexts that decode: those that were guessed.
    pub(super) n_tokens_guessed: usize,
    /// Pages that were found in the prefix cache.
    pub(super) n_blocks_found: usize,
    /// Users with rows in it.
    pub(super) riders: Vec<Rider>,
    /// The user that is furthest behind.
    pub(super) latest: Option<Latest>,
    /// The user whose rows are placed before those of others.
    pub(super) of_user: Option<ActorId>,
    /// Whether it has no rows of other users than the latest.
    pub(super) is_kept: bool,
    /// What its rows ask for.
    pub(super) asked: Asked,
    /// What their programs are given.
    pub(super) given: Given,
    /// Where the nodes of its trees see tokens, in the pages from each tree's first on.
    pub(super) trees: TreeCells,
    /// Whether the step has draws whose masks are late, and has not been let draw.
    pub(super) waits_for_masks: bool,
    /// The number of the step.
    pub(crate) step: u64,
}

/// A page that changes place. The order of moves matters: a page freed by one is filled by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    Out(PageId, HostPageId),
    In(HostPageId, PageId),
    Within(PageId, PageId),
}

impl Plan {
    /// Forgets everything but its memory.
    pub(super) fn clear(&mut self) {
        self.moves.clear();
        self.copies.clear();
        self.rows.clear();
        (self.work, self.decode_bound, self.victims) = (StepWork::default(), DecodeBound::None, None);
        (self.n_blocks_found, self.n_moves_max, self.waits_for_masks, self.step) = (0, None, false, 0);
        (self.n_tokens_guessed, self.n_rows_of_waiting_job) = (0, 0);
        self.jobs_in_parts.clear();
        self.riders.clear();
        (self.latest, self.of_user, self.is_kept, self.beside_ns_most) = (None, None, false, None);
        self.asked = Asked::default();
        self.given.clear();
        self.trees.clear();
    }

    /// Rows as the backend has them.
    pub(super) fn n_batch_rows(&self) -> usize {
        self.rows.len() + self.trees.n_nodes()
    }

    /// Tokens of all rows.
    pub(super) fn n_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.end - row.start).sum()
    }

    /// Whether there is nothing to compute. Moves may have been planned all the same.
    pub(crate) fn has_rows(&self) -> bool {
        !self.rows.is_empty()
    }
}

/// What became of a context that was looked at for a step.
pub(super) enum Placed {
    /// It has a row of so many tokens.
    Row { n_tokens: usize },
    /// Pages that it has a right to come free with the end of this step.
    Waits,
    /// What comes next depends on rows that are under way.
    UnderWay,
    /// The mask of its next draw has not come.
    LacksMask,
    /// It stands in the line for pages, has nothing to do, or its work has failed.
    Nothing,
}

/// Whether a context has the pages that its row needs.
enum Brought {
    All,
    /// It may have them, and pages of this step's rows are among them, or more have to move than one plan moves.
    Later,
    /// It may not have them yet.
    InLine,
}

impl Scheduler {
    /// Plans the next step.
    pub(crate) fn plan(&mut self) -> Plan {
        assert!(self.cell_moves.is_empty(), "what is to be copied comes before any step");
        self.step += 1;
        self.pages.note_step(self.step_planned());
        self.end_failed_jobs(None);
        self.line.forget_count();
        self.held.forget();
        self.admit_from_line();
        let mut plan = self.spare_plans.pop().unwrap_or_default();
        plan.step = self.step;
        plan.n_moves_max = Some(self.n_moves_left());
        let mut waiting = Vec::new();
        let n_rows_max = self.limits.n_rows_max - self.n_rows_for_prefills();
        plan.latest = self.commons.latest_at(self.settings.place);
        self.place_decode(n_rows_max, &mut plan, &mut waiting);
        if plan.has_rows() {
            self.last_decode_step = self.step;
        }
        if !plan.is_kept {
            self.note_decode_rows(&plan);
            let n_tokens = self.n_prompt_tokens(&plan);
            self.place_prompts(n_tokens, &mut plan, &mut waiting);
        }
        self.enqueue_all_again(waiting.into_iter());
        self.enqueue_rests(&plan);
        self.note_moved(&plan);
        if plan.has_rows() {
            let mut ids = self.spare_ids.pop().unwrap_or_default();
            ids.extend(plan.rows.iter().map(|row| row.id));
            self.steps_under_way.push_back(StepUnderWay { step: plan.step, ids });
            self.commons.step += 1;
            self.commons.n_under_way += 1;
        }
        if !plan.moves.is_empty() {
            // Pages of other rows did not move, but were not looked up since.
            for row in &plan.rows {
                let context = self.contexts.get_mut(&row.id).expect("a context with a row exists");
                context.kv.locate(&self.pages);
            }
        }
        self.pages.unpin_all();
        self.end_failed_jobs(Some(&plan));
        self.note_left_waiting();
        self.enqueue_ahead(&plan);
        plan
    }

    /// Gives rows to contexts of a class in the fair order, as long as there are rows and tokens.
    fn place_class(
        &mut self,
        class: Class,
        n_rows_max: usize,
        mut n_tokens_left: usize,
        plan: &mut Plan,
        waiting: &mut Vec<ContextId>,
    ) {
        let (mut n_waits, mut kept_out) = (0, SmallVec::<[ActorId; 4]>::new());
        // Each context is looked at once, also when it comes back into the queue.
        for idx in 0..self.n_queued(class) {
            let is_over = n_waits == N_WAITS_MAX || plan.n_batch_rows() >= n_rows_max || n_tokens_left == 0;
            if is_over || self.is_full(class, plan) {
                return;
            }
            if let Some(id) = self.pop_beyond_look(class, plan) {
                waiting.push(id);
                continue;
            }
            let Some(id) = self.pop_next(class, idx == 0, &kept_out, plan) else { return };
            let Some(mut context) = self.contexts.remove(&id) else { continue };
            context.is_queued = false;
            self.holders.note_changed(id, &mut context.listing);
            if matches!(&context.work, Some(Work::Ask(work)) if work.waits_for_rows) {
                // It stood in the queue for something else, and comes back with its rows.
                self.contexts.insert(id, context);
                continue;
            }
            self.ask_without_state(id, &mut context);
            if context.class() != class && context.work.is_some() {
                // Its KV was given up while it stood in the queue.
                self.contexts.insert(id, context);
                self.enqueue(id);
                continue;
            }
            if self.waits_with_head(&context, plan) {
                // Its user has had what it may have beside others.
                kept_out.push(context.owner.actor);
                self.contexts.insert(id, context);
                waiting.push(id);
                continue;
            }
            let is_alone = context.job().is_none();
            let n_tokens_max = match class {
                Class::Decode if is_alone => self.n_tokens_guessing(n_tokens_left, plan),
                Class::Decode => n_tokens_left,
                Class::Prompt => self.chunk_len(context.n_pending(), n_tokens_left, plan),
            };
            if n_tokens_max == 0 {
                self.contexts.insert(id, context);
                return waiting.push(id);
            }
            let n_prompt_tokens = plan.work.n_prompt_tokens;
            match self.place(context, id, n_rows_max - plan.n_batch_rows(), n_tokens_max, plan) {
                Placed::Row { n_tokens } => {
                    // What tokens of prompts ask for takes as long as tokens do.
                    let n_taken = plan.work.n_prompt_tokens - n_prompt_tokens;
                    n_tokens_left = n_tokens_left.saturating_sub(n_taken.max(n_tokens));
                    if class == Class::Decode && is_alone {
                        plan.n_tokens_guessed += n_tokens.saturating_sub(1);
                    }
                }
                Placed::Waits => {
                    waiting.push(id);
                    n_waits += 1;
                }
                Placed::UnderWay | Placed::LacksMask | Placed::Nothing => {}
            }
        }
    }

    /// Looks at a context, which is out of the table and goes back into it.
    fn place(
        &mut self,
        mut context: Box<ContextState>,
        id: ContextId,
        n_rows_max: usize,
        n_tokens_max: usize,
        plan: &mut Plan,
    ) -> Placed {
        let job = context.job();
        if let Some(job) = job {
            self.contexts.insert(id, context);
            if let Some(placed) = self.place_member(job, id, n_rows_max, n_tokens_max, plan) {
                return placed;
            }
            let Some(found) = self.contexts.remove(&id) else { return Placed::Nothing };
            context = found;
        }
        let placed = match context.n_tree_rows().is_some_and(|n_rows| n_rows > n_rows_max) {
            true => Ok(Placed::Waits),
            false => self.place_guessing(&mut context, id, n_tokens_max, plan),
        };
        let mut failure = None;
        let placed = placed.unwrap_or_else(|error| {
            match job {
                Some(job) => failure = Some((job, error)),
                None => context.fail(error, &mut self.pages, &mut self.stats.causes),
            }
            Placed::Nothing
        });
        if matches!(placed, Placed::Nothing | Placed::UnderWay) && !context.is_in_line() {
            context.ready_since = None;
        }
        if matches!(placed, Placed::Nothing | Placed::LacksMask) && !context.is_in_line() && job.is_none() {
            // It has come to its end, is far enough ahead of its guest, or has no mask.
            self.leave(id, &mut context);
        }
        self.contexts.insert(id, context);
        if let Some((job, error)) = failure {
            self.fail_job(job, error);
        }
        placed
    }

    /// Gives the context a row and everything that the row needs. The context is out of the table meanwhile,
    /// so that making room cannot take its own pages.
    pub(super) fn place_context(
        &mut self,
        context: &mut ContextState,
        id: ContextId,
        n_tokens_max: usize,
        plan: &mut Plan,
    ) -> Result<Placed, EngineError> {
        let placed = self.place_masked(context, id, plan);
        match placed.or_else(|| self.place_expecting(context, id, n_tokens_max, plan)) {
            Some(placed) => Ok(placed),
            None => self.place_known(context, id, n_tokens_max, plan),
        }
    }

    /// Gives the context a row of the tokens that it has, all of them if it can.
    pub(super) fn place_known(
        &mut self,
        context: &mut ContextState,
        id: ContextId,
        n_tokens_max: usize,
        plan: &mut Plan,
    ) -> Result<Placed, EngineError> {
        let (n_draws, n_tokens, start) =
            (context.n_draws_under_way(), context.n_tokens_expected(), context.start());
        if context.work.as_ref().is_some_and(Work::is_of_head) {
            return Ok(self.place_of_head(context, id, plan));
        }
        let Some(work) = &mut context.work else { return Ok(Placed::Nothing) };
        let (target, first_output) = match n_draws {
            0 => (work.target(n_tokens), work.first_output(n_tokens)),
            _ => (n_tokens, n_tokens - 1),
        };
        let is_waiting = context.under_way.is_some();
        let later = if is_waiting { Placed::UnderWay } else { Placed::Nothing };
        let has_no_slot = n_draws > 0 && context.slot.0 as usize >= self.limits.n_slots;
        let is_full = n_draws > 0 && n_tokens >= context.kv.n_tokens_most(self.limits.n_positions_max);
        let is_next_token = target.saturating_sub(start) <= 1;
        // Of a job that was found out before its rows are placed.
        let wants_more = work.member().is_some() || work.wants_more(context.window, n_draws);
        if has_no_slot || is_full || is_next_token && !wants_more {
            return Ok(later);
        }
        let class = context.class();
        if !is_waiting && !self.adopt_cached(context, first_output, plan) {
            return Ok(Placed::Waits);
        }
        if self.has_no_room_for_copy(context, target) {
            context.kv.lose_after(context.kv.block_of(context.start()), &mut self.pages);
            if self.needs_more(context) {
                self.leave(id, context);
            }
        }
        let start = context.start();
        let work_target = target;
        let target = context.kv.up_to_eviction(target);
        if start >= target {
            if is_waiting {
                return Ok(Placed::UnderWay);
            }
            if context.job().is_some() {
                // It waits for the others of its job.
                return Ok(Placed::Waits);
            }
            // A prefill that others have done before.
            if let Some(Work::Ask(work)) = context.take_work() {
                work.answer(Ok(Answer::Prefilled));
            }
            return Ok(Placed::Nothing);
        }
        let end = context.work.as_ref().and_then(|work| work.end(start, target, n_tokens_max));
        let Some(end) = end.map(|end| end.min(target)) else { return Ok(Placed::Waits) };
        let end = self.end_with_outputs(context, start..end, n_tokens, n_tokens_max);
        let Some((end, asked)) = self.end_asking(context, start..end, n_tokens, plan) else {
            return Ok(Placed::Waits);
        };
        if end < n_tokens && context.forget_expected(&mut self.pages) > 0 {
            // The draws of a row lie within it: one that does not come to the last of them draws none ahead.
            return self.place_known(context, id, n_tokens_max, plan);
        }
        let n_again = context.kv.n_computed_again(start, end);
        // Charged before anything is planned: a copy without its row would never be made.
        let n_charged = (end - start - n_again) as u64;
        if let Err(error) = context.owner.account.charge(Resource::Tokens, n_charged) {
            // A run may be at its end with what is under way.
            return if is_waiting { Ok(Placed::UnderWay) } else { Err(error.into()) };
        }
        let brought = self.bring_pages(context, id, start, end, plan);
        if !matches!(brought, Ok(Brought::All)) {
            context.owner.account.release(Resource::Tokens, n_charged);
        }
        match brought? {
            Brought::All => {}
            Brought::Later => return Ok(Placed::Waits),
            Brought::InLine => return Ok(Placed::Nothing),
        }
        if let Some(work) = &context.work {
            plan.take_asked(asked, context.kv.steered(start, end), || work.outputs(start, end, n_tokens));
        }
        self.pack(context);
        context.kv.locate(&self.pages);
        if plan.victims.is_some() {
            // This plan takes pages from contexts: not from this one. Rows from before it began to were pinned when it did.
            self.pin(context);
        }
        self.note_placed(id, context);
        self.stats.n_tokens += (end - start) as u64;
        self.stats.n_tokens_again += n_again as u64;
        let cost_ns = self.charge_row(context, class, start..end, n_again, plan);
        self.note_rider(context, if class == Class::Decode { end - start } else { 0 }, plan);
        let goes_on = context.work.as_ref().is_some_and(Work::goes_on);
        let draws = end == n_tokens && end == work_target && goes_on;
        let waits_for_mask = draws && context.lacks_mask();
        plan.waits_for_masks |= waits_for_mask;
        let before = context.under_way.map_or(0, |under_way| under_way.n_rows);
        let n_draws_now = n_draws + usize::from(draws);
        context.under_way = Some(UnderWay { n_rows: before + 1, end, n_draws: n_draws_now, waits_for_mask });
        let input = match n_draws {
            0 => Input::Known,
            _ => Input::Drawn(self.drawing_slot(context)),
        };
        let epoch = context.epoch;
        let work = context.work.as_ref().expect("a placed context has work");
        let n_outputs = work.outputs(start, end, n_tokens).len();
        let n_expected = end.saturating_sub(n_tokens - work.n_expected());
        let tree = work.tree().filter(|_| n_outputs > 0).map(|tree| plan.trees.take(tree, n_tokens));
        // What it overwrites is not known until it is taken in.
        context.kv.set_state(None);
        let leaves_state = n_outputs > 0 && work.leaves_state();
        if leaves_state && !is_waiting {
            self.lend_state(id, context);
        }
        let keeps_state = leaves_state && self.slots.keeps_state(context.slot);
        plan.rows.push(PlannedRow {
            id,
            start,
            end,
            input,
            n_tokens,
            n_outputs,
            draws,
            n_expected,
            waits_for_mask,
            keeps_state,
            n_charged,
            class,
            cost_ns,
            account: context.owner.account.clone(),
            tree,
            epoch,
        });
        Ok(Placed::Row { n_tokens: end - start })
    }

    /// Sees to it that all pages up to `end` are on the device and that those from `start` on are the context's
    /// own, as far as it may have them now.
    fn bring_pages(
        &mut self,
        context: &mut ContextState,
        id: ContextId,
        start: usize,
        end: usize,
        plan: &mut Plan,
    ) -> Result<Brought, EngineError> {
        let n_blocks = context.kv.n_blocks_to(end);
        let n_held = context.kv.blocks().len();
        let first_written = context.kv.block_of(start);
        let keeps_beginning = context.kv.n_before_in_block(start) > 0;
        let written = first_written.min(n_held);
        let written = written..n_blocks.min(n_held).min(context.kv.own_from()).max(written);
        let n_shared = |pages: &PageTable, kv: &Sequence| {
            kv.blocks()[written.clone()].iter().filter(|&&block| pages.is_shared(block)).count()
        };
        let n_new = n_blocks.saturating_sub(n_held);
        let n_away = context.kv.locate(&self.pages);
        let n_needed = n_new + n_shared(&self.pages, &context.kv) + n_away;
        if n_held - n_away + n_needed > self.limits.n_pages {
            let n_needed = n_held - n_away + n_needed;
            return Err(EngineError::NoPages { n_needed, n_pages: self.limits.n_pages });
        }
        if n_needed > 0 {
            if context.job().is_some() && (!context.is_admitted() || self.needs_more(context)) {
                // Its job asks again, for all its members.
                self.leave(id, context);
                return Ok(Brought::Later);
            }
            if !self.admit(id, context) {
                return Ok(Brought::InLine);
            }
            // What it was promised leaves others in one go, so that pages move once a term.
            if !self.make_room(n_needed.max(context.n_promised()), context, plan)
                && self.pages.n_free() < n_needed
            {
                return Ok(Brought::Later);
            }
            if n_away > 0 && !self.bring_back(context, plan) {
                self.pin(context);
                return Ok(Brought::Later);
            }
            // Making room may have ended the sharing of a page. The whole is charged before any part of it is planned.
            let charged = loop {
                let n_charged = (n_new + n_shared(&self.pages, &context.kv)) as u64;
                match context.owner.account.charge(Resource::Pages, n_charged) {
                    Err(_) if self.forget_spares(context.owner.actor) => {}
                    charged => break charged,
                }
            };
            if let Err(error) = charged {
                // A run may be at its end with what is under way.
                return if context.under_way.is_some() { Ok(Brought::Later) } else { Err(error.into()) };
            }
        }
        let account = &context.owner.account;
        for block_idx in written {
            let block = context.kv.blocks()[block_idx];
            if !self.pages.is_shared(block) {
                self.pages.forget_key(block);
                context.kv.note_own(block_idx);
                continue;
            }
            let own = self.pages.allocate(account).expect("room was made");
            // Positions before `start` are kept; a page that is written from its beginning needs no copy.
            if block_idx == first_written && keeps_beginning {
                let page = |id| self.pages.page(id).expect("brought to the device above");
                plan.copies.push(PageCopy { src: page(block), dst: page(own) });
                self.pages.note_copied(own, plan.step);
                // Others may hold it too: nothing may be copied to it in the same step.
                self.pages.pin(block);
            }
            context.kv.replace_block(block_idx, own);
            self.pages.release(block, account);
        }
        for _ in n_held..n_blocks {
            context.kv.push_block(self.pages.allocate(account).expect("room was made"));
        }
        if n_needed > 0 {
            self.note_taken(context);
        }
        Ok(Brought::All)
    }

    /// The plan as the backend sees it, in memory of an earlier one.
    pub(crate) fn batch<'a>(&'a self, plan: &'a Plan, memory: Vec<Row<'_>>) -> Batch<'a> {
        let mut rows = batch::reused(memory);
        let mut before: Option<(JobId, &[PageId])> = None;
        for row in &plan.rows {
            let context = &self.contexts[&row.id];
            let kv = &context.kv;
            let work = context.work.as_ref().expect("a planned context has work");
            let (pages, n_same_pages) = match row.is_of_head() {
                true => kv.tell_pages_there(&self.pages),
                false => kv.tell_pages(kv.n_blocks_to(row.end), &self.pages),
            };
            if let Some(planned) = row.tree {
                let tree = work.tree().expect("its nodes were planned");
                let behind = kv.row_tokens(row.end_in_order(), &self.pages);
                let outputs = work.outputs(row.start, row.end, row.n_tokens);
                let (slot, steered) = (context.slot, kv.steered(row.start, row.end));
                let of_tree = TreeRows { slot, steered, pages, n_same_pages, behind, tree, planned };
                of_tree.put(&plan.trees, outputs, &mut rows);
                before = None;
                continue;
            }
            let search = work.search().map(|job| (job, pages));
            let n_pages_alike = match (search, std::mem::replace(&mut before, search)) {
                (Some((job, pages)), Some((other, others))) if job == other => {
                    pages.iter().zip(others).take_while(|(page, other)| page == other).count()
                }
                _ => 0,
            };
            let mut outputs = work.outputs(row.start, row.end, row.n_tokens);
            let start = kv.row_index(row.start);
            outputs.iter_mut().for_each(|request| request.position -= row.start - start);
            if row.input != Input::Known {
                outputs.iter_mut().for_each(|request| request.kind.starts_after_a_draw());
            }
            rows.push(Row {
                slot: context.slot,
                tokens: kv.row_tokens(row.end, &self.pages),
                input: row.input,
                start,
                pages,
                n_same_pages,
                n_pages_alike,
                outputs,
                evicted: kv.evicted(row.start).map(|evicted| match row.is_of_head() {
                    true => Evicted { packs: &[], ..evicted },
                    false => evicted,
                }),
                steered: kv.steered(row.start, row.end),
            });
        }
        Batch { copies: &plan.copies, rows }
    }
}
