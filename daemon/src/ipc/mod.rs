//! The local socket: where it is, which users may use it, and the loop that accepts connections.

mod complaints;
mod listener;
mod lock;
mod places;
mod serve;

#[cfg(test)]
mod tests;

pub use listener::{BindError, Listener, Peer};
pub use serve::run;
