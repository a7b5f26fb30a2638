use serde::{Deserialize, Serialize};

/// Which lines of the daemon's log are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogsAsked {
    /// From the line of this number on; the newest when absent. A daemon counts its lines from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    /// How many of the newest; all that are kept when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_newest: Option<u64>,
    /// Whether to wait until there is a line of that number.
    pub waits: bool,
}

/// Lines of the daemon's log that follow each other. There may be more behind them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogLines {
    /// The oldest first.
    pub lines: Vec<String>,
    /// The number of the line behind them.
    pub next: u64,
    /// The number of the line behind all that there are at this moment.
    pub end: u64,
    /// Lines that were asked for by their numbers, and that the daemon does not keep any more.
    pub n_missed: u64,
}
