//! The local socket: where it is, which users may use it, and the loop that accepts connections.

mod accepted;
mod complaints;
mod hand_over;
mod listener;
mod lock;
mod looks;
mod places;
mod rate;
mod serve;

#[cfg(test)]
mod tests;

pub use accepted::{Accepted, Peer};
pub use hand_over::HandOver;
pub(crate) use listener::HandedSocket;
pub use listener::{BindError, Listener};
pub use lock::StartNote;
pub(crate) use lock::{Lock, LockError};
pub(crate) use places::{Place, Places};
pub use serve::run;
pub use trellis_client::lock::{Owner, Phase, owner_of};
