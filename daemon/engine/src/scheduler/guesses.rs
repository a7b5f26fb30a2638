//! What is verified of a guess, and what becomes of a tree whose draws are known.

use super::bounds::{N_ROWS_PER_PREFILL, N_TOKENS_PER_PREFILL};
use super::histories::n_nodes_within;
use super::plan::Placed;
use super::{ContextState, Move, Plan, Scheduler};
use crate::account::{BudgetExceeded, Resource};
use crate::backend::PAGE_LEN;
use crate::batch::CellMove;
use crate::command::ContextId;
use crate::error::EngineError;
use crate::guess::{Guess, N_GUESS_MAX, N_TREE_NODES_MAX};
use crate::job::Work;
use crate::kv::Sequence;
use crate::sampling::Sampler;

/// What a step takes of guesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct GuessLimits {
    n_chain_tokens: usize,
    n_tree_nodes: usize,
    /// Tokens that all pages hold.
    n_tokens: usize,
    /// Pages of tokens that the draws behind the nodes of a tree look at.
    n_history_pages: usize,
    /// Whether attention tells the cells of a page apart: where layers see windows it does not.
    tells_cells_apart: bool,
}

impl GuessLimits {
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn n_tree_nodes(self) -> usize {
        self.n_tree_nodes
    }

    /// The form in which a guess is verified behind a context. Behind one with holes, and by layers with windows, a tree is its
    /// first branch; of one whose draws look at more tokens than a step brings, the first nodes are left.
    ///
    /// # Errors
    /// It is more than a step takes.
    pub(super) fn fitting(
        self,
        guess: Guess,
        sampler: &Sampler,
        kv: &Sequence,
    ) -> Result<Guess, EngineError> {
        let Self { n_chain_tokens, n_tree_nodes, n_tokens, n_history_pages, tells_cells_apart } = self;
        let of_tree = guess.tree().map(|tree| tree.n_nodes());
        let n_tokens_max = if of_tree.is_some() { n_tree_nodes } else { n_chain_tokens };
        let n_guessed = guess.tokens().len();
        if n_guessed > n_tokens_max {
            return Err(EngineError::GuessTooLong { n_tokens: n_guessed, n_tokens_max });
        }
        if of_tree.is_none() {
            return Ok(guess);
        }
        // Alone on the device a context is decoded to the last page; no guess may keep it from that.
        let guess = guess.within(n_tokens.saturating_sub(kv.tokens.len()));
        let Some(tree) = guess.tree() else { return Ok(guess) };
        // The draws of a chain find all that they look at beside the pages: it goes further than so few nodes.
        let n_nodes = n_nodes_within(tree, sampler, kv.tokens.len(), n_history_pages);
        let is_cut_short = n_nodes < tree.n_nodes() && n_nodes <= tree.first_branch().len();
        match is_cut_short || tree.is_chain() || !tells_cells_apart || kv.is_holed() {
            true => Ok(guess.into_chain().first(n_chain_tokens)),
            false => Ok(guess.within(n_nodes)),
        }
    }
}

/// Of a context whose guess lies behind it, how many guessed tokens there is room for after this refusal; `None` where guesses
/// are not what it lacks room for.
fn n_guessed_within(refusal: &EngineError, n_base: usize, kv: &Sequence) -> Option<usize> {
    let n_guessed = kv.tokens.len() - n_base;
    let behind_pages = |n_lacking: usize| {
        let n_blocks = kv.n_blocks_to(kv.tokens.len());
        let n_fit = (0..n_guessed).rev().find(|n| kv.n_blocks_to(n_base + n) + n_lacking <= n_blocks);
        n_fit.unwrap_or(0)
    };
    match refusal {
        EngineError::Budget(BudgetExceeded { what, used, requested, limit, .. }) => {
            let n_lacking = (used + requested).saturating_sub(*limit) as usize;
            // Some go in any case: what lacks may be room for a copy.
            let n_most = n_guessed.checked_sub(1)?;
            match *what == Resource::Tokens.name() {
                true => Some(n_guessed.saturating_sub(n_lacking).min(n_most)),
                false => Some(behind_pages(n_lacking).min(n_most)),
            }
        }
        EngineError::NoPages { n_needed, n_pages } => {
            let n_most = n_guessed.checked_sub(1)?;
            Some(behind_pages(n_needed - n_pages).min(n_most))
        }
        _ => None,
    }
}

impl Scheduler {
    /// As [`Self::place_context`]. Of guesses, as many are verified as a budget and the device have room for: only what a
    /// context is refused without them is an error.
    pub(super) fn place_guessing(
        &mut self,
        context: &mut ContextState,
        id: ContextId,
        n_tokens_max: usize,
        plan: &mut Plan,
    ) -> Result<Placed, EngineError> {
        loop {
            let placed = self.place_context(context, id, n_tokens_max, plan);
            let (Err(refusal), Some(Work::Verify(work))) = (&placed, &mut context.work) else {
                return placed;
            };
            let Some(n_guessed) = n_guessed_within(refusal, work.n_base, &context.kv) else { return placed };
            work.cut_guess(n_guessed);
            context.kv.truncate(work.n_base, &mut self.pages);
            context.kv.append(work.guess(), &mut self.pages);
        }
    }

    /// Nodes of a tree find room in some step, whoever waits beside it: each is a row, and so is the token before them.
    pub(super) fn guess_limits(&self) -> GuessLimits {
        let (n_rows, n_tokens) = (self.limits.n_rows_max, self.settings.n_step_tokens);
        let n_kept = if n_tokens < 2 * N_GUESS_MAX { 0 } else { n_tokens / N_TOKENS_PER_PREFILL };
        let n_rows_most = (n_rows - n_rows / N_ROWS_PER_PREFILL).min(n_tokens - n_kept);
        GuessLimits {
            n_chain_tokens: N_GUESS_MAX.min(n_tokens - 1),
            n_tree_nodes: N_TREE_NODES_MAX.min(n_rows_most - 1),
            n_tokens: self.limits.n_pages * PAGE_LEN,
            n_history_pages: self.limits.asks.n_history_pages,
            tells_cells_apart: self.limits.n_stretches_max > 0,
        }
    }

    /// What has to be copied now, before any other step or move.
    pub(crate) fn take_cell_moves(&mut self) -> Vec<CellMove> {
        std::mem::take(&mut self.cell_moves)
    }

    /// Those copies have failed: nobody knows what is in the pages that they write to.
    pub(crate) fn lose_cells(&mut self, moves: &[CellMove]) {
        let lost: Vec<Move> = moves.iter().map(|it| Move::Within(it.src.page, it.dst.page)).collect();
        self.lose_moves(&lost);
    }
}
