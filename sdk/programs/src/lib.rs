//! Logit programs: how a token is chosen from a row of logits, as data.
//!
//! A program is a straight-line list of operations, without loops, addresses or code, so that a stranger may send one.
//! Each operation makes one value of one of four kinds: a *row* (one number for each token of the vocabulary), a *set*
//! (one bit for each), a *number*, a *token*. Later operations name it by its place in the list. This crate holds what a
//! program is, a [`Builder`] with which it reads like its formula, and a [`library`] of the samplers that have names.
//!
//! ```
//! use trellis_programs::{Definition, Source};
//!
//! // Locally typical sampling at temperature 0.8.
//! let program = Definition::build(|b| {
//!     let x = b.logits() / 0.8;
//!     let logprobs = x.log_softmax();
//!     let surprise = (logprobs + x.entropy()).abs();
//!     let kept = logprobs.nucleus_by(-surprise, 0.9);
//!     x.keep(kept).draw(Source::SEED)
//! });
//! assert!(program.operations.len() <= 14);
//! ```
//!
//! # Values
//!
//! Numbers are f32. They are never NaN: where IEEE 754 gives NaN a row has −∞ and a number 0; what is above the largest
//! number is the largest. −∞ in a row that is drawn from means that the token is not to be drawn.

mod arithmetic;
mod builder;
mod definition;
pub mod library;
mod operation;
mod philox;
#[cfg(feature = "random")]
pub mod random;

pub use builder::{Builder, Number, Operand, Row, Scalar, Set, State, Token};
pub use definition::{Definition, End};
pub use operation::{
    BiasId, Binary, Comparison, Kind, MaskId, Noise, Operation, Reduction, Source, Unary, Value,
};
pub use philox::philox4x32;
