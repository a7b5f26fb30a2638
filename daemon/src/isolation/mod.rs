//! Guests in a process of their own, one for each user.
//!
//! - Comes in: [`ProcessSettings`], and frames of bytes, whose meaning is that of who sends them.
//! - Goes out: a [`GuestProcess`] with the two ends of its [`channel`]; how it ended, as a [`ProcessEnd`].
//! - On the way: `spawn` starts this executable as a child, `handover` gives it its descriptors and settings, `child` is what it
//!   does first: it [`confine`]s itself, says how far that went, and serves. `complaints` is what it writes to its standard
//!   error. The [`probe`] tries from within whether it gets out.
//! - Must not happen: trust in anything that the child says or writes; a child that handles a frame before it is confined, that
//!   outlives the daemon, or that takes the daemon down with it.

pub mod channel;
mod child;
mod complaints;
pub mod confine;
mod error;
mod handover;
pub mod probe;
mod spawn;
mod spawner;
#[cfg(test)]
mod tests;

pub use child::{GUEST_WORKER, guest_worker_main};
pub use error::SpawnError;
pub use spawn::{GuestProcess, ProcessEnd, ProcessSettings};
