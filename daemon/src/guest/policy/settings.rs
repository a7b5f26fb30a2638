//! The section `[policy]` of the configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

/// The operator's policy, and what each instance of it may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct PolicySettings {
    /// The file of the component; there is no policy when absent.
    pub component: Option<PathBuf>,
    /// Whether guests may be recorded and profiled. What a guest sends is in its recording as it was before the policy saw it.
    pub allows_recordings: bool,
    /// Bytes of linear memory of one instance; there is one for each guest, which its session pays for.
    pub memory_bytes: usize,
    /// Processor time of one call of the policy about a guest. Ten times as much by the clock ends the call as well.
    pub call_ms: u64,
    /// Processor time of beginning an instance, and of what it says for a model that is loaded. Ten times as much by the clock
    /// ends it as well.
    pub load_ms: u64,
    /// Bytes that the policy passes to the daemon in one call: what it puts in the place of an output, or in front of samplers.
    pub reply_bytes: usize,
    /// Bytes of lines that one instance writes to the daemon's log; what comes after is dropped and counted.
    pub log_bytes: u64,
    /// What the policy is told when an instance of it begins: texts by names.
    pub settings: BTreeMap<String, String>,
}

impl Default for PolicySettings {
    fn default() -> Self {
        Self {
            component: None,
            allows_recordings: false,
            memory_bytes: 64 << 20,
            call_ms: 100,
            load_ms: 10_000,
            reply_bytes: 4 << 20,
            log_bytes: 64 << 10,
            settings: BTreeMap::new(),
        }
    }
}
