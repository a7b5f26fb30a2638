//! What a row costs its owner.

use std::ops::Range;

use super::fair::Class;
use super::{ContextState, Plan, Scheduler};

impl Scheduler {
    /// Charges a row to its owner's virtual time: what it adds to the step, computing again aside.
    pub(super) fn charge_row(
        &mut self,
        context: &ContextState,
        class: Class,
        tokens: Range<usize>,
        n_again: usize,
        plan: &mut Plan,
    ) {
        let work = context.work.as_ref().expect("a placed context has work");
        let (n_tokens, n_all) = (tokens.len(), context.n_tokens_expected());
        // One whose mask is late may sit out.
        let n_thousandths = match context.lacks_mask() {
            true => 0,
            false => work.programs_cost(tokens.clone(), n_all, self.limits.logits_tokens),
        };
        plan.work.n_program_thousandths += n_thousandths;
        let n_outputs_tokens = work.outputs_cost(tokens, n_all, &self.limits);
        let cost = if class == Class::Decode {
            plan.work.n_decode_rows += n_tokens;
            // A verification is as many rows as it has tokens, and reads its pages once.
            let row_ns = self.costs.decode_row_ns(context.kv.blocks().len() / n_tokens);
            row_ns * n_tokens as u64 + self.costs.tokens_ns(n_outputs_tokens)
        } else {
            plan.work.n_prompt_tokens += n_tokens + n_outputs_tokens;
            self.costs.tokens_ns(n_tokens - n_again + n_outputs_tokens)
        };
        let of_programs = self.costs.thousandths_ns(n_thousandths);
        self.commons.queue.charge(&context.seat, cost + of_programs);
    }
}
