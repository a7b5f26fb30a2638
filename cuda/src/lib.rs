//! The CUDA backend.
//!
//! The libraries are loaded when the program runs, so that the same binary starts on a machine without a GPU.

mod activations;
mod backend;
mod bench;
pub mod blas;
mod card;
mod device;
mod error;
mod graph;
mod guess;
mod kernels;
mod launch;
mod limits;
mod llama;
mod load;
mod memory;
mod module;
pub mod ops;
pub mod probe;
mod step;
mod steps;
mod swap;
#[cfg(test)]
mod testing;
mod weights;
mod words;

pub use backend::{CudaBackend, CudaOptions, KvSize, LoadError};
pub use bench::{OpSpeed, OpStep, ops as op_speeds};
pub use card::Card;
pub use device::{Event, Gpu, Stream, Timing};
pub use error::CudaError;
pub use launch::{Arg, Launch};
pub use limits::DeviceLimits;
pub use memory::{Buffer, MemoryStats, Pinned, Plain, Slice};
pub use module::{Compiler, Kernel, Module, Source};
