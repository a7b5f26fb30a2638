//! The CUDA backend.
//!
//! The libraries are loaded when the program runs, so that the same binary starts on a machine without a GPU.

mod backend;
#[cfg(any(test, feature = "fuzzing"))]
mod bare;
mod bench;
pub mod blas;
mod card;
mod compile;
mod driver;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod kept;
mod memory;
mod model;
pub mod ops;
mod step;
#[cfg(test)]
mod testing;

pub use backend::{CudaBackend, CudaOptions, LoadError, Needs};
pub use bench::{DeviceLimits, OpSpeed, OpStep, ops as op_speeds};
pub use card::Card;
pub use compile::{Compiler, Kernel, Module, Source};
pub use driver::{CudaError, Event, Gpu, Launch, Params, Stream, Timing, probe, reset};
pub use memory::{Buffer, MemoryStats, Pinned, Plain, Pointer, Slice};
