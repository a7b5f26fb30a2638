//! Tools: how the model is told of them, what its answer has to keep to so that a call is one, and how a call is read.
//!
//! A call is the whole of an answer: `{"tool": "NAME", "arguments": {…}}`. A grammar has an answer be that, with arguments that keep to
//! the schema of the tool, or a text that begins with no brace.

use serde_json::Value;
use trellis_guest::{Constraint, Error, Model, Result, Whitespace};

use crate::reply::{About, Refusal};
use crate::request::{Call, Chat, Format, Tool, ToolChoice};

/// How the answer that is a call begins.
const BEGIN: &str = r#"{"tool": "#;

/// Any object.
const OBJECT: &str = r#"{"type": "object"}"#;

impl Chat {
    /// The tools that may be called.
    fn open_tools(&self) -> Result<Vec<&Tool>, Refusal> {
        Ok(match &self.tool_choice {
            ToolChoice::None => Vec::new(),
            ToolChoice::Auto => self.tools.iter().collect(),
            ToolChoice::Required if self.tools.is_empty() => {
                return Err(Refusal::invalid("tool_choice", "a tool is to be called, and there is none"));
            }
            ToolChoice::Required => self.tools.iter().collect(),
            ToolChoice::Named(name) => match self.tools.iter().find(|tool| tool.name == *name) {
                Some(tool) => vec![tool],
                None => {
                    let message = format!("no tool is called {name:?}");
                    return Err(Refusal::invalid("tool_choice", message));
                }
            },
        })
    }

    /// What the answer has to keep to, if it has to keep to anything.
    pub(crate) fn constraint(&self, model: &Model) -> Result<Option<Constraint>, Refusal> {
        let tools = self.open_tools()?;
        if tools.is_empty() {
            return match &self.format {
                Format::Text => Ok(None),
                Format::JsonObject => json(model, OBJECT),
                Format::JsonSchema(schema) => json(model, schema.get()),
            };
        }
        let answer = match (&self.tool_choice, &self.format) {
            (ToolChoice::Required | ToolChoice::Named(_), _) => None,
            (_, Format::Text) => Some("TEXT?".to_owned()),
            (_, Format::JsonObject) => Some(format!("%json {OBJECT}")),
            (_, Format::JsonSchema(schema)) => Some(format!("%json {}", schema.get())),
        };
        let compiled = Constraint::lark(model, &grammar(answer.as_deref(), &tools, Loose::BySchema));
        let compiled = match compiled {
            // Of a tool that is not strict, the schema is only what it would like to have.
            Err(Error::GrammarRefused { .. } | Error::GrammarTooComplex { .. })
                if tools.iter().any(|tool| !tool.strict) =>
            {
                Constraint::lark(model, &grammar(answer.as_deref(), &tools, Loose::Any))
            }
            compiled => compiled,
        };
        compiled.map(Some).about("tools")
    }

    /// What the model is told of the tools; nothing where there are none to be called.
    pub(crate) fn told_of_tools(&self) -> Result<Option<String>, Refusal> {
        let tools = self.open_tools()?;
        if tools.is_empty() {
            return Ok(None);
        }
        let mut told = String::from("You can call these tools:\n");
        for tool in tools {
            let parameters = tool.parameters.as_ref().map_or(OBJECT, |schema| schema.get());
            let about = if tool.description.is_empty() { "" } else { ": " };
            told += &format!("- {}{about}{}; arguments: {parameters}\n", tool.name, tool.description);
        }
        told += r#"To call one, answer with {"tool": NAME, "arguments": {...}} and nothing else."#;
        Ok(Some(told))
    }
}

/// JSON with spaces where the model has learnt to write them: without, small models lose their way.
fn json(model: &Model, schema: &str) -> Result<Option<Constraint>, Refusal> {
    Constraint::json_schema_with(model, schema, Whitespace::Free).map(Some).about("format")
}

/// What the arguments of tools that are not strict keep to.
#[derive(Clone, Copy)]
enum Loose {
    BySchema,
    Any,
}

/// An answer, where there may be one, or a call of one of the tools.
fn grammar(answer: Option<&str>, tools: &[&Tool], loose: Loose) -> String {
    let calls = (0..tools.len()).map(|idx| format!("call{idx}"));
    let starts: Vec<String> = answer.map(|_| "answer".to_owned()).into_iter().chain(calls).collect();
    let mut text = format!("start: {}\n", starts.join(" | "));
    if let Some(answer) = answer {
        text += &format!("answer: {answer}\n");
        if answer.starts_with("TEXT") {
            text += "TEXT: /[^{](.|\\n)*/\n";
        }
    }
    for (idx, tool) in tools.iter().enumerate() {
        let begin = format!("{BEGIN}{}, \"arguments\": ", Value::from(tool.name.as_str()));
        let schema = match (&tool.parameters, loose, tool.strict) {
            (Some(schema), _, true) | (Some(schema), Loose::BySchema, false) => schema.get(),
            _ => OBJECT,
        };
        text += &format!("call{idx}: {} arguments{idx} \"}}\"\n", Value::from(begin));
        text += &format!("arguments{idx}: %json {schema}\n");
    }
    text
}

/// How a call stands in a conversation.
pub(crate) fn written(call: &Call) -> String {
    format!("{BEGIN}{}, \"arguments\": {}}}", Value::from(call.name.as_str()), call.arguments)
}

/// Whether an answer that begins so may be a call. None while that cannot be told.
pub(crate) fn is_call(text: &str) -> Option<bool> {
    let text = text.trim_start();
    match text.len() < BEGIN.len() {
        true if BEGIN.starts_with(text) => None,
        true => Some(false),
        false => Some(text.starts_with(BEGIN)),
    }
}

/// The tool that is called and its arguments, of an answer that is a whole call.
pub(crate) fn read(text: &str) -> Option<(String, String)> {
    let mut call: Value = serde_json::from_str(text).ok()?;
    let name = call.get("tool")?.as_str()?.to_owned();
    let arguments = call.get_mut("arguments")?.take();
    Some((name, arguments.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str, strict: bool) -> Tool {
        let parameters = serde_json::from_str(r#"{"type":"object","properties":{"x":{"type":"string"}}}"#);
        let parameters = Some(parameters.expect("a schema"));
        Tool { name: name.to_owned(), description: String::new(), parameters, strict }
    }

    #[test]
    fn an_answer_is_a_text_or_a_call_of_a_tool() {
        let (strict, loose) = (tool("a\"b", true), tool("c", false));
        let text = grammar(Some("TEXT?"), &[&strict, &loose], Loose::Any);
        assert!(text.starts_with("start: answer | call0 | call1\nanswer: TEXT?\n"), "{text}");
        assert!(text.contains(r#"call0: "{\"tool\": \"a\\\"b\", \"arguments\": " arguments0 "}""#), "{text}");
        assert!(text.contains("arguments0: %json {\"type\":\"object\",\"properties\""), "{text}");
        assert!(text.contains("arguments1: %json {\"type\": \"object\"}\n"), "{text}");
        assert!(grammar(None, &[&strict], Loose::Any).starts_with("start: call0\ncall0"));
        assert!(grammar(None, &[&loose], Loose::BySchema).contains("%json {\"type\":\"object\",\"prop"));
    }

    #[test]
    fn what_was_written_is_read_again() {
        let call = Call { name: "a\"b".to_owned(), arguments: serde_json::json!({"x": "{\"tool\": "}) };
        let text = written(&call);
        assert_eq!(is_call(&text), Some(true));
        assert_eq!(read(&text), Some((call.name, call.arguments.to_string())));
        assert_eq!(
            (is_call("{\"to"), is_call("Yes"), is_call("{\"name\": 1}")),
            (None, Some(false), Some(false))
        );
        assert!(read("{\"tool\": \"a\", \"argu").is_none());
    }
}
