use serde::{Deserialize, Serialize};

/// A limit of the daemon, where its number comes from, and how much of it is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitInfo {
    /// Its name, as the daemon's configuration has it: `limits.cpu_ms`, `budgets.user.n_pages`.
    pub name: String,
    /// What it bounds.
    pub about: String,
    /// What its numbers count: `bytes`, `ms`, or `count` for things.
    pub unit: String,
    /// Each of what has it: a `guest`, a `session`, a `user`, the `daemon`.
    pub scope: String,
    /// The most, of which 2^63 − 1 is none; absent where the machine decides and nothing was decided yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<u64>,
    /// Where the value is from: `default`, the `file` of the configuration, the `machine`, or the `program` that started the
    /// daemon inside itself.
    pub source: String,
    /// What the user that asks has in use; absent where that is not counted, or is a guest's or a session's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// What all users have in use together; only for who has the permission `see_others`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_by_all: Option<u64>,
}

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
