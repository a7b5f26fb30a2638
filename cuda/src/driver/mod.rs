//! The driver: whether there is one, its devices, and work in order on them.
//!
//! - Comes in: a device's number; kernels with what they are launched with.
//! - Goes out: an open device, its streams and events, launches one by one or captured as a graph, and one error for
//!   all that can go wrong at the driver and its libraries.
//! - Must not happen: a panic where a library is missing, so [`probe`] looks before the first call; a context that is
//!   waited for as a whole, since others share it; work that outlives its stream.

mod call;
mod device;
mod error;
#[cfg(test)]
pub(crate) mod faults;
mod graph;
mod launch;
pub mod probe;

pub(crate) use call::check;
pub use device::{Event, Gpu, Stream, Timing, reset};
pub use error::CudaError;
pub(crate) use graph::Graph;
pub use launch::{Launch, Params};
pub(crate) use launch::{N_CLUSTER_BLOCKS, params};
