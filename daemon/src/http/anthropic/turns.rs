//! The turns of a conversation, as messages of the model's template.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::http::exchange::{Call, Message};
use crate::http::failure::Failure;
use crate::http::fields::Fields;

/// What stands before the result of a call that has failed, so that the model knows.
const FAILED: &str = "Error: ";

/// Between texts that are said at once.
const BETWEEN: &str = "\n\n";

/// The messages that the turns are. A turn with results of tools is several: one of each result, and one of what is said besides.
///
/// # Errors
/// A turn is not as it may be, and which; none is there; the last is the assistant's.
pub(super) fn messages(turns: Vec<Value>) -> Result<Vec<Message>, Failure> {
    let mut messages = Vec::new();
    let mut calls = BTreeSet::new();
    for (idx, turn) in turns.into_iter().enumerate() {
        let mut turn = Fields::of(turn, format!("messages.{idx}"))?;
        let (role, content) = (turn.need::<String>("role")?, turn.need::<Value>("content")?);
        let place = turn.name_of("content");
        match role.as_str() {
            "user" => user(content, &place, &calls, &mut messages)?,
            "assistant" => messages.push(assistant(content, &place, &mut calls)?),
            "system" => messages.push(said("system", text(content, &place)?)),
            role => {
                let place = turn.name_of("role");
                let message = format!("{place} is {role:?}, expected user, assistant or system");
                return Err(Failure::invalid(place, message));
            }
        }
        turn.finish()?;
    }
    match messages.last() {
        None => Err(Failure::invalid("messages", "messages: at least one is required")),
        Some(last) if last.role == "assistant" => Err(Failure::unsupported(
            "messages",
            "the last is the assistant's, and no answer that is begun is gone on with",
        )),
        Some(_) => Ok(messages),
    }
}

/// The one text that a text is, or a list of text blocks.
///
/// # Errors
/// It is neither.
pub(super) fn text(content: Value, place: &str) -> Result<String, Failure> {
    let texts = blocks(content, place)?.into_iter().map(|(kind, block)| match kind.as_str() {
        "text" => text_of(block),
        kind => Err(unknown(kind, &block, "text")),
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join(BETWEEN))
}

fn user(
    content: Value,
    place: &str,
    calls: &BTreeSet<String>,
    messages: &mut Vec<Message>,
) -> Result<(), Failure> {
    let mut texts = Vec::new();
    for (kind, mut block) in blocks(content, place)? {
        match kind.as_str() {
            "text" => texts.push(text_of(block)?),
            "tool_result" => {
                let id: String = block.need("tool_use_id")?;
                if !calls.contains(&id) {
                    let place = block.name_of("tool_use_id");
                    let message = format!("{place}: no call before it has the id {id:?}");
                    return Err(Failure::invalid(place, message));
                }
                let content = block.take::<Value>("content")?.unwrap_or_else(|| Value::from(""));
                let content = text(content, &block.name_of("content"))?;
                let failed = if block.take::<bool>("is_error")? == Some(true) { FAILED } else { "" };
                block.pass_over(&["cache_control"]);
                block.finish()?;
                messages.push(said("tool", format!("{failed}{content}")));
            }
            kind => return Err(unknown(kind, &block, "text or tool_result")),
        }
    }
    if !texts.is_empty() {
        messages.push(said("user", texts.join(BETWEEN)));
    }
    Ok(())
}

fn assistant(content: Value, place: &str, ids: &mut BTreeSet<String>) -> Result<Message, Failure> {
    let (mut texts, mut calls) = (Vec::new(), Vec::new());
    for (kind, mut block) in blocks(content, place)? {
        match kind.as_str() {
            "text" => texts.push(text_of(block)?),
            "tool_use" => {
                ids.insert(block.need("id")?);
                let (name, arguments) = (block.need("name")?, block.need::<Value>("input")?);
                if !arguments.is_object() {
                    let place = block.name_of("input");
                    return Err(Failure::invalid(&place, format!("{place} is no object")));
                }
                calls.push(Call { name, arguments });
                block.pass_over(&["cache_control", "caller"]);
                block.finish()?;
            }
            // No later answer sees what was thought before an earlier one.
            "thinking" | "redacted_thinking" => {}
            kind => return Err(unknown(kind, &block, "text, tool_use or thinking")),
        }
    }
    Ok(Message { role: "assistant", content: texts.join(BETWEEN), calls })
}

fn said(role: &'static str, content: String) -> Message {
    Message { role, content, calls: Vec::new() }
}

fn text_of(mut block: Fields) -> Result<String, Failure> {
    let text = block.need("text")?;
    // The package sends an answer back with what it has parsed of it.
    block.pass_over(&["cache_control", "citations", "parsed_output"]);
    block.finish()?;
    Ok(text)
}

fn unknown(kind: &str, block: &Fields, expected: &str) -> Failure {
    let place = block.name_of("type");
    let message = format!("{place} is {kind:?}, which this daemon does not know here; expected {expected}");
    Failure::invalid(place, message)
}

/// The blocks of a content, each with its type. A text is one block.
fn blocks(content: Value, place: &str) -> Result<Vec<(String, Fields)>, Failure> {
    let blocks = match content {
        Value::String(text) => {
            let block = Fields::of(serde_json::json!({ "text": text }), place)?;
            return Ok(vec![("text".to_owned(), block)]);
        }
        Value::Array(blocks) => blocks,
        _ => return Err(Failure::invalid(place, format!("{place} is neither a text nor a list of blocks"))),
    };
    let with_kind = |(idx, block): (usize, Value)| {
        let mut block = Fields::of(block, format!("{place}.{idx}"))?;
        Ok((block.need("type")?, block))
    };
    blocks.into_iter().enumerate().map(with_kind).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(turns: Value) -> Result<Vec<Message>, Failure> {
        messages(serde_json::from_value(turns).expect("a list"))
    }

    #[test]
    fn results_of_tools_come_before_what_is_said_with_them() {
        let turns = json!([
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "b"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": true,
                 "content": [{"type": "text", "text": "nothing"}]},
                {"type": "text", "text": "And", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "now?"},
            ]},
        ]);
        let call = Call { name: "look".to_owned(), arguments: json!({"at": "b"}) };
        let called = Message { role: "assistant", content: "Let me see.".to_owned(), calls: vec![call] };
        let rest = [said("tool", "Error: nothing".to_owned()), said("user", "And\n\nnow?".to_owned())];
        let expected = [said("user", "Hello".to_owned()), called].into_iter().chain(rest);
        assert!(read(turns).expect("they are in order").into_iter().eq(expected));
    }

    #[test]
    fn what_is_not_known_is_named_with_its_place() {
        for (turns, place) in [
            (json!([{"role": "user", "content": [{"type": "image"}]}]), "messages.0.content.0.type"),
            (
                json!([{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]),
                "messages.0.content.0.x",
            ),
            (json!([{"role": "user", "content": 1}]), "messages.0.content"),
            (json!([{"role": "oracle", "content": ""}]), "messages.0.role"),
            (
                json!([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]),
                "messages.0.content.0.tool_use_id",
            ),
            (json!([{"role": "user", "content": ""}, {"role": "assistant", "content": "The"}]), "messages"),
            (json!([]), "messages"),
        ] {
            let failure = read(turns).expect_err("it is refused");
            assert_eq!(
                (failure.status.as_u16(), failure.param.as_deref()),
                (400, Some(place)),
                "{failure:?}"
            );
        }
    }
}
