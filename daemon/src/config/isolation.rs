//! Where guests run.

use serde::{Deserialize, Serialize};

/// Where guests run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// It follows from whom the daemon serves. A daemon inside a program serves that program.
    #[default]
    Auto,
    /// In threads of the daemon: wasm alone keeps them in. For guests that are trusted.
    Thread,
    /// Those of each user in a process of their own, which has no files, no network and no devices. On Linux.
    Process,
}

/// Whom a daemon serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// The user who runs it alone.
    Own,
    /// Others too, or it is root's.
    Others,
}

impl Isolation {
    /// As the file has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Thread => "thread",
            Self::Process => "process",
        }
    }

    /// The same, decided for a daemon that serves these.
    pub(crate) fn of(self, served: Served) -> Self {
        match (self, served) {
            (Self::Auto, Served::Own) => Self::Thread,
            (Self::Auto, Served::Others) => Self::Process,
            (told, _) => told,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_file() {
        for isolation in [Isolation::Auto, Isolation::Thread, Isolation::Process] {
            assert_eq!(serde_json::to_value(isolation).expect("it serialises"), isolation.name());
        }
    }

    #[test]
    fn guests_of_others_have_processes_unless_the_file_says_otherwise() {
        let default = Isolation::default();
        assert_eq!(
            (default.of(Served::Own), default.of(Served::Others)),
            (Isolation::Thread, Isolation::Process)
        );
        for told in [Isolation::Thread, Isolation::Process] {
            assert_eq!((told.of(Served::Own), told.of(Served::Others)), (told, told));
        }
    }
}
