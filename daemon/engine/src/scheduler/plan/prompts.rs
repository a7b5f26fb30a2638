//! The prompts of a step.

use std::ops::Range;

use crate::command::ContextId;
use crate::fair::Class;
use crate::job::Work;
use crate::scheduler::arrears::Latest;
use crate::scheduler::{ContextState, Plan, Scheduler};

/// Tokens that a step has for the prompts of a user whose next row is late.
const N_TOKENS_LATE: usize = 8;

impl Scheduler {
    /// Gives so many tokens to prompts: those of the user that is furthest behind come first, and a few of them whatever the
    /// step has room for.
    pub(super) fn place_prompts(
        &mut self,
        mut n_tokens: usize,
        plan: &mut Plan,
        waiting: &mut Vec<ContextId>,
    ) {
        let n_rows_max = self.limits.n_rows_max;
        if let Some(Latest { user, .. }) = plan.latest.filter(|_| !plan.decode_bound.is_look()) {
            let (n_before, n_prompt_before) = (plan.n_tokens(), plan.work.n_prompt_tokens);
            let n_tokens_free = self.limits.n_tokens_max.saturating_sub(n_before);
            let n_tokens_late = n_tokens.max(N_TOKENS_LATE.min(n_tokens_free));
            plan.of_user = Some(user);
            self.place_class(Class::Prompt, n_rows_max, n_tokens_late, plan, waiting);
            plan.of_user = None;
            // One whose prompt others have computed meanwhile decodes, and is a token of the step all the same.
            let n_taken = (plan.n_tokens() - n_before).max(plan.work.n_prompt_tokens - n_prompt_before);
            n_tokens = n_tokens.saturating_sub(n_taken);
        }
        self.place_class(Class::Prompt, n_rows_max, n_tokens, plan, waiting);
    }

    /// Where a row of a prompt ends that may take as long as so many tokens, with what its tokens ask for: a row of logits for each
    /// takes longer than the token where the model is small.
    pub(super) fn end_with_outputs(
        &self,
        context: &ContextState,
        tokens: Range<usize>,
        n_all: usize,
        n_tokens_max: usize,
    ) -> usize {
        let Range { start, end } = tokens;
        let Some(work @ Work::Ask(_)) = &context.work else { return end };
        let n_outputs = |end| (work.outputs_cost(start..end, n_all, &self.limits) / 1000) as usize;
        // What the last token alone asks for comes whatever it takes.
        if end - start + n_outputs(end) <= n_tokens_max || n_outputs(end - 1) == 0 {
            return end;
        }
        // Tokens before the first that asks are no more than tokens.
        let n_before = work.first_output(n_all).clamp(start, end) - start;
        let n_asking = end - start - n_before;
        let n_left = n_tokens_max.saturating_sub(n_before);
        let n_fitting = n_left * n_asking / (n_asking + n_outputs(end)).max(1);
        start + (n_before + n_fitting).max(1)
    }
}
