//! What an engine has done and holds for a model.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::causes::Causes;
use crate::run_stats::RunStats;

/// Counters and gauges of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStats {
    /// Device pages.
    pub n_pages: usize,
    /// Device pages that hold nothing.
    pub n_pages_free: usize,
    /// Device pages held by the prefix cache alone; given up when pages are needed.
    pub n_pages_cached: usize,
    /// Pages moved to host memory.
    pub n_pages_on_host: usize,
    /// Open contexts.
    pub n_contexts: usize,
    /// Saved contexts.
    pub n_saved: usize,
    /// Contexts that the last step had no room for, or no pages, and that wait for the next.
    pub n_waiting: usize,
    /// Steps run.
    pub n_steps: u64,
    /// Rows of those steps.
    pub n_rows: u64,
    /// Tokens computed.
    pub n_tokens: u64,
    /// Tokens that the prefix cache spared.
    pub n_tokens_cached: u64,
    /// Tokens that a constraint forced, or nearly, and that were drawn in one row with what follows them: each spared a step.
    pub n_tokens_forced: u64,
    /// Pages moved to host memory since the start.
    pub n_swaps_out: u64,
    /// Pages moved back since the start.
    pub n_swaps_in: u64,
    /// Pages whose KV was given up, host memory being full.
    pub n_pages_given_up: u64,
    /// Tokens computed again because their KV had been given up. They are among `n_tokens` and on no account.
    pub n_tokens_again: u64,
    /// What was computed in vain and what was waited for, by cause. Rows of steps that failed are not among `n_rows`.
    pub causes: Causes,
    /// How long the device has computed; time between steps does not count.
    pub device_busy: Duration,
    /// Of those tokens, the ones of prompts, without those that were computed again.
    pub n_tokens_of_prompts: u64,
    /// Runs that had their term of steps, and gave the right to their pages up to who waited.
    pub n_preempted: u64,
    /// Runs that have the pages that they need.
    pub n_runs: usize,
    /// Runs that wait for pages.
    pub n_runs_waiting: usize,
    /// Guesses verified.
    pub n_guesses: u64,
    /// Tokens of those.
    pub n_tokens_guessed: u64,
    /// Of those, the ones that were what was drawn.
    pub n_tokens_guessed_right: u64,
    /// What became of runs, and how large steps were.
    pub runs: RunStats,
}

impl EngineStats {
    /// A guess of so many tokens was verified, of which so many were what was drawn.
    pub(crate) fn note_guessed(&mut self, n_tokens: u64, n_right: u64) {
        // A verification of nothing only draws.
        if n_tokens > 0 {
            self.n_guesses += 1;
            self.n_tokens_guessed += n_tokens;
            self.n_tokens_guessed_right += n_right;
        }
    }
}
