//! The embedded sources, compiled when the program runs.
//!
//! - Comes in: a source that is part of the binary, and the device's architecture.
//! - Goes out: a cubin, from this process, from the disk or from NVRTC; loaded, a module and its kernels.
//! - Must not happen: a file of the user becomes a kernel; a cubin that is not whole reaches the driver; a cache that
//!   cannot be written stops a start.

mod compiler;
#[cfg(test)]
mod cubin;
mod deferred;
mod module;
mod store;

pub use compiler::{Compiler, Source};
#[cfg(test)]
pub(crate) use cubin::usage;
pub(crate) use deferred::Deferred;
pub use module::{Kernel, Module};
