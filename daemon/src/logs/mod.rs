//! The daemon's log: where it goes, and what is kept of it for `trellis logs`.
//!
//! - Comes in: what the daemon says through `tracing`, of the levels that `log` lets pass, which may change while the daemon runs.
//! - Goes out: lines of text or of JSON on standard error, or entries of systemd's journal with their fields, as `log_format`
//!   says; and the newest lines from memory (`ring`), to the user who runs the daemon and root.
//! - Must not happen: a wait of who says something for who reads it: lines that nobody has read make room for new ones, and who
//!   comes late hears how many there were. More than `log_bytes` kept. A line of the log for each line that is read.

mod ring;
mod start;

pub(crate) use ring::{Batch, Since};
pub(crate) use start::{SetLog, keep, ring, start};
