//! Kernels, each beside its launcher, its reference and its test.
//!
//! - Comes in: slices of device memory, the shape that they have, and counts that lie on the device.
//! - Goes out: a launch in the stream.
//! - Must not happen: an access beyond a slice, so launchers assert lengths; a number that launcher and kernel each have
//!   their own of; an allocation; values in local memory, but for the kernels that the tests name.

pub mod attention;
#[cfg(test)]
mod attention_case;
pub mod attention_decode;
pub mod attention_holes;
pub mod attention_plan;
pub mod attention_tiles;
pub mod bias;
mod cascade;
pub mod common;
pub mod edits;
pub mod embedding;
pub mod gather;
pub mod gemv;
pub mod logits;
#[cfg(test)]
mod logits_case;
mod logits_params;
mod logits_sources;
mod logits_stages;
pub mod masses;
pub mod norm;
pub mod pages;
pub mod program;
#[cfg(test)]
mod program_case;
mod program_code;
mod program_encode;
#[cfg(test)]
pub(crate) mod program_library;
pub(crate) mod program_loading;
mod program_passes;
mod program_plain;
pub mod program_plan;
pub mod program_single;
mod program_small;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod program_trial;
pub mod rope;
pub mod sample;
pub mod shares;
pub mod steer;
pub mod stream;
pub mod swiglu;
pub mod topn;
#[cfg(test)]
mod usage;
