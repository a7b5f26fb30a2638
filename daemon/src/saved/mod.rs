//! Saved contexts on disk, so that they outlive the daemon.
//!
//! - Comes in: what engines say was saved, forgotten, or is opened and not there (`keeper`, the [`Archive`](trellis_engine::Archive)
//!   of each model).
//! - Goes out: files, one for each user, model and name, in a folder that only the daemon's user can touch (`store`), whole or
//!   not at all; and contexts, as far as the files are whole and of the model that is loaded (`file`).
//! - Must not happen: an engine's thread that waits for a disk; KV of one model taken for that of another; what one user has
//!   saved in the hands of another.

mod file;
mod keeper;
mod store;
#[cfg(test)]
mod tests;

pub(crate) use keeper::Keepers;
pub(crate) use store::{Store, StoreLimits};
