//! What can go wrong with the operator's policy.

use std::io;
use std::path::PathBuf;

use trellis_engine::sampling::OperatorError;

use crate::guest::error::GuestError;

/// A policy that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the policy {}: {why}", path.display())]
pub struct PolicyError {
    /// Its file.
    pub path: PathBuf,
    /// Why.
    pub why: PolicyFailure,
}

/// Why a policy does not do what it should.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyFailure {
    /// Its file cannot be read.
    #[error("{source}")]
    Unread {
        /// Why.
        source: io::Error,
    },
    /// It is no component of the world `policy`, or cannot be compiled.
    #[error("{source}")]
    Component {
        /// What is wrong with it.
        source: GuestError,
    },
    /// It gave an error.
    #[error("its `{call}` failed: {reason}")]
    Said {
        /// The function.
        call: &'static str,
        /// Its words.
        reason: String,
    },
    /// It trapped.
    #[error("its `{call}` trapped: {reason}")]
    Trapped {
        /// The function.
        call: &'static str,
        /// How.
        reason: String,
    },
    /// A call took too long.
    #[error("its `{call}` took longer than the limit of {limit_ms} ms")]
    TooSlow {
        /// The function.
        call: &'static str,
        /// The most.
        limit_ms: u64,
    },
    /// It wants more memory than it may have.
    #[error("its `{call}` wanted {needed_bytes} bytes of memory, more than the limit of {limit_bytes}")]
    Memory {
        /// The function.
        call: &'static str,
        /// What it would have come to.
        needed_bytes: u64,
        /// The most.
        limit_bytes: u64,
    },
    /// Its instance, or what it lets pass, is too much for a budget of the guest's session or user.
    #[error("its `{call}` needs memory of the guest's user: {exceeded}")]
    OverBudget {
        /// The function.
        call: &'static str,
        /// The budget.
        exceeded: trellis_engine::account::BudgetExceeded,
    },
    /// It gave more than it may.
    #[error("its `{call}` gave more than {limit_bytes} bytes")]
    TooLarge {
        /// The function.
        call: &'static str,
        /// The most.
        limit_bytes: u64,
    },
    /// It put something else in the place of a text of JSON, or an error where none is.
    #[error("its `{call}` gave {what}")]
    WrongKind {
        /// The function.
        call: &'static str,
        /// What it should not have given.
        what: &'static str,
    },
    /// It failed before, for this guest.
    #[error("it has failed before: {first}")]
    Spent {
        /// What others than the operator are told of the first failure: whoever comes to a failed policy first is not always
        /// whom it failed.
        first: String,
    },
    /// What it puts in front of samplers may not stand there.
    #[error("its `put-in-front`: {0}")]
    Front(#[from] OperatorError),
    /// The same, for one model.
    #[error("for model {model:?}, {why}")]
    OfModel {
        /// The model.
        model: String,
        /// Why.
        why: Box<Self>,
    },
}

impl PolicyFailure {
    /// What others than the operator are told: not the policy's own words, in which may be what it keeps back.
    pub(crate) fn told(&self) -> String {
        match self {
            Self::Said { call, .. } => format!("its `{call}` failed"),
            Self::Trapped { call, .. } => format!("its `{call}` trapped"),
            Self::OfModel { why, .. } => why.told(),
            Self::Spent { first } => first.clone(),
            other => other.to_string(),
        }
    }

    /// The same, said of a model.
    pub(super) fn of_model(self, model: &str) -> Self {
        Self::OfModel { model: model.to_owned(), why: Box::new(self) }
    }
}
