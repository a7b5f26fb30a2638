//! Guests in a process of their own, one for each user.
//!
//! - Comes in: guests to start, and what the daemon's engines and clients have for them.
//! - Goes out: guests as the daemon has those of its own process (`processes`), whose host API is the same code on the other
//!   side: there `inside` takes what the daemon says (`message`), to which the threads of guests listen that have none to run
//!   (`listening`), `attend` starts guests and brings them what they are to have, `far_opener` asks for models that are loaded on demand.
//! - On the way: `keeper` is the daemon's side of one process: it knows its guests (`far_guest`), tells it of models and engines
//!   (`announced`), lends it what its guests use together (`budgets`), and passes operations on once the engine's customs have
//!   seen them. What goes out is written at once or waits in `outgoing`, so that no engine waits for a process; in the process
//!   `teller` speaks.
//! - Below that: a [`GuestProcess`] with the two ends of its [`channel`]; how it ended, as a [`ProcessEnd`]. `spawn` starts this executable as a child, `handover` gives it its descriptors and settings, `child` is what it
//!   does first: it [`confine`]s itself, says how far that went, and serves. `complaints` is what it writes to its standard
//!   error. The [`probe`] tries from within whether it gets out. Before there are guests a
//!   `trial` says whether, and how far, a process is confined on this machine. What all of them have in memory is counted `together`.
//! - Must not happen: trust in anything that the child says or writes; a child that handles a frame before it is confined, that
//!   outlives the daemon, or that takes the daemon down with it.

mod announced;
mod attend;
mod budgets;
pub mod channel;
mod child;
mod coming;
mod complaints;
pub mod confine;
mod error;
mod far_guest;
mod far_opener;
mod handover;
mod inside;
mod keeper;
mod listening;
mod look;
mod message;
#[cfg(test)]
mod native;
mod outgoing;
pub mod probe;
mod processes;
mod spawn;
mod teller;
#[cfg(test)]
mod tests;
mod together;
mod trial;

pub use child::{GUEST_WORKER, guest_worker_main};
pub use error::SpawnError;
pub(crate) use inside::live;
pub(crate) use processes::GuestProcesses;
pub use spawn::{GuestProcess, ProcessEnd, ProcessSettings};
