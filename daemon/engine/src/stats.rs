//! What an engine has done and holds for a model.

use std::time::Duration;

use serde::{Deserialize, Serialize};

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
    /// Steps run.
    pub n_steps: u64,
    /// Rows of those steps.
    pub n_rows: u64,
    /// Tokens computed.
    pub n_tokens: u64,
    /// Tokens that the prefix cache spared.
    pub n_tokens_cached: u64,
    /// Rows planned before it was known that their work would end, and computed in vain.
    pub n_rows_in_vain: u64,
    /// Rows that drew nothing because their masks had not come.
    pub n_rows_sat_out: u64,
    /// Tokens that were drawn in one row with others because they were expected, and the step of each was spared.
    pub n_tokens_expected: u64,
    /// Tokens decoded ahead and forgotten.
    pub n_tokens_in_vain: u64,
    /// Pages moved to host memory since the start.
    pub n_swaps_out: u64,
    /// Pages moved back since the start.
    pub n_swaps_in: u64,
    /// Pages whose KV was given up, host memory being full.
    pub n_pages_given_up: u64,
    /// Tokens computed again because their KV had been given up. They are among `n_tokens` and on nobody's account.
    pub n_tokens_again: u64,
    /// Steps of the device, those of other models included, that went by while a context could decode and had no row,
    /// summed over contexts.
    pub n_steps_waited_to_decode: u64,
    /// As above, while a context had a prompt to compute: steps had no room for it within their length.
    pub n_steps_waited_with_prompt: u64,
    /// As above, while a context stood in line for pages.
    pub n_steps_waited_for_pages: u64,
    /// How long the device has computed; time between steps does not count.
    pub device_busy: Duration,
}
