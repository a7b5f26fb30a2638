//! What a step has room for: tokens of prompts, rows that are kept for them, and which rows are left out.

mod decode;
mod prompts;

pub(super) use self::decode::{DecodeBound, Pace};
pub(super) use self::prompts::PromptDebt;

use super::{ContextState, Plan, Scheduler};
use crate::account::ActorId;
use crate::command::ContextId;
use crate::fair::Class;
use crate::guess::N_GUESS_MAX;
use crate::job::Work;

/// Rows of which one is kept for prompts that wait.
pub(super) const N_ROWS_PER_PREFILL: usize = 16;

/// Steps of the target length by which a user may be ahead of others that wait before its decode rows are left out.
const N_STEPS_LEAD: u64 = 4;

/// Of a step, the part that decode rows may take from prompts before it is missed.
const N_PARTS_MISSED: usize = 16;

/// Tokens of which one is kept for prompts that wait.
pub(super) const N_TOKENS_PER_PREFILL: usize = 16;

/// Steps for which the length of steps stays bounded after the last decode row.
const N_STEPS_RECENT: u64 = 4;

/// Steps of which one begins with the next owner's prompt round robin, even if that owner decodes. An owner that decodes
/// stays ahead of those that only have prompts: by virtual time alone its prompts would starve.
const N_STEPS_IN_TURN: u64 = 8;

impl Scheduler {
    /// The context of a class that is looked at next, `is_first` for the step.
    pub(super) fn pop_next(
        &mut self,
        class: Class,
        is_first: bool,
        kept_out: &[ActorId],
        plan: &Plan,
    ) -> Option<ContextId> {
        let lane = self.lane(class);
        if let Some(user) = plan.of_user {
            return if kept_out.contains(&user) { None } else { self.commons.queue.pop_of(lane, user) };
        }
        match class {
            _ if !kept_out.is_empty() => self.commons.queue.pop_but_of(lane, |user| kept_out.contains(&user)),
            Class::Prompt if is_first && self.step.is_multiple_of(N_STEPS_IN_TURN) => {
                self.commons.queue.pop_in_turn(lane)
            }
            _ => self.commons.queue.pop(lane),
        }
    }

    /// Tokens that a prompt with so many to compute gets of those that are left. One that has to be cut leaves no tile
    /// of attention mostly empty; behind another prompt, less than a tile is not worth one.
    pub(super) fn chunk_len(&self, n_pending: usize, n_tokens_left: usize, plan: &Plan) -> usize {
        let n_tile = self.limits.n_tile_tokens;
        match n_tokens_left % n_tile {
            _ if n_pending <= n_tokens_left => n_tokens_left,
            _ if n_tokens_left < n_tile && plan.work.n_prompt_tokens > 0 => 0,
            n_over if n_tokens_left > n_tile && 2 * n_over < n_tile => n_tokens_left - n_over,
            _ => n_tokens_left,
        }
    }

    /// About so many tokens of prompts, so that with the decode rows they fill the blocks in which layers are computed.
    fn filling_blocks(&self, n_tokens: usize, plan: &Plan, n_tokens_max: usize) -> usize {
        let (n_block, n_rows) = (self.limits.n_block_tokens, plan.work.n_decode_rows);
        let filled = (n_rows + n_tokens + n_block / 2) / n_block * n_block;
        match filled.saturating_sub(n_rows) {
            // A prompt that gets less and less is charged more and more for each token.
            n_filling if 4 * n_filling < 3 * n_tokens => n_tokens,
            n_filling => n_filling.min(n_tokens_max),
        }
    }

    /// Whether a row that asks the head alone has to wait: it is no decode row, and what such rows take beside others is bounded.
    pub(super) fn waits_with_head(&self, context: &ContextState, plan: &Plan) -> bool {
        context.work.as_ref().is_some_and(Work::is_of_head)
            && plan.beside_ns_most.is_some_and(|ns| self.costs.beside_ns(plan.work) >= ns)
    }

    /// Whether the step takes no more rows of a class.
    pub(super) fn is_full(&mut self, class: Class, plan: &Plan) -> bool {
        let has_its_decode_rows = plan.work.n_decode_rows >= n_rows_bound(plan);
        class == Class::Decode && has_its_decode_rows
            || plan.of_user.is_none() && self.is_too_far_ahead(class, plan)
    }

    /// Whether the next owner has had so much more than a user with waiting prompts that its row is left out. Where prompts
    /// as good as fill a step beside decode rows, that would give them nothing: then no row is left out, and no more than this
    /// lead is kept for later.
    fn is_too_far_ahead(&mut self, class: Class, plan: &Plan) -> bool {
        if class == Class::Prompt || self.n_queued(Class::Prompt) == 0 {
            return false;
        }
        let (lane, prompts) = (self.lane(class), self.lane(Class::Prompt));
        let n_rows = plan.work.n_decode_rows + self.commons.queue.n_rows(lane);
        let n_rows = n_rows.min(n_rows_bound(plan));
        let Some(target_ns) = self.costs.target_ns(n_rows, self.settings.latency_multiple) else {
            return false;
        };
        let lead = N_STEPS_LEAD.saturating_mul(target_ns);
        if self.prompts_fill_step_beside(n_rows) {
            self.commons.queue.bound_lead(lane, prompts, lead);
            return false;
        }
        if self.commons.queue.lead(lane, prompts) <= lead {
            return false;
        }
        let is_late = plan.latest.is_some();
        if is_late {
            self.commons.queue.bound_lead(lane, prompts, lead);
        }
        !is_late
    }

    /// Whether prompts have as good as all of a step beside so many decode rows.
    fn prompts_fill_step_beside(&self, n_rows: usize) -> bool {
        if n_rows >= self.limits.n_tokens_max {
            return false;
        }
        let n_tokens_max = self.n_tokens_to_fill(n_rows);
        let n_tokens = self.costs.n_prompt_tokens(n_rows, self.settings.latency_multiple, n_tokens_max);
        n_tokens >= self.settings.n_step_tokens - self.settings.n_step_tokens / N_PARTS_MISSED
    }

    /// Whether a context has decoded so lately that it is taken to decode still: a stream whose guest is a moment late does.
    pub(super) fn has_decoded_lately(&self) -> bool {
        self.step - self.last_decode_step <= N_STEPS_RECENT
    }

    /// Tokens of prompts that fill a step of so many tokens. Beside many rows that decode prompts get as many as those.
    fn n_tokens_to_fill(&self, n_tokens: usize) -> usize {
        self.settings.n_step_tokens.max(2 * n_tokens).min(self.limits.n_tokens_max) - n_tokens
    }

    /// Tokens that a context that decodes gets of those that are left. Guesses fill no more of a step than prompts do; the
    /// next token of a context finds room beside them, and they beside all that decodes.
    pub(super) fn n_tokens_guessing(&self, n_tokens_left: usize, plan: &Plan) -> usize {
        n_tokens_left.min(1 + self.settings.n_step_tokens.saturating_sub(plan.n_tokens_guessed))
    }

    /// Tokens of prompts that the step has room for. While contexts decode, also when left out of this step, its length
    /// is bounded.
    pub(super) fn n_prompt_tokens(&self, plan: &Plan) -> usize {
        let n_late = if self.has_decoded_lately() { self.costs.n_decode_rows() } else { 0 };
        let n_left_out = self.n_queued(Class::Decode).max(n_late).min(plan.decode_bound.n_rows());
        // A context that was to decode may have lost what its step needs, and have got a part of a prompt instead.
        let n_tokens_max = self.n_tokens_to_fill(plan.n_tokens());
        let multiple = self.settings.latency_multiple;
        let moves_ns = self.moves_ns(plan);
        // What moves take of a step, in steps of so many decode rows.
        let of_moves =
            |n_rows| self.costs.target_ns(n_rows, 1.0).map_or(0.0, |ns| moves_ns / ns.max(1) as f64);
        match (plan.work.n_decode_rows, n_left_out) {
            // Contexts that decode with another model on the device wait for this step as well.
            (0, 0) => match self.commons.decode_ns_beside(self.settings.place) {
                Some(ns) => {
                    let ns = (ns as f64 * multiple - moves_ns).max(0.0) as u64;
                    self.costs.n_tokens_within(ns, n_tokens_max)
                }
                None => self
                    .debt
                    .ns_alone()
                    .map_or(n_tokens_max, |ns| self.costs.n_tokens_within(ns, n_tokens_max)),
            },
            (0, n_left_out) => {
                let multiple = multiple + 1.0 - of_moves(n_left_out);
                let rest = self.costs.n_prompt_tokens(n_left_out, multiple, n_tokens_max.max(1));
                rest.min(n_tokens_max)
            }
            _ if self.costs.is_decode_alone_due() || self.debt.is_due() => 0,
            _ if plan.decode_bound.is_look() => 0,
            (n_rows, _) if n_tokens_max > 0 => {
                let n_tokens = self.costs.n_prompt_tokens(n_rows, multiple - of_moves(n_rows), n_tokens_max);
                self.filling_blocks(n_tokens, plan, n_tokens_max)
            }
            _ => 0,
        }
    }

    /// Rows that decoding leaves to the prompts that wait: a user with as many streams as there are rows would
    /// otherwise keep the prompts of all others from ever being computed. Where rows are few, every second step.
    pub(super) fn n_rows_for_prefills(&self) -> usize {
        (self.limits.n_rows_max / N_ROWS_PER_PREFILL)
            .max((self.step % 2) as usize)
            .min(self.n_queued(Class::Prompt))
    }

    /// Tokens that the step has for decoding: verifications, of many tokens each, leave some to the prompts that wait, in
    /// every second step where the longest guess would otherwise not fit.
    pub(super) fn n_decode_tokens(&self, plan: &Plan) -> usize {
        let n_step_tokens = self.settings.n_step_tokens;
        let n_kept = match self.n_queued(Class::Prompt) {
            0 => 0,
            _ if n_step_tokens < 2 * N_GUESS_MAX => (self.step % 2) as usize,
            _ => n_step_tokens / N_TOKENS_PER_PREFILL,
        };
        (self.limits.n_tokens_max - n_kept).saturating_sub(plan.work.n_decode_rows)
    }
}

/// The most decode rows of a step, but for those that are planned whole.
pub(super) fn n_rows_bound(plan: &Plan) -> usize {
    plan.decode_bound.n_rows().saturating_add(plan.n_rows_of_waiting_job)
}
