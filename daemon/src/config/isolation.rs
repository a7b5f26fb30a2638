//! Where guests run.

use serde::{Deserialize, Serialize};

/// Where guests run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// In threads of the daemon: wasm alone keeps them in. For guests that are trusted.
    #[default]
    Thread,
    /// Those of each user in a process of their own, which has no files, no network and no devices. On Linux.
    Process,
}
