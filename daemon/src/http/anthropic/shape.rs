//! The parts of an answer in Anthropic's form, which are the same whether it comes as a whole or as events.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::http::exchange::{Reason, Usage};
use crate::http::failure::Failure;
use crate::http::tokens::random_hex;
use crate::http::whole::Whole;

/// An answer that is under way.
#[derive(Debug)]
pub(super) struct Answer {
    id: String,
    /// The most tokens that it may have.
    max_tokens: u32,
}

impl Answer {
    pub(super) fn new(max_tokens: u32) -> Self {
        Self { id: format!("msg_{}", random_hex::<12>()), max_tokens }
    }

    /// The message, as it is before its end where there is no reason yet.
    pub(super) fn message(&self, model: &str, content: Vec<Value>, end: Value, usage: Value) -> Value {
        let mut message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": content,
            "usage": usage,
        });
        if let (Value::Object(message), Value::Object(end)) = (&mut message, end) {
            message.extend(end);
        }
        message
    }

    /// The message of an answer that is whole.
    ///
    /// # Errors
    /// A tool is called with what is no object.
    pub(super) fn whole(&self, whole: &Whole) -> Result<Value, Failure> {
        let mut content = Vec::new();
        let (mut reason, mut stop) = (None, None);
        // There is one choice: this API asks for no more.
        if let Some(choice) = whole.choices.first() {
            content.extend(choice.thought.as_deref().map(thinking));
            content.extend(Some(choice.text.as_str()).filter(|text| !text.is_empty()).map(text));
            for (name, arguments) in &choice.calls {
                content.push(tool_use(name, object(name, arguments)?));
            }
            (reason, stop) = (choice.reason, choice.stop.as_deref());
        }
        Ok(self.message(&whole.model, content, self.end(reason, stop, &whole.usage), usage(&whole.usage)))
    }

    /// Why the answer ended: `stop_reason` and `stop_sequence`.
    pub(super) fn end(&self, reason: Option<Reason>, stop: Option<&str>, usage: &Usage) -> Value {
        let reason = match (reason, stop) {
            (None, _) => None,
            (Some(Reason::Calls), _) => Some("tool_use"),
            (Some(Reason::Stop), None) => Some("end_turn"),
            (Some(Reason::Stop), Some(_)) => Some("stop_sequence"),
            // It was cut off before it had all the tokens that it may have: there is no room for more.
            (Some(Reason::Length), _) if usage.completion_tokens < self.max_tokens => {
                Some("model_context_window_exceeded")
            }
            (Some(Reason::Length), _) => Some("max_tokens"),
        };
        json!({ "stop_reason": reason, "stop_sequence": stop })
    }
}

/// The arguments of a call.
fn object(name: &str, arguments: &str) -> Result<Value, Failure> {
    let arguments = serde_json::from_str(arguments).ok().filter(Value::is_object);
    arguments.ok_or_else(|| {
        let message = format!("the guest calls {name} with arguments that are no object in JSON");
        Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "guest_failed", message)
    })
}

/// The tokens that it took. Those of the prompt that were there already are counted apart.
pub(super) fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    })
}

pub(super) fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

/// A thought. Its signature is its hash: a client has to have one, and nobody here asks for it back.
pub(super) fn thinking(thought: &str) -> Value {
    json!({ "type": "thinking", "thinking": thought, "signature": signature(thought) })
}

pub(super) fn signature(thought: &str) -> String {
    blake3::hash(thought.as_bytes()).to_hex().to_string()
}

/// A call of a tool, with an id of its own.
pub(super) fn tool_use(name: &str, input: Value) -> Value {
    json!({ "type": "tool_use", "id": format!("toolu_{}", random_hex::<12>()), "name": name, "input": input })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::whole::Choice;

    #[test]
    fn an_answer_is_its_blocks_in_their_order() {
        let called = |arguments: &str| {
            let calls = vec![("look".to_owned(), arguments.to_owned())];
            let (thought, text) = (Some("Hm.".to_owned()), "Let me see.".to_owned());
            let choice = Choice { thought, text, calls, reason: Some(Reason::Calls), ..Choice::default() };
            let whole = Whole { model: "tiny".to_owned(), choices: vec![choice], ..Whole::default() };
            Answer::new(8).whole(&whole)
        };
        let message = called(r#"{"at": 1}"#).expect("it is in order");
        let kinds: Vec<&Value> = (0..3).map(|idx| &message["content"][idx]["type"]).collect();
        assert_eq!(kinds, ["thinking", "text", "tool_use"]);
        assert_eq!(
            (&message["content"][2]["input"], &message["stop_reason"]),
            (&json!({"at": 1}), &json!("tool_use"))
        );
        assert_eq!(called("[1]").expect_err("it is a list").status, StatusCode::INTERNAL_SERVER_ERROR);
    }

    #[test]
    fn an_answer_says_why_it_ended() {
        let answer = Answer::new(8);
        let ended = |reason, stop, n| {
            let usage = Usage { completion_tokens: n, ..Usage::default() };
            answer.end(Some(reason), stop, &usage)["stop_reason"].clone()
        };
        assert_eq!(ended(Reason::Stop, None, 3), "end_turn");
        assert_eq!(ended(Reason::Stop, Some("END"), 3), "stop_sequence");
        assert_eq!(ended(Reason::Calls, None, 3), "tool_use");
        assert_eq!(ended(Reason::Length, None, 8), "max_tokens");
        assert_eq!(ended(Reason::Length, None, 7), "model_context_window_exceeded");
    }

    #[test]
    fn tokens_of_the_prompt_are_counted_once() {
        let took = Usage { prompt_tokens: 17, cached_tokens: 16, completion_tokens: 3, reasoning_tokens: 0 };
        let usage = usage(&took);
        assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&json!(1), &json!(16)));
        assert_eq!(usage["output_tokens"], 3);
    }
}
