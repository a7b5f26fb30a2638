//! What the guest's side pays by itself for an operation, and the engine does not.

use super::ModelFacts;
use crate::command::{Ask, N_ENTRIES_PER_TOKEN, Operation};

/// What is charged to a caller's account for one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Charges {
    /// Contexts that it makes, until they are released.
    pub(crate) n_contexts: u64,
    /// Tokens that whole rows count as, which are never given back.
    pub(crate) n_tokens: u64,
}

impl Charges {
    /// Those of an operation that was checked.
    pub(crate) fn of(operation: &Operation, facts: &ModelFacts) -> Self {
        let n_entries = match operation {
            Operation::Create { .. } | Operation::Open { .. } | Operation::Fork { .. } => {
                return Self { n_contexts: 1, n_tokens: 0 };
            }
            Operation::Ask { ask: Ask::Full | Ask::Logits, .. } => facts.vocab_size,
            Operation::Ask { ask: Ask::Attention { .. }, edit, .. } => edit.n_kept + edit.appended.len(),
            _ => 0,
        };
        Self { n_contexts: 0, n_tokens: n_entries.div_ceil(N_ENTRIES_PER_TOKEN) as u64 }
    }
}
