//! What a response says: items of its output.

use serde_json::{Value, json};

use super::super::super::exchange::Token;
use super::super::super::whole::Choice;
use super::super::{logprobs, new_id};

/// All items of an answer.
pub(super) fn of_choice(choice: &Choice, has_logprobs: bool) -> Vec<Value> {
    let mut items = Vec::new();
    if let Some(thought) = &choice.thought {
        items.push(reasoning(&new_id("rs_"), thought));
    }
    if choice.calls.is_empty() || !choice.text.is_empty() {
        let tokens = has_logprobs.then_some(&choice.tokens[..]);
        items.push(message(&new_id("msg_"), "completed", vec![text_part(&choice.text, tokens)]));
    }
    let calls = choice.calls.iter();
    items.extend(calls.map(|(name, arguments)| call(&new_id("fc_"), &new_id("call_"), name, arguments)));
    items
}

pub(super) fn reasoning(id: &str, thought: &str) -> Value {
    json!({
        "id": id, "type": "reasoning", "summary": [],
        "content": [{ "type": "reasoning_text", "text": thought }],
    })
}

pub(super) fn message(id: &str, status: &str, content: Vec<Value>) -> Value {
    json!({ "id": id, "type": "message", "status": status, "role": "assistant", "content": content })
}

pub(super) fn text_part(text: &str, tokens: Option<&[Token]>) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": tokens.map_or_else(|| json!([]), logprobs_of) })
}

/// Log-probabilities in the form of responses, which is that of each token of a chat completion.
pub(super) fn logprobs_of(tokens: &[Token]) -> Value {
    logprobs::of_response(tokens)
}

pub(super) fn call(id: &str, call_id: &str, name: &str, arguments: &str) -> Value {
    json!({
        "id": id, "call_id": call_id, "type": "function_call", "status": "completed", "name": name, "arguments": arguments,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_message_or_calls_after_what_was_thought() {
        let kinds = |choice: &Choice| {
            of_choice(choice, false).iter().map(|item| item["type"].clone()).collect::<Vec<_>>()
        };
        let thought = Choice { thought: Some("hm".to_owned()), text: "85".to_owned(), ..Choice::default() };
        assert_eq!(kinds(&thought), ["reasoning", "message"]);
        let called = Choice { calls: vec![("f".to_owned(), "{}".to_owned())], ..Choice::default() };
        assert_eq!(kinds(&called), ["function_call"]);
        assert_eq!(kinds(&Choice::default()), ["message"], "an empty one is said to be empty");
    }
}
