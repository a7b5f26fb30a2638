//! What a response is asked: a text, or items of a conversation.

use serde_json::{Value, json};

use super::super::super::exchange::{Call, Message, Tool};
use super::super::super::failure::Failure;
use super::super::super::fields::Fields;
use super::super::{content, tools};

/// Types of the parts of a text.
const PARTS: [&str; 3] = ["input_text", "output_text", "text"];

/// The messages that an input is.
pub(super) fn messages(input: Value) -> Result<Vec<Message>, Failure> {
    let items = match input {
        Value::String(text) => return Ok(vec![message("user", text)]),
        Value::Array(items) => items,
        _ => return Err(Failure::invalid("input", "input is neither a text nor a list of items")),
    };
    let mut messages: Vec<Message> = Vec::new();
    for (idx, item) in items.into_iter().enumerate() {
        let item = Fields::of(item, format!("input[{idx}]"))?;
        match self::item(item)? {
            // A call is part of what the assistant said before it.
            Some(Message { role: "assistant", calls, .. })
                if !calls.is_empty() && ends_with_answer(&messages) =>
            {
                messages.last_mut().expect("there is one").calls.extend(calls);
            }
            Some(message) => messages.push(message),
            None => {}
        }
    }
    match messages.is_empty() {
        true => Err(Failure::invalid("input", "input is empty")),
        false => Ok(messages),
    }
}

fn ends_with_answer(messages: &[Message]) -> bool {
    messages.last().is_some_and(|message| message.role == "assistant")
}

fn message(role: &'static str, content: String) -> Message {
    Message { role, content, calls: Vec::new() }
}

/// What the model is told before all else.
pub(super) fn system(text: String) -> Message {
    message("system", text)
}

/// The message of an item; none of one that says nothing to a model here.
fn item(mut item: Fields) -> Result<Option<Message>, Failure> {
    let kind = item.take::<String>("type")?.unwrap_or_else(|| "message".to_owned());
    item.pass_over(&["id", "status"]);
    match kind.as_str() {
        "message" => {
            let told: String = item.need("role")?;
            let place = item.name_of("role");
            let role = content::role(&told).filter(|role| *role != "tool").ok_or_else(|| {
                Failure::invalid(
                    &place,
                    format!("{place} is {told:?}, expected system, developer, user or assistant"),
                )
            })?;
            item.pass_over(&["phase"]);
            let text = content::text(item.need("content")?, &item.name_of("content"), &PARTS)?;
            item.finish()?;
            Ok(Some(message(role, text)))
        }
        "function_call" => {
            item.pass_over(&["call_id"]);
            let name = item.need("name")?;
            let place = item.name_of("arguments");
            let arguments = content::arguments(&item.need::<String>("arguments")?, &place)?;
            item.finish()?;
            Ok(Some(Message { calls: vec![Call { name, arguments }], ..message("assistant", String::new()) }))
        }
        "function_call_output" => {
            item.pass_over(&["call_id"]);
            let text = content::text(item.need("output")?, &item.name_of("output"), &PARTS)?;
            item.finish()?;
            Ok(Some(message("tool", text)))
        }
        // No model reads its thoughts of before.
        "reasoning" => Ok(None),
        other => {
            let why = format!("there is no {other} here");
            Err(Failure::unsupported(item.name_of("type"), &why))
        }
    }
}

/// The tools of a response, which are functions.
pub(super) fn tools(fields: &mut Fields) -> Result<Vec<Tool>, Failure> {
    let values = fields.take::<Vec<Value>>("tools")?.unwrap_or_default();
    let tool = |(idx, value): (usize, Value)| {
        let mut tool = Fields::of(value, format!("tools[{idx}]"))?;
        tool.only("type", &[json!("function")], "tools are functions")?;
        tools::function(tool)
    };
    values.into_iter().enumerate().map(tool).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_messages_calls_and_what_tools_said() {
        let read = messages(json!([
            { "role": "user", "content": [{ "type": "input_text", "text": "12 * 7?" }] },
            { "type": "reasoning", "id": "rs_1", "summary": [] },
            { "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
              "content": [{ "type": "output_text", "text": "Wait.", "annotations": [] }] },
            { "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "call_1", "output": "84" },
        ]))
        .expect("all is in order");
        let shown: Vec<_> =
            read.iter().map(|one| (one.role, one.content.as_str(), one.calls.len())).collect();
        assert_eq!(shown, [("user", "12 * 7?", 0), ("assistant", "Wait.", 1), ("tool", "84", 0)]);
    }

    #[test]
    fn what_is_no_text_is_named_by_its_place() {
        let image = json!([{ "role": "user", "content": [{ "type": "input_image", "image_url": "x" }] }]);
        assert_eq!(messages(image).expect_err("an image").param.as_deref(), Some("input[0].content[0].type"));
        let search = json!([{ "type": "web_search_call", "id": "x" }]);
        assert_eq!(messages(search).expect_err("a search").param.as_deref(), Some("input[0].type"));
        assert!(messages(json!([])).is_err());
    }
}
