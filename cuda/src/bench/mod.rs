//! How fast each kernel is alone, beside what the device can do at most.
//!
//! - Comes in: a model's shape and the steps that are asked about.
//! - Goes out: for each kernel its time, the bytes and operations it has to move and to do; the device's limits,
//!   measured on itself.
//! - Must not happen: a rate that a cache made, so inputs are larger than any; memory that is kept after the
//!   measurement.

mod contexts;
mod limits;
mod ops;
mod products;
mod rows;
mod timer;

pub use limits::DeviceLimits;
pub use ops::{OpSpeed, OpStep, ops};
