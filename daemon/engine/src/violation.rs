//! What no guest of ours asks.

use serde::{Deserialize, Serialize};

use crate::error::EngineError;
use crate::sampling::SamplerError;
use crate::steering::SteeringError;

/// An operation that the guest side of this crate never posts: a process that sends it runs other code. It is not carried
/// out.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum Violation {
    /// An operation of a caller that was not opened for the process.
    #[error("an operation of caller {caller}, which has not entered")]
    Stranger {
        /// The caller.
        caller: u64,
    },
    /// More callers than the guests of a process come to.
    #[error("more than {limit} callers")]
    TooManyCallers {
        /// How many there may be.
        limit: usize,
    },
    /// An operation that names another caller than the one that sends it.
    #[error("an operation of caller {from} in the name of caller {named}")]
    InAnothersName {
        /// Who sends it.
        from: u64,
        /// Who is named.
        named: u64,
    },
    /// What only the daemon asks.
    #[error("an operation that no guest may ask for")]
    NotForGuests,
    /// A model that the process was never told of.
    #[error("a model at place {place} of generation {generation}, which the process does not know")]
    NoSuchModel {
        /// Its place.
        place: u16,
        /// Its generation.
        generation: u32,
    },
    /// A context of a caller that does not have it.
    #[error("context {number}, which is not the caller's")]
    NotItsOwn {
        /// The context's number.
        number: u64,
    },
    /// A new context whose number the process may not use, or has used, or is far from using.
    #[error("a new context of number {number}: {expected}")]
    Number {
        /// The number.
        number: u64,
        /// What it has to be.
        #[serde(with = "crate::port::names")]
        expected: crate::port::Name,
    },
    /// Contexts of several models in one operation.
    #[error("contexts of several models in one operation")]
    SeveralModels,
    /// A context twice in one operation.
    #[error("context {number} twice in one operation")]
    Twice {
        /// The context's number.
        number: u64,
    },
    /// More, or fewer, of something than there may be.
    #[error("{n} {what}: {expected}")]
    Count {
        /// Of what.
        #[serde(with = "crate::port::names")]
        what: crate::port::Name,
        /// How many.
        n: usize,
        /// How many there may be.
        expected: String,
    },
    /// A number that is not one that may stand there.
    #[error("{what} does not fit the rest of the operation")]
    Malformed {
        /// What.
        #[serde(with = "crate::port::names")]
        what: crate::port::Name,
    },
    /// A row that is kept already, under the same name.
    #[error("a row is asked to be kept under a name that is taken")]
    RowTwice,
    /// A row of logits over another vocabulary.
    #[error("a row over {n_tokens} tokens for a draw over {vocab_size}")]
    RowOfAnother {
        /// Entries of the row.
        n_tokens: usize,
        /// Entries of the drawing model's vocabulary.
        vocab_size: usize,
    },
    /// A context that is there already.
    #[error("context {number} is there already")]
    Exists {
        /// The context's number.
        number: u64,
    },
    /// More tokens are to be kept than there are.
    #[error("{n_kept} tokens are to be kept: the context has {n_tokens}")]
    KeepsMore {
        /// To be kept.
        n_kept: usize,
        /// Those that are there.
        n_tokens: usize,
    },
    /// Tokens that are saved with a context that has others.
    #[error("a context is saved with tokens that are not its own")]
    OtherTokens,
    /// What the guest's side refuses by itself.
    #[error("its own side refuses this: {0}")]
    Refused(#[from] EngineError),
}

impl From<SamplerError> for Violation {
    fn from(error: SamplerError) -> Self {
        Self::Refused(error.into())
    }
}

impl From<SteeringError> for Violation {
    fn from(error: SteeringError) -> Self {
        Self::Refused(error.into())
    }
}
