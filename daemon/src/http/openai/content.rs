//! Messages of a conversation.

use serde_json::Value;

use super::super::exchange::{Call, Message};
use super::super::failure::Failure;
use super::super::fields::Fields;

/// The messages of a chat completion.
pub(super) fn messages(values: Vec<Value>) -> Result<Vec<Message>, Failure> {
    if values.is_empty() {
        return Err(Failure::invalid("messages", "messages is empty"));
    }
    let messages = values.into_iter().enumerate();
    messages.map(|(idx, value)| message(Fields::of(value, format!("messages[{idx}]"))?)).collect()
}

fn message(mut fields: Fields) -> Result<Message, Failure> {
    let told: String = fields.need("role")?;
    let role = role(&told).ok_or_else(|| {
        let place = fields.name_of("role");
        Failure::invalid(
            &place,
            format!("{place} is {told:?}, expected system, developer, user, assistant or tool"),
        )
    })?;
    let content = fields.take::<Value>("content")?;
    let content = content.map(|content| text(content, &fields.name_of("content"), &["text"])).transpose()?;
    let calls = match role {
        "assistant" => calls(&mut fields)?,
        _ => Vec::new(),
    };
    // Which call a tool answers: there is one at a time.
    fields.pass_over(match role {
        "tool" => &["tool_call_id"],
        "assistant" => &["refusal", "annotations", "reasoning_content"],
        _ => &[],
    });
    let name = fields.name_of("content");
    fields.finish()?;
    if content.is_none() && calls.is_empty() {
        return Err(Failure::invalid(&name, format!("{name} is missing")));
    }
    Ok(Message { role, content: content.unwrap_or_default(), calls })
}

/// The role as templates know it.
pub(super) fn role(told: &str) -> Option<&'static str> {
    Some(match told {
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        _ => return None,
    })
}

/// The text of a content, which may come in parts of these types.
pub(super) fn text(content: Value, place: &str, types: &[&str]) -> Result<String, Failure> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => return Err(Failure::invalid(place, format!("{place} is neither a text nor a list of parts"))),
    };
    let mut all = String::new();
    for (idx, part) in parts.into_iter().enumerate() {
        let mut part = Fields::of(part, format!("{place}[{idx}]"))?;
        let kind: String = part.need("type")?;
        if !types.contains(&kind.as_str()) {
            let why = format!("models here read text, not {kind}");
            return Err(Failure::unsupported(part.name_of("type"), &why));
        }
        all += &part.need::<String>("text")?;
        part.pass_over(&["annotations", "logprobs", "cache_control"]);
        part.finish()?;
    }
    Ok(all)
}

/// The tools that the assistant has called.
fn calls(fields: &mut Fields) -> Result<Vec<Call>, Failure> {
    let values = fields.take::<Vec<Value>>("tool_calls")?.unwrap_or_default();
    let place = fields.name_of("tool_calls");
    let call = |(idx, value): (usize, Value)| {
        let mut call = Fields::of(value, format!("{place}[{idx}]"))?;
        call.pass_over(&["id", "index"]);
        call.only("type", &["function".into()], "tools are functions")?;
        let Some(mut function) = call.object("function")? else {
            let place = call.name_of("function");
            return Err(Failure::invalid(&place, format!("{place} is missing")));
        };
        call.finish()?;
        let name = function.need("name")?;
        let arguments = arguments(&function.need::<String>("arguments")?, &function.name_of("arguments"))?;
        function.finish()?;
        Ok(Call { name, arguments })
    };
    values.into_iter().enumerate().map(call).collect()
}

/// The arguments of a call, which the API has as a text of JSON.
pub(super) fn arguments(text: &str, place: &str) -> Result<Value, Failure> {
    match text.trim() {
        "" => Ok(Value::Object(Default::default())),
        text => serde_json::from_str(text)
            .map_err(|error| Failure::invalid(place, format!("{place} is not JSON: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Vec<Message>, Failure> {
        messages(serde_json::from_value(value).expect("a list"))
    }

    #[test]
    fn messages_are_those_that_templates_know() {
        let read = read(json!([
            { "role": "developer", "content": "Be brief." },
            { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "call_1", "type": "function", "function": { "name": "f", "arguments": "{\"x\": 1}" } },
            ] },
            { "role": "tool", "tool_call_id": "call_1", "content": "2" },
        ]));
        let expected = [("system", "Be brief."), ("user", "ab"), ("assistant", ""), ("tool", "2")];
        let read = read.expect("all are in order");
        assert_eq!(read.iter().map(|one| (one.role, one.content.as_str())).collect::<Vec<_>>(), expected);
        assert_eq!(read[2].calls, [Call { name: "f".to_owned(), arguments: json!({ "x": 1 }) }]);
    }

    #[test]
    fn what_is_no_text_is_named_by_its_place() {
        for (message, param) in [
            (json!({ "role": "narrator", "content": "x" }), "messages[0].role"),
            (json!({ "role": "user" }), "messages[0].content"),
            (json!({ "role": "user", "content": "x", "name": "ada" }), "messages[0].name"),
            (
                json!({ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }),
                "messages[0].content[0].type",
            ),
            (
                json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": "{" } }] }),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            let failure = read(json!([message])).expect_err(param);
            assert_eq!((failure.status.as_u16(), failure.param.as_deref()), (400, Some(param)));
        }
        assert!(read(json!([])).is_err());
    }
}
