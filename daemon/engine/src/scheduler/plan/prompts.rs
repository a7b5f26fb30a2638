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
            let n_before = plan.work.n_prompt_tokens;
            let n_tokens_free = self.limits.n_tokens_max.saturating_sub(plan.n_tokens());
            let n_tokens_late = n_tokens.max(N_TOKENS_LATE.min(n_tokens_free));
            plan.of_user = Some(user);
            self.place_class(Class::Prompt, n_rows_max, n_tokens_late, plan, waiting);
            plan.of_user = None;
            n_tokens = n_tokens.saturating_sub(plan.work.n_prompt_tokens - n_before);
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
        let (n_tokens, n_with_outputs) = (end - start, end - start + n_outputs(end));
        // What the last token alone asks for comes whatever it takes.
        if n_with_outputs <= n_tokens_max || n_outputs(end - 1) == 0 {
            return end;
        }
        start + (n_tokens_max * n_tokens / n_with_outputs).max(1)
    }
}
