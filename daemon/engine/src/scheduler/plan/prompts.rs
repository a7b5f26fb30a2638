//! The prompts of a step.

use crate::command::ContextId;
use crate::fair::Class;
use crate::scheduler::arrears::Latest;
use crate::scheduler::{Plan, Scheduler};

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
            let n_before = plan.n_tokens();
            let n_tokens_free = self.limits.n_tokens_max.saturating_sub(n_before);
            let n_tokens_late = n_tokens.max(N_TOKENS_LATE.min(n_tokens_free));
            plan.of_user = Some(user);
            self.place_class(Class::Prompt, n_rows_max, n_tokens_late, plan, waiting);
            plan.of_user = None;
            n_tokens = n_tokens.saturating_sub(plan.n_tokens() - n_before);
        }
        self.place_class(Class::Prompt, n_rows_max, n_tokens, plan, waiting);
    }
}
