//! Tokens that a run will draw in all likelihood: forced by its masks, or nearly. Its next row takes them with it and draws
//! at each of their places, as a verification does: several tokens for one step. Where a draw gives another token, what was
//! expected behind it is thrown away.

use super::admission::Standing;
use super::{ContextState, Plan, Scheduler};
use crate::command::Ahead;
use crate::job::{N_GUESS_MAX, Work};
use crate::kv::PageTable;

/// Tokens that have to be expected where steps overlap. What follows such a row is planned once it is taken in, so that its
/// context has no row in the step behind it, and perhaps none in the one before.
const N_WORTH_A_STEP: usize = 3;

/// Tokens of such a row for each that a stream may be decoded ahead of its guest.
const N_TIMES_AHEAD: usize = 4;

impl Scheduler {
    /// Puts the tokens that a run is expected to draw behind its last one, if its next row can take them; returns how many.
    pub(super) fn expect_tokens(
        &mut self,
        context: &mut ContextState,
        n_tokens_max: usize,
        plan: &Plan,
    ) -> usize {
        let n_tokens = context.kv.tokens.len();
        if context.under_way.is_some() || context.start() + 1 != n_tokens {
            return 0;
        }
        let n_blocks = match context.standing {
            // What it was promised.
            Standing::Admitted(term) => term.n_blocks(),
            Standing::Outside | Standing::InLine => 0,
        };
        let n_blocks = n_blocks.max(context.kv.blocks().len()).max(context.kv.n_blocks_until(n_tokens));
        let n_tokens_most = context.kv.n_tokens_most(self.limits.n_positions_max);
        let window = context.window;
        let Some(Work::Run(run)) = &mut context.work else { return 0 };
        let is_alone = run.mixture.is_none() && run.n_expected == 0;
        let Some(masks) = run.masks.as_ref().filter(|_| is_alone) else { return 0 };
        let n_left = run.settings.n_tokens_max.map_or(usize::MAX, |n| n - run.n_given);
        let n_ahead = match run.settings.ahead {
            Ahead::Adaptive => N_TIMES_AHEAD * window.n(),
            Ahead::Unbounded => usize::MAX,
        };
        // One more is drawn than is expected.
        let n_max = [n_tokens_max, self.settings.n_step_tokens, n_left, n_tokens_most - n_tokens];
        let n_max = n_max.into_iter().min().unwrap_or(0).saturating_sub(1).min(n_ahead).min(N_GUESS_MAX);
        // A stop token ends the run where it is drawn.
        let stop_tokens = &run.settings.stop_tokens;
        let tokens = masks.expected_after(0).take(n_max).take_while(|token| !stop_tokens.contains(token));
        let tokens: Vec<_> = tokens
            .enumerate()
            .take_while(|(idx, _)| context.kv.n_blocks_until(n_tokens + idx + 1) <= n_blocks)
            .map(|(_, token)| token)
            .collect();
        let n_least = if self.limits.n_steps_under_way > 1 { N_WORTH_A_STEP } else { 1 };
        if tokens.len() < n_least || !run_wants_more(context) {
            return 0;
        }
        context.kv.append(&tokens, &mut self.pages);
        if let Some(Work::Run(run)) = &mut context.work {
            run.n_expected = tokens.len();
        }
        let n_all = n_tokens + tokens.len();
        if self.asked_with(context, n_tokens - 1..n_all, n_all, plan).is_none() {
            context.forget_expected(&mut self.pages);
            return 0;
        }
        tokens.len()
    }

    /// Whether a run that is under way has its next row when that is taken in: enough is expected behind what it draws.
    pub(super) fn pays_to_wait(&self, context: &ContextState) -> bool {
        match &context.work {
            // Where its next row begins is not known.
            Some(Work::Run(run)) if run.n_expected > 0 => true,
            Some(Work::Run(run)) if run.mixture.is_none() => run.masks.as_ref().is_some_and(|masks| {
                let n_under_way = context.n_draws_under_way();
                let n_expected = masks.expected_after(n_under_way).take(N_WORTH_A_STEP).count();
                n_under_way > 0 && n_expected == N_WORTH_A_STEP
            }),
            _ => false,
        }
    }
}

fn run_wants_more(context: &mut ContextState) -> bool {
    let window = context.window;
    context.work.as_mut().is_some_and(|work| work.wants_more(window, 0))
}

impl ContextState {
    /// Takes away again what was expected and has not been drawn.
    pub(super) fn forget_expected(&mut self, pages: &mut PageTable) {
        if let Some(Work::Run(run)) = &mut self.work {
            let n_expected = std::mem::take(&mut run.n_expected);
            if n_expected > 0 {
                self.kv.truncate(self.kv.tokens.len() - n_expected, pages);
            }
        }
    }
}
