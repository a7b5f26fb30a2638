//! The CUDA backend.
//!
//! The libraries are loaded when the program runs, so that the same binary starts on a machine without a GPU.

pub mod blas;
mod device;
mod error;
mod launch;
mod memory;
mod module;
pub mod ops;
#[cfg(test)]
mod testing;

pub use device::{Gpu, Stream};
pub use error::CudaError;
pub use launch::{Arg, Launch};
pub use memory::{Buffer, Pinned, Plain, Slice};
pub use module::{Compiler, Kernel, Module, Source};
