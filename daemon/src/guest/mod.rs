//! Guests: wasm components that script decoding.
//!
//! A guest is hostile until proven otherwise. It is compiled in a process of its own ([`GuestHost::compile`]),
//! linked to the host API and to a WASI that reaches nothing, and runs as one task whose every resource is
//! bounded by [`GuestLimits`]. However it ends, its store is dropped with all that it held.

mod beside;
mod bindings;
mod cache;
mod compile;
mod component;
mod cpu;
mod error;
mod flights;
mod guest_models;
mod guests;
mod held;
mod host;
mod inbox;
mod io;
mod limits;
mod log;
mod memory;
mod programs;
mod run;
mod runtime;
mod store;
mod tape;
mod ticker;
mod wasi;
mod worker;

pub(crate) use cache::make_private;
pub use compile::{CompileProgress, ProgramSource};
pub use component::Program;
pub(crate) use component::check_format;
pub use error::{GuestEnd, GuestError};
pub use guests::{
    GuestActivity, GuestEnding, GuestHost, GuestHostConfig, GuestInfo, GuestStop, Launch, RunningGuest,
};
pub use inbox::{
    InboxBudget, InboxBudgetExceeded, InboxCharge, InboxClosed, InboxReceiver, InboxSender, Received, inbox,
};
pub use io::{GuestIo, GuestOutput, LogLevel, OutputClosed, OutputReceiver, OutputSender, output_channel};
pub use limits::GuestLimits;
pub(crate) use tape::{Deed, Difference, Tape, Verdict};
pub use worker::{COMPILE_WORKER, compile_worker_main};
