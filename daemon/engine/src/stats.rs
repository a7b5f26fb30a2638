//! What an engine has done and holds for a model.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::causes::Causes;
use crate::run_times::RunTimes;

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
    /// How long runs took to their first token, and from one to the next.
    pub run_times: RunTimes,
}
