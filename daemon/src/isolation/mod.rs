//! Guests in a process of their own, one for each user.
//!
//! - Comes in: frames of bytes between the daemon and the guests' process, whose meaning is that of who sends them.
//! - Goes out: a [`channel`], which carries frames over shared memory; how a process [`confine`]s itself.
//! - Must not happen: trust in anything that the guests' process says or writes.

pub mod channel;
pub mod confine;
