//! Sessions: one client connection each, with any number of requests under way.
//!
//! One task serves a connection. It reads the client's messages, drives its requests and writes what they have to
//! say, so that an event of a guest reaches the socket without another task in between, and events that are ready
//! together leave in one write. The [`Service`] behind it runs in tasks of its own. So do guests that were started detached
//! (`detached`), and go on without their connection.

mod actor;
mod call;
mod connection;
mod control;
mod detached;
mod ends_by;
mod intake;
mod limits;
mod memory;
mod metrics;
mod service;
mod sessions;
mod start;
mod turns;
mod upload;
mod uploads;
mod used;

#[cfg(test)]
pub(crate) mod tests;

pub use actor::Actor;
pub(crate) use actor::{Quota, QuotaPermit};
pub(crate) use ends_by::EndsBy;
pub use limits::SessionLimits;
pub use service::{
    GuestEnd, LoadRequest, Progress, ProgressSink, RunningGuest, Service, StartRequest, StopHandle,
    StopReason,
};
pub(crate) use sessions::last_words;
pub use sessions::{SessionError, Sessions};
pub(crate) use start::events;
pub use used::{SessionsUsed, Used};
