//! Log-probabilities.

use serde_json::{Value, json};

use super::super::exchange::Token;

/// Those of a chat completion.
pub(super) fn of_chat(tokens: &[Token]) -> Value {
    let one = |bytes: &[u8], logprob: f32| json!({ "token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes });
    let content = tokens.iter().map(|token| {
        let mut content = one(&token.bytes, token.logprob);
        content["top_logprobs"] = token.top.iter().map(|other| one(&other.bytes, other.logprob)).collect();
        content
    });
    json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
}
