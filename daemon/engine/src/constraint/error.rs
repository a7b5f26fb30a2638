//! Why a grammar is refused, or does not go on.

use serde::{Deserialize, Serialize};

use crate::account::BudgetExceeded;
use crate::batch::Token;

/// What is wrong with a grammar, or with tokens that were to keep to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ConstraintError {
    /// The grammar is broken, asks for something that there is not, or is larger than its limits allow.
    #[error("the grammar is refused at {place}: {reason}")]
    Refused {
        /// Line and column of a text, the JSON pointer of a schema, or the number of a choice.
        place: String,
        /// What is wrong there.
        reason: String,
    },
    /// The text of the grammar is too long.
    #[error("a grammar of {n_bytes} bytes: at most {n_bytes_max} are taken")]
    TooLong {
        /// Its bytes.
        n_bytes: usize,
        /// The most.
        n_bytes_max: usize,
    },
    /// The vocabulary is larger than tries are built for.
    #[error("a vocabulary of {n_bytes} bytes: grammars work over at most {n_bytes_max}")]
    Vocabulary {
        /// Bytes of all tokens.
        n_bytes: usize,
        /// The most.
        n_bytes_max: usize,
    },
    /// Tokens were appended that the grammar does not have at their place.
    #[error("the grammar does not have token {token} at position {position}")]
    Left {
        /// Of the context.
        position: usize,
        /// What stands there.
        token: Token,
    },
    /// A mask takes more work, or more states, than the limits allow, or a parse more items.
    #[error("the grammar takes more at this place than its limits allow: {reason}")]
    TooComplex {
        /// What ran out.
        reason: String,
    },
    /// The guest has no host memory left for it.
    #[error(transparent)]
    Budget(#[from] BudgetExceeded),
}
