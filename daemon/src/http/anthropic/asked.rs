//! What `/v1/messages` is asked, as the guest is asked it.

use serde_json::Value;

use super::{THREAD, turns};
use crate::http::exchange::{Chat, Format, Message, Settings, Tool, ToolChoice};
use crate::http::failure::Failure;
use crate::http::fields::Fields;
use crate::http::openai::settings;

/// The most tokens that any number of a request may say.
const N_TOKENS: (u32, u32) = (1, u32::MAX);

/// Stop texts of one request: each is looked for in every answer, at every token.
const N_STOPS_MAX: usize = 64;

/// A conversation to be answered. What is left in the body is not known here, and is for the caller to look at.
///
/// # Errors
/// A field is not as it may be, and which.
pub(super) fn question(body: &mut Fields) -> Result<Chat, Failure> {
    let mut chat = conversation(body)?;
    chat.settings = self::settings(body)?;
    match (chat.thinking_budget, chat.settings.max_tokens) {
        (Some(budget), Some(max_tokens)) if budget >= max_tokens => {
            let place = "thinking.budget_tokens";
            let message =
                format!("{place} is {budget}, expected less than max_tokens, which is {max_tokens}");
            Err(Failure::invalid(place, message))
        }
        _ => Ok(chat),
    }
}

/// The conversation that a body holds. What is left in the body is not known here, and is for the caller to look at.
///
/// # Errors
/// A field is not as it may be, and which.
pub(super) fn conversation(body: &mut Fields) -> Result<Chat, Failure> {
    // False is that there is none.
    if body.take::<Value>(THREAD)?.is_some_and(|thread| thread != false) {
        return Err(Failure::unsupported(THREAD, "conversations are sent whole"));
    }
    let mut messages = turns::messages(body.need("messages")?)?;
    if let Some(system) = body.take::<Value>("system")? {
        let content = turns::text(system, "system")?;
        messages.insert(0, Message { role: "system", content, calls: Vec::new() });
    }
    let tools = body.take::<Vec<Value>>("tools")?.unwrap_or_default().into_iter().enumerate();
    let tools = tools.map(|(idx, tool)| self::tool(tool, idx)).collect::<Result<_, _>>()?;
    let tool_choice = tool_choice(body)?;
    let format = format(body)?;
    let thinking_budget = thinking(body)?;
    // Nothing of an answer depends on them here: prompts are cached by themselves, and there is one tier.
    body.pass_over(&["cache_control", "metadata", "service_tier"]);
    Ok(Chat { messages, tools, tool_choice, format, thinking_budget, ..Chat::default() })
}

/// How the answer is drawn, and when that ends.
fn settings(body: &mut Fields) -> Result<Settings, Failure> {
    let max_tokens = body.count("max_tokens", N_TOKENS)?;
    let Some(max_tokens) = max_tokens else {
        return Err(Failure::invalid("max_tokens", "max_tokens is missing"));
    };
    let stop = body.take::<Vec<String>>("stop_sequences")?.unwrap_or_default();
    if stop.len() > N_STOPS_MAX {
        let message = format!("stop_sequences has {} texts, expected at most {N_STOPS_MAX}", stop.len());
        return Err(Failure::invalid("stop_sequences", message));
    }
    if stop.iter().any(String::is_empty) {
        return Err(Failure::invalid("stop_sequences", "stop_sequences: an empty text stops nothing"));
    }
    Ok(Settings {
        max_tokens: Some(max_tokens),
        stop,
        temperature: body.number("temperature", (0.0, 1.0))?,
        top_p: settings::top_p(body)?,
        // None of them stands for no limit.
        top_k: body.count("top_k", (0, u32::MAX))?.filter(|&k| k > 0),
        ..Settings::default()
    })
}

fn tool(tool: Value, idx: usize) -> Result<Tool, Failure> {
    let mut tool = Fields::of(tool, format!("tools.{idx}"))?;
    // Others than those of the client are done by Anthropic's servers, or have descriptions that only its models know.
    tool.only("type", &[Value::from("custom")], "only tools with an input_schema are there")?;
    let name = tool.need("name")?;
    let description = tool.take("description")?.unwrap_or_default();
    let parameters = tool.schema("input_schema")?;
    if parameters.is_none() {
        let place = tool.name_of("input_schema");
        return Err(Failure::invalid(&place, format!("{place} is missing")));
    }
    let strict = tool.take("strict")?.unwrap_or(false);
    tool.pass_over(&["cache_control"]);
    tool.finish()?;
    Ok(Tool { name, description, parameters, strict })
}

fn tool_choice(body: &mut Fields) -> Result<ToolChoice, Failure> {
    let Some(mut choice) = body.object("tool_choice")? else { return Ok(ToolChoice::Auto) };
    let kind: String = choice.need("type")?;
    let chosen = match kind.as_str() {
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "none" => ToolChoice::None,
        "tool" => ToolChoice::Named(choice.need("name")?),
        kind => {
            let message = format!("tool_choice.type is {kind:?}, expected auto, any, tool or none");
            return Err(Failure::invalid("tool_choice.type", message));
        }
    };
    // An answer calls one tool at most, whatever is said here.
    choice.pass_over(&["disable_parallel_tool_use"]);
    choice.finish()?;
    Ok(chosen)
}

fn format(body: &mut Fields) -> Result<Format, Failure> {
    let Some(mut config) = body.object("output_config")? else { return Ok(Format::Text) };
    let format = match config.object("format")? {
        None => Format::Text,
        Some(mut format) => {
            format.only("type", &[Value::from("json_schema")], "an answer is a text or of a JSON schema")?;
            let Some(schema) = format.schema("schema")? else {
                let place = format.name_of("schema");
                return Err(Failure::invalid(&place, format!("{place} is missing")));
            };
            format.finish()?;
            Format::JsonSchema(schema)
        }
    };
    config.finish()?;
    Ok(format)
}

/// The most tokens of thought, if there is to be any.
fn thinking(body: &mut Fields) -> Result<Option<u32>, Failure> {
    let Some(mut thinking) = body.object("thinking")? else { return Ok(None) };
    let kind: String = thinking.need("type")?;
    let budget = match kind.as_str() {
        "disabled" => None,
        "enabled" => {
            let budget = thinking.count("budget_tokens", N_TOKENS)?;
            let missing = || Failure::invalid("thinking.budget_tokens", "thinking.budget_tokens is missing");
            Some(budget.ok_or_else(missing)?)
        }
        kind => {
            let message = format!("thinking.type is {kind:?}, expected enabled or disabled");
            return Err(Failure::invalid("thinking.type", message));
        }
    };
    thinking.finish()?;
    Ok(budget)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(body: Value) -> Fields {
        Fields::of(body, "").expect("an object")
    }

    #[test]
    fn all_that_is_asked_reaches_the_guest() {
        let schema = json!({"type": "object", "properties": {"z": {}, "a": {}}});
        let mut body = fields(json!({
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [{"name": "look", "description": "Looks.", "input_schema": schema, "strict": true}],
            "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": true},
            "thinking": {"type": "enabled", "budget_tokens": 16},
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
            "metadata": {"user_id": "ada"},
            "max_tokens": 64, "stop_sequences": ["END"], "temperature": 0.5, "top_k": 3, "top_p": 0.9,
        }));
        let chat = question(&mut body).expect("it is in order");
        body.finish().expect("nothing is left");
        let asked = serde_json::to_value(&chat).expect("JSON");
        assert_eq!(asked["messages"][0], json!({"role": "system", "content": "Be brief."}));
        assert_eq!(asked["messages"][1], json!({"role": "user", "content": "Hello"}));
        let tool = json!({"name": "look", "description": "Looks.", "parameters": schema, "strict": true});
        assert_eq!(asked["tools"], json!([tool]));
        assert_eq!(asked["tool_choice"], json!({"named": "look"}));
        assert_eq!(asked["format"], json!({"json_schema": schema}));
        assert_eq!(asked["thinking_budget"], json!(16));
        let settings = &asked["settings"];
        assert_eq!((&settings["max_tokens"], &settings["stop"]), (&json!(64), &json!(["END"])));
        assert_eq!((&settings["temperature"], &settings["top_k"]), (&json!(0.5), &json!(3)));
    }

    #[test]
    fn what_is_not_done_is_named() {
        for (field, value, place) in [
            ("temperature", json!(1.5), "temperature"),
            ("max_tokens", json!(0), "max_tokens"),
            ("top_k", json!(-1), "top_k"),
            ("stop_sequences", json!([""]), "stop_sequences"),
            ("stop_sequences", json!(vec!["x"; 65]), "stop_sequences"),
            ("thinking", json!({"type": "adaptive"}), "thinking.type"),
            ("thinking", json!({"type": "enabled"}), "thinking.budget_tokens"),
            ("thinking", json!({"type": "enabled", "budget_tokens": 8}), "thinking.budget_tokens"),
            ("tool_choice", json!({"type": "perhaps"}), "tool_choice.type"),
            ("tools", json!([{"type": "bash_20250124", "name": "bash"}]), "tools.0.type"),
            ("tools", json!([{"name": "look"}]), "tools.0.input_schema"),
            ("output_config", json!({"effort": "high"}), "output_config.effort"),
            ("container", json!("one"), "container"),
        ] {
            let mut whole = json!({"messages": [{"role": "user", "content": ""}], "max_tokens": 8});
            whole[field] = value;
            let mut body = fields(whole);
            let outcome = question(&mut body).and_then(|_| body.finish());
            let failure = outcome.expect_err(place);
            assert_eq!(
                (failure.status.as_u16(), failure.param.as_deref()),
                (400, Some(place)),
                "{failure:?}"
            );
        }
        let mut body = fields(json!({"messages": [{"role": "user", "content": ""}]}));
        assert_eq!(question(&mut body).expect_err("it is missing").param.as_deref(), Some("max_tokens"));
    }
}
