//! What is asked. No field is passed over: one that is not known is an error.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// The answer to a conversation.
    Chat(Chat),
    /// What follows a text.
    Complete(Complete),
    /// The hidden states of texts.
    Embed(Embed),
    /// How many tokens a conversation is.
    Count(Chat),
    /// That a conversation kept under this name is not kept any more.
    Forget(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Chat {
    pub(crate) messages: Vec<Message>,
    #[serde(default)]
    pub(crate) tools: Vec<Tool>,
    #[serde(default)]
    pub(crate) tool_choice: ToolChoice,
    #[serde(default)]
    pub(crate) format: Format,
    /// The most tokens of thought before the answer; none for an answer at once.
    #[serde(default)]
    pub(crate) thinking_budget: Option<u32>,
    /// The name of the conversation that the messages go on with.
    #[serde(default)]
    pub(crate) previous: Option<String>,
    /// The name under which the conversation is kept, with the answer.
    #[serde(default)]
    pub(crate) save: Option<String>,
    #[serde(default)]
    pub(crate) settings: Settings,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub(crate) role: String,
    #[serde(default)]
    pub(crate) content: String,
    /// The tools that the assistant called.
    #[serde(default)]
    pub(crate) calls: Vec<Call>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) arguments: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tool {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) description: String,
    /// The JSON schema of its arguments, an object.
    #[serde(default)]
    pub(crate) parameters: Option<Box<RawValue>>,
    /// Whether the arguments have to keep to the schema; any object will do otherwise.
    #[serde(default)]
    pub(crate) strict: bool,
}

/// Which tools are called.
#[derive(Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No tool.
    None,
    /// One of the tools, whatever the model would rather do.
    Required,
    /// This one.
    Named(String),
}

/// What the answer has to be.
#[derive(Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Format {
    #[default]
    Text,
    /// Any object in JSON.
    JsonObject,
    /// JSON of a schema.
    JsonSchema(Box<RawValue>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Complete {
    pub(crate) prompts: Vec<Prompt>,
    /// Whether the text of the prompt comes before what follows it.
    #[serde(default)]
    pub(crate) echo: bool,
    #[serde(default)]
    pub(crate) settings: Settings,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Embed {
    pub(crate) inputs: Vec<Prompt>,
}

/// How tokens are drawn, and when that ends.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Settings {
    /// How many answers there are.
    pub(crate) n: u32,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    pub(crate) temperature: f32,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<u32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) frequency_penalty: f32,
    pub(crate) presence_penalty: f32,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// How many of the most probable tokens come with each token; none for no log-probabilities at all.
    pub(crate) logprobs: Option<u32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            n: 1,
            max_tokens: None,
            stop: Vec::new(),
            temperature: 1.0,
            top_p: None,
            top_k: None,
            min_p: None,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: None,
            logit_bias: Vec::new(),
            logprobs: None,
        }
    }
}
