//! What a row costs its owner.

use std::ops::Range;

use super::cost::Costs;
use super::histories::n_history_pages_of;
use super::{ContextState, Plan, Scheduler};
use crate::fair::Class;

impl Scheduler {
    /// Charges a row to its owner's virtual time: what it adds to the step, computing again aside. Returns how many
    /// nanoseconds that is.
    pub(super) fn charge_row(
        &mut self,
        context: &mut ContextState,
        class: Class,
        tokens: Range<usize>,
        n_again: usize,
        plan: &mut Plan,
    ) -> u64 {
        let work = context.work.as_ref().expect("a placed context has work");
        let (n_tokens, n_all) = (tokens.len(), context.n_tokens_expected());
        // One whose mask is late may sit out.
        let n_thousandths = match context.lacks_mask() {
            true => 0,
            false => work.programs_cost(tokens.clone(), n_all, self.limits.logits_tokens),
        };
        let n_thousandths = n_thousandths + self.steering_cost(context, tokens.start, tokens.end);
        let n_pages = context.kv.blocks().len();
        let n_pages_beside = work.n_pages_beside(tokens.end, n_all, n_pages, &self.limits);
        let of_outputs = work.outputs_cost(tokens.clone(), n_all, &self.limits);
        let (cost, n_thousandths) = if class == Class::Decode {
            plan.work.n_decode_rows += n_tokens;
            // A verification is as many rows as it has tokens, and reads its pages once; the nodes of a tree each for itself.
            let n_reads = work.tree().map_or(1, |_| n_tokens);
            let row_ns = self.costs.decode_row_ns(n_pages * n_reads / n_tokens);
            (row_ns * n_tokens as u64, n_thousandths + of_outputs)
        } else {
            let n_outputs_tokens = (of_outputs / 1000) as usize;
            plan.work.n_prompt_tokens += n_tokens + n_outputs_tokens;
            (self.costs.tokens_ns(n_tokens - n_again + n_outputs_tokens), n_thousandths)
        };
        let steering_ns = self.note_steered_row(context, tokens.start, tokens.end, plan);
        plan.work.n_thousandths_beside += n_thousandths;
        plan.work.n_pages_beside += n_pages_beside;
        let n_history_pages = n_history_pages_of(context, &tokens, n_all);
        let beside = Costs::histories_ns(n_history_pages)
            + self.costs.thousandths_ns(n_thousandths)
            + self.costs.pages_ns(n_pages_beside);
        let cost_ns = cost + beside + steering_ns;
        self.commons.queue.charge(&context.seat, cost_ns);
        cost_ns
    }

    /// What a step took beyond what its rows were taken to cost is charged to them as well, each its part: a step that has
    /// nothing but prompts takes the time of any step, whatever a token adds to one. Rows that decode have paid for a step
    /// without prompts, and are not to blame for what it takes with them.
    pub(super) fn charge_rest(&mut self, plan: &Plan, elapsed_ns: u64) {
        let of_all: u64 = plan.rows.iter().map(|row| row.cost_ns).sum();
        let rest_ns = elapsed_ns.saturating_sub(of_all);
        let prompts = || plan.rows.iter().filter(|row| row.class == Class::Prompt);
        let of_prompts: u64 = prompts().map(|row| row.cost_ns).sum();
        let (class, cost_ns) = match of_prompts {
            0 => (Class::Decode, of_all),
            _ => (Class::Prompt, of_prompts),
        };
        if rest_ns == 0 || cost_ns == 0 {
            return;
        }
        let part = rest_ns as f64 / cost_ns as f64;
        for row in plan.rows.iter().filter(|row| row.class == class) {
            if let Some(context) = self.contexts.get(&row.id) {
                self.commons.queue.charge(&context.seat, (part * row.cost_ns as f64) as u64);
            }
        }
    }
}
