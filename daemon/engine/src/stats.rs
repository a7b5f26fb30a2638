//! What an engine has done and holds.

/// Counters and gauges of one engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// Tokens computed.
    pub n_tokens: u64,
    /// Tokens that the prefix cache spared.
    pub n_tokens_cached: u64,
    /// Tokens decoded ahead and forgotten.
    pub n_tokens_in_vain: u64,
    /// Pages moved to host memory since the start.
    pub n_swaps_out: u64,
    /// Contexts whose KV was dropped and computed again, host memory being full.
    pub n_recomputed: u64,
}
