//! Guests: wasm components that script decoding.
//!
//! A guest is hostile until proven otherwise. It is compiled in a process of its own ([`GuestHost::compile`]),
//! linked to the host API and to a WASI that reaches nothing, and runs as one task whose every resource is
//! bounded by [`GuestLimits`]. However it ends, its store is dropped with all that it held.
//!
//! - Comes in: the bytes of a component; a [`Launch`], which says what to run, for which user, on which account; messages of
//!   the client (`inbox`).
//! - Goes out: a [`RunningGuest`]; what the guest sends, under the credit of its client (`io`); how it ended, as a [`GuestEnd`];
//!   its recording, if one is wanted (`tape`).
//! - On the way: `compile` and, in a process of its own, `worker` make code of a component, `workers` asks such processes, `cache` and `programs` keep it on disk and in memory,
//!   `flights` sees to it that each component is compiled and loaded once at a time and that users are served fairly;
//!   `component` checks and links it, `run` lives one guest's life in its `store`, `host` answers its calls. `held` and
//!   `guest_models` know which models it holds and what it sees when one is lost; `threads` are
//!   what guests run on, `beside` has others for long work, with `rooms` for the texts in it; `policy` is the operator's, between a guest and its client.
//!   `drain` tells guests that the daemon is on its way out.
//! - Bounds: `memory` over all instances of the guest, `cpu` and `ticker` for processor time, `log` and `io` for output, the
//!   account for everything that the engine and the host keep for it; `amounts` says what it uses of them, to lists and the log.
//! - Must not happen: guest code in the daemon before it went through the compiling process; code from anywhere but the
//!   daemon's own folder; a file, a socket, an environment or a precise clock within a guest's reach; a store that is used
//!   again after a trap; a guest that holds up another or the threads of the sessions; a panic of the host API that ends more
//!   than the guest that called.

mod amounts;
mod beside;
mod bindings;
mod cache;
mod code_key;
mod compile;
mod component;
mod cpu;
mod deadline;
mod drain;
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
mod names;
#[cfg(not(target_os = "linux"))]
mod no_processes;
mod policy;
mod pool;
mod profile;
mod programs;
mod rooms;
mod run;
mod runtime;
mod store;
mod tape;
mod threads;
mod ticker;
mod trials;
mod wasi;
mod worker;
mod workers;
mod world;

pub use crate::on_demand::LoadListener;
pub use amounts::Amounts;
pub(crate) use cache::{check_private, make_private};
pub use code_key::BroughtBy;
pub use compile::{CompileProgress, ProgramSource};
pub use component::{About, Program};
pub(crate) use component::{N_COPIES_OF_CODE, check_format};
pub use error::{GuestEnd, GuestError};
pub(crate) use guest_models::GuestModels;
pub use guests::{GuestHost, GuestHostConfig};
pub use inbox::{InboxClosed, InboxReceiver, InboxSender, Received, inbox, message_charge};
pub(crate) use io::{Creditor, Sink, output_to};
pub use io::{GuestIo, GuestOutput, LogLevel, OutputReceiver, OutputRefused, OutputSender, output_channel};
pub use limits::GuestLimits;
pub(crate) use limits::{COMPILE_BYTES_LEAST, OWN_BYTES, ProcessBytes};
pub(crate) use names::{REASON_BYTES_MAX, cut, list as listed_names, name as shown_name};
pub(crate) use policy::{Closed, Gate, Passage, PolicedGuest, Ruling};
pub use policy::{Policy, PolicyError, PolicyFailure, PolicySettings};
pub(crate) use pool::{GUEST_BYTES, GuestPool};
pub use pool::{GuestActivity, GuestEnding, GuestInfo, GuestStop, Launch, RunningGuest, Used};
#[cfg(test)]
pub(crate) use runtime::pool_bytes;
pub(crate) use tape::{Deed, Difference, Tape, Verdict};
pub(crate) use threads::{Lookout, NICENESS, give_way};
pub use worker::{COMPILE_WORKER, TRIAL_WORKER, compile_worker_main, trial_worker_main};
pub(crate) use world::World;
