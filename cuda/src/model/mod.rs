//! The decoders of the Llama family on a card.
//!
//! - Comes in: a checkpoint and its configuration; then the tokens of a step with their positions, pages and contexts,
//!   in device memory.
//! - Goes out: keys and values in their pages, logits of the rows that were asked for.
//! - Must not happen: an allocation or a wait for the device while a step is put into the stream; weights twice in
//!   memory.

mod activations;
mod kernels;
mod layer;
mod llama;
pub(crate) mod load;
pub(crate) mod weights;

pub(crate) use activations::{ActivationSizes, Activations};
pub(crate) use kernels::Kernels;
pub(crate) use llama::{LayerInputs, Llama, LogitsOf, LogitsRows, StepMasses};
pub(crate) use weights::Weights;
