//! What can go wrong between a caller and the engine.

use crate::account::BudgetExceeded;
use crate::backend::BackendError;
use crate::batch::{OutputFault, Token};
use crate::sampling::SamplerError;

/// Why the engine did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// A token that the model does not have.
    #[error("token {token} is out of range: the vocabulary has {vocab_size} entries")]
    TokenOutOfRange {
        /// The token.
        token: Token,
        /// Entries of the vocabulary.
        vocab_size: usize,
    },
    /// The tokens do not fit in the context.
    #[error("{n_tokens} tokens do not fit: the context holds {n_positions}")]
    ContextFull {
        /// Tokens that the context would have to hold.
        n_tokens: usize,
        /// The most it can.
        n_positions: usize,
    },
    /// A length past the end.
    #[error("cannot keep {n_tokens} tokens of a context of {length}")]
    TooLong {
        /// Tokens to keep.
        n_tokens: usize,
        /// Tokens there are.
        length: usize,
    },
    /// There is no token to look at.
    #[error("the context is empty: append a token first")]
    EmptyContext,
    /// A budget is used up.
    #[error(transparent)]
    Budget(#[from] BudgetExceeded),
    /// One context alone needs more pages than the device has.
    #[error("{n_needed} KV pages needed, the device has {n_pages}")]
    NoPages {
        /// Pages needed.
        n_needed: usize,
        /// Pages of the device.
        n_pages: usize,
    },
    /// A sampler setting out of range.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// One output could not be had.
    #[error(transparent)]
    Output(#[from] OutputFault),
    /// Nothing is saved under the name.
    #[error("nothing is saved under the name {name:?}")]
    NotSaved {
        /// The name.
        name: String,
    },
    /// The device failed; the engine has stopped.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}
