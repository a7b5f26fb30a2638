//! Tokens that a run will draw in all likelihood: forced by its masks, or nearly. Its next row takes them with it and draws
//! at each of their places, as a verification does: several tokens for one step. Where a draw gives another token, what was
//! expected behind it is thrown away.

use super::admission::Standing;
use super::plan::Placed;
use super::{ContextState, Plan, Scheduler};
use crate::account::Resource;
use crate::batch::Token;
use crate::causes::{Cause, Causes};
use crate::command::{Ahead, ContextId};
use crate::guess::N_GUESS_MAX;
use crate::job::Work;
use crate::kv::PageTable;

/// Tokens that have to be expected where steps overlap. What follows such a row is planned once it is taken in, so that its
/// context has no row in the step behind it.
const N_WORTH_A_STEP: usize = 2;

/// Tokens that have to be expected behind a row that is under way: the context has none in the step behind that either.
const N_WORTH_TWO_STEPS: usize = 3;

/// Tokens of such a row for each that a stream may be decoded ahead of its guest.
const N_TIMES_AHEAD: usize = 4;

impl Scheduler {
    /// Gives a context the next row of a run with what it is expected to draw; `None` where nothing is, or it cannot have
    /// such a row now, but perhaps one without.
    pub(super) fn place_expecting(
        &mut self,
        context: &mut ContextState,
        id: ContextId,
        n_tokens_max: usize,
        plan: &mut Plan,
    ) -> Option<Placed> {
        if !self.expect_tokens(context, n_tokens_max, plan) {
            return None;
        }
        let placed = self.place_known(context, id, n_tokens_max, plan);
        if !matches!(placed, Ok(Placed::Row { .. })) {
            context.forget_expected(&mut self.pages);
        }
        // The next draw alone may still be within its guest's budgets.
        placed.ok()
    }

    /// Puts the tokens that a run is expected to draw behind its last one, if its next row can take them.
    fn expect_tokens(&mut self, context: &mut ContextState, n_tokens_max: usize, plan: &Plan) -> bool {
        let (n_tokens, window) = (context.kv.tokens.len(), context.window);
        if context.under_way.is_some() || context.start() + 1 != n_tokens {
            return false;
        }
        let n_blocks = context.n_blocks_granted();
        let Some(Work::Run(run)) = &mut context.work else { return false };
        let is_alone = run.mixture.is_none() && run.n_expected == 0;
        let Some(masks) = run.masks.as_ref().filter(|_| is_alone) else { return false };
        let n_left = run.settings.n_tokens_max.map_or(usize::MAX, |n| n - run.n_given);
        let n_ahead = match run.settings.ahead {
            Ahead::Adaptive => N_TIMES_AHEAD * window.n(),
            Ahead::Unbounded => usize::MAX,
        };
        let n_free = context.kv.n_tokens_most(self.limits.n_positions_max) - n_tokens;
        // One more is drawn than is expected.
        let n_draws_max = n_tokens_max.min(self.settings.n_step_tokens).min(n_left).min(n_free);
        let n_max = n_draws_max.saturating_sub(1).min(n_ahead).min(N_GUESS_MAX);
        // A stop token ends the run where it is drawn.
        let stop_tokens = &run.settings.stop_tokens;
        let expected = masks.expected_after(0).take(n_max).take_while(|token| !stop_tokens.contains(token));
        let fitting = expected
            .zip(n_tokens + 1..)
            .take_while(|&(_, n_tokens)| context.kv.n_blocks_until(n_tokens) <= n_blocks);
        let tokens: Vec<Token> = fitting.map(|(token, _)| token).collect();
        let n_least = if self.limits.n_steps_under_way > 1 { N_WORTH_A_STEP } else { 1 };
        if tokens.len() < n_least {
            return false;
        }
        run.n_expected = tokens.len();
        context.kv.append(&tokens, &mut self.pages);
        let n_all = n_tokens + tokens.len();
        let is_wanted = context.work.as_mut().is_some_and(|work| work.wants_more(window, 0));
        if !is_wanted || self.asked_with(context, n_tokens - 1..n_all, n_all, plan).is_none() {
            context.forget_expected(&mut self.pages);
            return false;
        }
        true
    }

    /// Whether a run that is under way has its next row when that is taken in: enough is expected behind what it draws.
    pub(super) fn pays_to_wait(&self, context: &ContextState) -> bool {
        match &context.work {
            // Where its next row begins is not known.
            Some(Work::Run(run)) if run.n_expected > 0 => true,
            Some(Work::Run(run)) if run.mixture.is_none() => run.masks.as_ref().is_some_and(|masks| {
                let n_under_way = context.n_draws_under_way();
                let n_expected = masks.expected_after(n_under_way).take(N_WORTH_TWO_STEPS).count();
                n_under_way > 0 && n_expected == N_WORTH_TWO_STEPS
            }),
            _ => false,
        }
    }
}

impl ContextState {
    /// Blocks that it may hold without asking for more.
    pub(super) fn n_blocks_granted(&self) -> usize {
        let n_held = self.kv.blocks().len().max(self.kv.n_blocks_until(self.kv.tokens.len()));
        if let Standing::Admitted(term) = self.standing { term.n_blocks.max(n_held) } else { n_held }
    }

    /// The context gets a token that its run drew; whether it was expected. Where another one was, that and those behind it
    /// go.
    pub(super) fn take_drawn(&mut self, token: Token, pages: &mut PageTable, causes: &mut Causes) -> bool {
        if let Some(Work::Run(run)) = &mut self.work
            && run.n_expected > 0
        {
            let n_tokens = self.kv.tokens.len();
            let expected = self.kv.view(pages).iter_range(n_tokens - run.n_expected..n_tokens).next();
            if expected == Some(token) {
                run.n_expected -= 1;
                return true;
            }
        }
        self.give_up_expected(pages, causes);
        self.kv.push(token, pages);
        false
    }

    /// What was computed behind the last draw is in vain. A guest without anything that is expected would not have asked for
    /// it: its budget of tokens is what it would be then.
    pub(super) fn give_up_expected(&mut self, pages: &mut PageTable, causes: &mut Causes) {
        let n_tokens = self.forget_expected(pages) as u64;
        if n_tokens > 0 {
            self.owner.account.release(Resource::Tokens, n_tokens);
            self.note(Cause::TokensGuessedWrong, n_tokens, causes);
            // With those tokens its last page may have been full, and entered in the prefix cache.
            self.hide_what_it_writes(pages);
        }
    }

    /// Takes away again what is expected and has not been drawn; returns how many tokens that were.
    pub(super) fn forget_expected(&mut self, pages: &mut PageTable) -> usize {
        let Some(Work::Run(run)) = &mut self.work else { return 0 };
        let n_expected = std::mem::take(&mut run.n_expected);
        if n_expected > 0 {
            self.kv.truncate(self.kv.tokens.len() - n_expected, pages);
        }
        n_expected
    }
}
