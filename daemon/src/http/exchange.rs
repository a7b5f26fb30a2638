//! What the guest is asked, and what it replies: the form is that of `guest-examples/http-chat`, JSON both ways.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What a guest is asked.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    Chat(Chat),
    /// How many tokens it is, and no answer.
    Count(Chat),
    Complete(Complete),
    Embed {
        inputs: Vec<Prompt>,
    },
    Forget(String),
}

/// A conversation to be answered.
#[derive(Debug, Default, Serialize)]
pub(super) struct Chat {
    pub(super) messages: Vec<Message>,
    pub(super) tools: Vec<Tool>,
    pub(super) tool_choice: ToolChoice,
    pub(super) format: Format,
    /// The most tokens of thought before the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) thinking_budget: Option<u32>,
    /// The name of the saved conversation that the messages go on with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) previous: Option<String>,
    /// The name under which it is saved, with the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) save: Option<String>,
    pub(super) settings: Settings,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub(super) role: &'static str,
    pub(super) content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) calls: Vec<Call>,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Call {
    pub(super) name: String,
    pub(super) arguments: Value,
}

#[derive(Debug, Serialize)]
pub(super) struct Tool {
    pub(super) name: String,
    pub(super) description: String,
    /// The JSON schema of its arguments, with its keys in the order in which they came.
    pub(super) parameters: Option<Value>,
    pub(super) strict: bool,
}

#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToolChoice {
    #[default]
    Auto,
    None,
    Required,
    Named(String),
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Format {
    #[default]
    Text,
    JsonObject,
    JsonSchema(Value),
}

/// Texts to be gone on with.
#[derive(Debug, Serialize)]
pub(super) struct Complete {
    pub(super) prompts: Vec<Prompt>,
    pub(super) echo: bool,
    pub(super) settings: Settings,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// How tokens are drawn, and when that ends. What is not said is the guest's to decide.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) n: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) stop: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) top_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) top_k: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) min_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) frequency_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) presence_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) repetition_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) logit_bias: Vec<(u32, f32)>,
    /// How many of the most probable tokens come with each token; none for no log-probabilities at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) logprobs: Option<u32>,
}

/// What a guest replies.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// The request is in order.
    Begun { model: String, prompt_tokens: u32 },
    /// What was thought before a choice.
    Thought { choice: usize, text: String },
    /// The next text of a choice.
    Piece {
        choice: usize,
        text: String,
        #[serde(default)]
        tokens: Vec<Token>,
    },
    /// A call of a tool; `arguments` is JSON.
    Call { choice: usize, name: String, arguments: String },
    /// A choice is over.
    Finished {
        choice: usize,
        reason: Reason,
        /// The stop text that it met.
        #[serde(default)]
        stop: Option<String>,
    },
    /// The vector of an input.
    Embedding { index: usize, vector: Vec<f32> },
    /// All is said.
    Ended(Usage),
    /// It is not done.
    Refused(Refusal),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reason {
    Stop,
    Length,
    Calls,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Token {
    pub(super) bytes: Vec<u8>,
    /// In nats.
    pub(super) logprob: f32,
    #[serde(default)]
    pub(super) top: Vec<Other>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Other {
    pub(super) bytes: Vec<u8>,
    pub(super) logprob: f32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Usage {
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) completion_tokens: u32,
    pub(super) reasoning_tokens: u32,
}

#[derive(Debug, PartialEq, Deserialize)]
pub(super) struct Refusal {
    pub(super) kind: RefusalKind,
    /// The part of the request that it is about.
    #[serde(default)]
    pub(super) param: Option<String>,
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RefusalKind {
    Invalid,
    ContextFull,
    NotFound,
    UnknownModel,
    Budget,
    Retry,
    Internal,
}
