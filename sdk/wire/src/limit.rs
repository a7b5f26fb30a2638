use serde::{Deserialize, Serialize};

/// Amounts of what a guest is bounded in, by the names of their limits: what it uses, or what it may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestAmounts {
    /// Bytes of linear memory.
    pub memory_bytes: u64,
    /// Milliseconds of processor time.
    pub cpu_ms: u64,
    /// KV pages that its contexts hold.
    pub n_pages: u64,
    /// Open contexts.
    pub n_contexts: u64,
    /// Tokens computed for it.
    pub n_tokens: u64,
    /// Bytes of host memory for token lists, masks and grammars.
    pub host_bytes: u64,
}
