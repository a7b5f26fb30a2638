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

impl Isolation {
    /// As the file has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Thread => "thread",
            Self::Process => "process",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_file() {
        for isolation in [Isolation::Thread, Isolation::Process] {
            assert_eq!(serde_json::to_value(isolation).expect("it serialises"), isolation.name());
        }
    }
}
