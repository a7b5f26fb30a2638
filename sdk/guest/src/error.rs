//! What can go wrong in a guest.

use crate::bindings::trellis::host::types;

/// The result of a call to the host.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// A mistake of the guest, or a limit that it reached. The call that returned it changed nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No model of that name is loaded.
    #[error("{}", unknown_model(.name, .known))]
    UnknownModel {
        /// The name asked for; empty where the default was asked for and there is none.
        name: String,
        /// The names of the loaded models.
        known: Vec<String>,
    },
    /// The model of that name is being unloaded, and makes no new contexts. Once it is loaded again, the same may be asked.
    #[error("the model {name:?} is being unloaded")]
    ModelLeaving {
        /// The name.
        name: String,
        /// The names of the loaded models.
        known: Vec<String>,
    },
    /// A token that the model does not have.
    #[error("token {token} does not exist; the vocabulary has {vocab_size} entries")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// Entries of the vocabulary.
        vocab_size: u32,
    },
    /// The tokens do not fit in the model's context.
    #[error("the context would hold {n_tokens} tokens, and the model's limit is {n_positions}")]
    ContextFull {
        /// Tokens that the context would have to hold.
        n_tokens: u32,
        /// The most that it can hold.
        n_positions: u32,
    },
    /// An argument outside its range.
    #[error("{name} is {value}, expected {expected}")]
    InvalidArgument {
        /// What the argument is called.
        name: String,
        /// Its value.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// A budget of the guest, its session or its user is used up.
    #[error(
        "the budget of {what} is used up: {used} in use, {requested} more asked for, the limit is {limit}"
    )]
    BudgetExceeded {
        /// What ran out.
        what: String,
        /// How much of it is in use.
        used: u64,
        /// How much more was asked for.
        requested: u64,
        /// The limit.
        limit: u64,
    },
    /// Nothing is saved under that name.
    #[error("nothing is saved under the name {name:?}")]
    NotFound {
        /// The name.
        name: String,
    },
    /// Two arguments belong to different models.
    #[error("one argument belongs to the model {left:?}, the other to {right:?}")]
    ModelMismatch {
        /// Model of the first argument.
        left: String,
        /// Model of the second.
        right: String,
    },
    /// The context holds no token yet, so there is nothing to continue.
    #[error("the context is empty; append at least one token first")]
    EmptyContext,
    /// The model has no chat template.
    #[error("the model {model:?} has no chat template")]
    NoChatTemplate {
        /// Name of the model.
        model: String,
    },
    /// The chat template refused the messages.
    #[error("the chat template refused the messages: {reason}")]
    ChatTemplate {
        /// What the template said.
        reason: String,
    },
    /// Mask and bias, a constraint or a program left no token to draw.
    #[error("no token can be drawn: {reason}")]
    NoToken {
        /// What the engine said.
        reason: String,
    },
    /// A grammar is broken, or asks for something that is not supported, or for more than it may.
    #[error("the grammar is refused at {place}: {reason}")]
    GrammarRefused {
        /// Line and column of a text, the JSON pointer of a schema, or the number of a choice.
        place: String,
        /// What is wrong there.
        reason: String,
    },
    /// A token was appended that the grammar to which the context keeps does not have there.
    #[error("the grammar does not have token {token} at position {position}")]
    GrammarLeft {
        /// Of the context.
        position: u32,
        /// What stands there.
        token: u32,
    },
    /// A mask would take more work, or more states, than a grammar may.
    #[error("{reason}")]
    GrammarTooComplex {
        /// What the engine said.
        reason: String,
    },
    /// The model computed something that is not a number where a token was to be drawn or looked at.
    #[error("no token can be drawn or looked at: {reason}")]
    NotANumber {
        /// What the engine said.
        reason: String,
    },
    /// The client went away or the guest was stopped.
    #[error("cancelled")]
    Cancelled,
    /// The device failed under the call. Contexts keep their tokens, and the call may be made again.
    #[error("the engine failed: {reason}")]
    EngineFailed {
        /// What it reported.
        reason: String,
    },
    /// The guest was started with arguments that it does not take (see [`Args`](crate::Args)).
    #[error("{problem}\nusage: {usage}")]
    Usage {
        /// What is wrong.
        problem: String,
        /// The arguments that the guest takes.
        usage: &'static str,
    },
}

impl Error {
    /// Whether the same call may work another time: a step failed or the model is being unloaded, and
    /// nothing was wrong with what was asked.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::EngineFailed { .. } | Self::ModelLeaving { .. })
    }
}

/// A guest that names no model lacks one only where there is none.
fn unknown_model(name: &str, known: &[String]) -> String {
    match (name, known) {
        ("", []) => "no model is loaded".to_owned(),
        (name, []) => format!("no model is called {name:?}; none is loaded"),
        (name, known) => format!("no model is called {name:?}; loaded: {}", known.join(", ")),
    }
}

impl From<types::Error> for Error {
    fn from(error: types::Error) -> Self {
        match error {
            types::Error::UnknownModel(e) => Error::UnknownModel { name: e.name, known: e.known },
            types::Error::ModelLeaving(e) => Error::ModelLeaving { name: e.name, known: e.known },
            types::Error::TokenOutOfRange(e) => {
                Error::TokenOutOfRange { token: e.token, vocab_size: e.vocab_size }
            }
            types::Error::ContextFull(e) => {
                Error::ContextFull { n_tokens: e.n_tokens, n_positions: e.n_positions }
            }
            types::Error::InvalidArgument(e) => {
                Error::InvalidArgument { name: e.name, value: e.value, expected: e.expected }
            }
            types::Error::BudgetExceeded(e) => {
                Error::BudgetExceeded { what: e.what, used: e.used, requested: e.requested, limit: e.limit }
            }
            types::Error::NotFound(name) => Error::NotFound { name },
            types::Error::ModelMismatch(e) => Error::ModelMismatch { left: e.left, right: e.right },
            types::Error::EmptyContext => Error::EmptyContext,
            types::Error::NoChatTemplate(model) => Error::NoChatTemplate { model },
            types::Error::ChatTemplate(reason) => Error::ChatTemplate { reason },
            types::Error::NotANumber(reason) => Error::NotANumber { reason },
            types::Error::GrammarRefused(e) => Error::GrammarRefused { place: e.place, reason: e.reason },
            types::Error::GrammarLeft(e) => Error::GrammarLeft { position: e.position, token: e.token },
            types::Error::GrammarTooComplex(reason) => Error::GrammarTooComplex { reason },
            types::Error::NoToken(reason) => Error::NoToken { reason },
            types::Error::Cancelled => Error::Cancelled,
            types::Error::EngineFailed(reason) => Error::EngineFailed { reason },
        }
    }
}
