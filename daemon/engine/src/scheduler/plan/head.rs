//! Rows that ask the head alone, of the state that the device keeps.

use super::{Placed, PlannedRow};
use crate::batch::Input;
use crate::command::ContextId;
use crate::fair::Class;
use crate::job::{Part, Work};
use crate::kv::PageTable;
use crate::scheduler::{ContextState, Plan, Scheduler, UnderWay};

impl Scheduler {
    /// Gives a context a row that asks the head alone. None of its tokens is computed, and no page is brought for it.
    pub(in crate::scheduler) fn place_of_head(
        &mut self,
        context: &mut ContextState,
        id: ContextId,
        plan: &mut Plan,
    ) -> Placed {
        if context.under_way.is_some() {
            return Placed::UnderWay;
        }
        if context.work.is_none() {
            return Placed::Nothing;
        }
        let n_tokens = context.kv.tokens.len();
        let Some(asked) = self.asked_with(context, n_tokens..n_tokens, n_tokens, plan) else {
            return Placed::Waits;
        };
        if let Some(work) = &context.work {
            plan.take_asked(asked, None, || work.outputs(n_tokens, n_tokens, n_tokens));
        }
        context.kv.locate(&self.pages);
        if plan.victims.is_some() {
            self.pin(context);
        }
        self.note_placed(id, context);
        self.note_rider(context, 1, plan);
        let cost_ns = self.charge_row_of_head(context, n_tokens, plan);
        let work = context.work.as_ref().expect("it has work");
        let draws = matches!(work, Work::Run(_));
        plan.rows.push(PlannedRow {
            id,
            start: n_tokens,
            end: n_tokens,
            input: Input::Known,
            n_tokens,
            n_outputs: work.outputs(n_tokens, n_tokens, n_tokens).len(),
            draws,
            n_expected: 0,
            waits_for_mask: false,
            keeps_state: true,
            n_charged: 0,
            class: Class::Decode,
            cost_ns,
            account: context.owner.account.clone(),
            tree: None,
            epoch: context.epoch,
        });
        context.under_way =
            Some(UnderWay { n_rows: 1, end: n_tokens, n_draws: usize::from(draws), waits_for_mask: false });
        Placed::Row { n_tokens: 0 }
    }

    /// Charges a guest's virtual time for such a row; returns how many nanoseconds that is.
    fn charge_row_of_head(&mut self, context: &ContextState, n_tokens: usize, plan: &mut Plan) -> u64 {
        let work = context.work.as_ref().expect("it has work");
        let of_outputs = work.outputs_cost(n_tokens - 1..n_tokens, n_tokens, &self.limits);
        let n_head_tokens = ((of_outputs / 1000) as usize).max(self.limits.logits_tokens as usize) + 1;
        plan.work.n_head_tokens += n_head_tokens;
        let n_thousandths = work.programs_cost(n_tokens - 1..n_tokens, n_tokens, self.limits.logits_tokens);
        plan.work.n_thousandths_beside += n_thousandths;
        let cost = self.costs.tokens_ns(n_head_tokens) + self.costs.thousandths_ns(n_thousandths);
        self.commons.queue.charge(&context.seat, cost);
        cost
    }
}

impl Scheduler {
    /// Has what a context asks of a state that the device no longer keeps computed from the layers on. One from which tokens were
    /// evicted may have lost its KV while it stood in the queue: then its holes are gone through anew. What it needs for that it was
    /// promised nothing of.
    pub(super) fn ask_without_state(&mut self, id: ContextId, context: &mut ContextState) {
        if context.under_way.is_none()
            && !context.kv.has_state()
            && let Some(Work::Ask(work)) = &mut context.work
            && work.part == Part::Head
        {
            work.part = Part::Tokens;
            self.leave(id, context);
            context.rewind_to_outputs(&mut self.pages);
        }
    }
}

impl ContextState {
    /// The output of a position comes out of computing it, so its KV is computed once more if need be.
    pub(in crate::scheduler) fn rewind_to_outputs(&mut self, pages: &mut PageTable) {
        let Some(work) = &self.work else { return };
        let n_tokens = self.kv.tokens.len();
        let (first, n_base) = (work.first_output(n_tokens), work.n_base(n_tokens));
        self.kv.rewind(first, pages);
        // Of many tokens that are computed once more, others may have come to share any block.
        match first + 1 < n_base {
            true => self.kv.forget_unwritten(pages),
            false => self.kv.forget_shared_unwritten(pages),
        }
    }
}
