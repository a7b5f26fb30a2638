//! What is answered, one JSON text each.

use serde::Serialize;
use trellis_guest::{Error, Result, emit_json};

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply<'a> {
    /// The request is in order, and its prompt is so long.
    Begun { model: &'a str, prompt_tokens: u32 },
    /// What was thought before a choice.
    Thought { choice: usize, text: &'a str },
    /// The next text of a choice, with its tokens where they were asked for.
    Piece {
        choice: usize,
        text: &'a str,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tokens: Vec<Token>,
    },
    /// A call of a tool; `arguments` is JSON.
    Call { choice: usize, name: &'a str, arguments: &'a str },
    /// A choice has come to its end.
    Finished {
        choice: usize,
        reason: Reason,
        /// The stop text that it met.
        #[serde(skip_serializing_if = "Option::is_none")]
        stop: Option<&'a str>,
    },
    /// The hidden state of an input, `[hidden_size]`, of length 1.
    Embedding { index: usize, vector: Vec<f32> },
    /// All is said.
    Ended(Usage),
    /// It is not done.
    Refused(Refusal),
}

/// Why a choice ended.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reason {
    Stop,
    Length,
    Calls,
}

/// A token of a choice.
#[derive(Clone, Serialize)]
pub(crate) struct Token {
    pub(crate) id: u32,
    pub(crate) bytes: Vec<u8>,
    /// In nats.
    pub(crate) logprob: f32,
    /// What else it could have been, the most probable first.
    pub(crate) top: Vec<Other>,
}

#[derive(Clone, Serialize)]
pub(crate) struct Other {
    pub(crate) id: u32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) logprob: f32,
}

/// What it took, in tokens.
#[derive(Default, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    /// Those of the prompt that were not computed.
    pub(crate) cached_tokens: u32,
    /// Of all choices, thoughts included.
    pub(crate) completion_tokens: u32,
    pub(crate) reasoning_tokens: u32,
}

/// Why it is not done.
#[derive(Serialize)]
pub(crate) struct Refusal {
    pub(crate) kind: Kind,
    /// The part of the request that it is about.
    pub(crate) param: Option<String>,
    pub(crate) message: String,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Invalid,
    ContextFull,
    NotFound,
    UnknownModel,
    Budget,
    /// Nothing is wrong with the request.
    Retry,
    /// A mistake of the guest or of the daemon.
    Internal,
}

impl Reply<'_> {
    pub(crate) fn send(&self) -> Result {
        emit_json(self)
    }
}

impl Refusal {
    pub(crate) fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self { kind: Kind::Invalid, param: Some(param.to_owned()), message: message.into() }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let (kind, param) = match &error {
            Error::InvalidArgument { name, .. } => (Kind::Invalid, Some(name.replace('-', "_"))),
            Error::ContextFull { .. } => (Kind::ContextFull, Some("messages".to_owned())),
            Error::TokenOutOfRange { .. } => (Kind::Invalid, Some("logit_bias".to_owned())),
            Error::NoChatTemplate { .. } | Error::ChatTemplate { .. } => {
                (Kind::Invalid, Some("messages".to_owned()))
            }
            Error::NotFound { .. } => (Kind::NotFound, Some("previous".to_owned())),
            Error::UnknownModel { .. } => (Kind::UnknownModel, Some("model".to_owned())),
            Error::BudgetExceeded { what, .. } => (Kind::Budget, Some(what.clone())),
            Error::GrammarRefused { .. } | Error::GrammarTooComplex { .. } => {
                (Kind::Invalid, Some("format".to_owned()))
            }
            error if error.is_retryable() => (Kind::Retry, None),
            _ => (Kind::Internal, None),
        };
        Self { kind, param, message: error.to_string() }
    }
}

/// Says which part of a request an error of the host is about.
pub(crate) trait About<T> {
    fn about(self, param: &str) -> Result<T, Refusal>;
}

impl<T> About<T> for Result<T> {
    fn about(self, param: &str) -> Result<T, Refusal> {
        self.map_err(|error| {
            let refusal = Refusal::from(error);
            match refusal.kind {
                Kind::Invalid => Refusal { param: Some(param.to_owned()), ..refusal },
                _ => refusal,
            }
        })
    }
}
