//! Tools that may be called, and the form of an answer.

use serde_json::{Value, json};

use super::super::exchange::{Format, Tool, ToolChoice};
use super::super::failure::Failure;
use super::super::fields::Fields;

/// The tools of a chat completion.
pub(super) fn tools(fields: &mut Fields) -> Result<Vec<Tool>, Failure> {
    let values = fields.take::<Vec<Value>>("tools")?.unwrap_or_default();
    let place = fields.name_of("tools");
    let tool = |(idx, value): (usize, Value)| {
        let mut tool = Fields::of(value, format!("{place}[{idx}]"))?;
        tool.only("type", &[json!("function")], "tools are functions")?;
        let Some(function) = tool.object("function")? else {
            let place = tool.name_of("function");
            return Err(Failure::invalid(&place, format!("{place} is missing")));
        };
        tool.finish()?;
        self::function(function)
    };
    values.into_iter().enumerate().map(tool).collect()
}

/// A function with its name, and the schema of its arguments.
pub(super) fn function(mut function: Fields) -> Result<Tool, Failure> {
    let tool = Tool {
        name: function.need("name")?,
        description: function.take("description")?.unwrap_or_default(),
        parameters: function.schema("parameters")?,
        strict: function.take("strict")?.unwrap_or_default(),
    };
    function.finish()?;
    Ok(tool)
}

/// Which tools are called, where a function is named by an object at `place`.
pub(super) fn choice(fields: &mut Fields) -> Result<ToolChoice, Failure> {
    let place = fields.name_of("tool_choice");
    let wrong = |said: &Value| {
        let message = format!("{place} is {said}, expected \"none\", \"auto\", \"required\" or a function");
        Failure::invalid(&place, message)
    };
    match fields.take::<Value>("tool_choice")? {
        None => Ok(ToolChoice::Auto),
        Some(said @ Value::String(_)) => match said.as_str() {
            Some("auto") => Ok(ToolChoice::Auto),
            Some("none") => Ok(ToolChoice::None),
            Some("required") => Ok(ToolChoice::Required),
            _ => Err(wrong(&said)),
        },
        Some(said) => {
            let mut named = Fields::of(said, &place)?;
            named.only("type", &[json!("function")], "tools are functions")?;
            // Chat completions have the name inside an object, responses beside the type.
            let name = match named.object("function")? {
                Some(mut function) => {
                    let name = function.need("name")?;
                    function.finish()?;
                    name
                }
                None => named.need("name")?,
            };
            named.finish()?;
            Ok(ToolChoice::Named(name))
        }
    }
}

/// The form of the answer to a chat completion.
pub(super) fn response_format(fields: &mut Fields) -> Result<Format, Failure> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(Format::Text) };
    let kind: String = format.need("type")?;
    let read = match kind.as_str() {
        "json_schema" => {
            let Some(mut schema) = format.object("json_schema")? else {
                let place = format.name_of("json_schema");
                return Err(Failure::invalid(&place, format!("{place} is missing")));
            };
            let read = named_schema(&mut schema)?;
            schema.finish()?;
            read
        }
        kind => plain_format(kind, &format.name_of("type"))?,
    };
    format.finish()?;
    Ok(read)
}

/// A schema with a name and a description, which nothing depends on.
pub(super) fn named_schema(fields: &mut Fields) -> Result<Format, Failure> {
    fields.pass_over(&["name", "description", "strict"]);
    let place = fields.name_of("schema");
    match fields.schema("schema")? {
        Some(schema) => Ok(Format::JsonSchema(schema)),
        None => Err(Failure::invalid(&place, format!("{place} is missing"))),
    }
}

pub(super) fn plain_format(kind: &str, place: &str) -> Result<Format, Failure> {
    match kind {
        "text" => Ok(Format::Text),
        "json_object" => Ok(Format::JsonObject),
        _ => {
            let message = format!("{place} is {kind:?}, expected text, json_object or json_schema");
            Err(Failure::invalid(place, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::of(value, "").expect("an object")
    }

    #[test]
    fn tools_have_schemas_and_one_may_be_named() {
        let mut all = fields(json!({
            "tools": [{ "type": "function", "function": {
                "name": "f", "description": "Adds.", "strict": true,
                "parameters": { "type": "object", "properties": { "b": {}, "a": {} } },
            } }],
            "tool_choice": { "type": "function", "function": { "name": "f" } },
        }));
        let read = tools(&mut all).expect("one tool");
        assert_eq!((read[0].name.as_str(), read[0].strict), ("f", true));
        let schema = read[0].parameters.as_ref().expect("a schema").to_string();
        assert_eq!(schema, r#"{"type":"object","properties":{"b":{},"a":{}}}"#);
        assert_eq!(choice(&mut all).expect("a function"), ToolChoice::Named("f".to_owned()));
        let of_responses = json!({ "tool_choice": { "type": "function", "name": "f" } });
        assert_eq!(choice(&mut fields(of_responses)).expect("a function"), ToolChoice::Named("f".to_owned()));
        let wrong = choice(&mut fields(json!({ "tool_choice": "any" }))).expect_err("no such choice");
        assert_eq!(wrong.param.as_deref(), Some("tool_choice"));
        let wrong =
            tools(&mut fields(json!({ "tools": [{ "type": "web_search" }] }))).expect_err("no function");
        assert_eq!(wrong.param.as_deref(), Some("tools[0].type"));
    }

    #[test]
    fn an_answer_is_text_or_json() {
        let of = |value: Value| response_format(&mut fields(json!({ "response_format": value })));
        assert!(matches!(of(json!({ "type": "json_object" })), Ok(Format::JsonObject)));
        assert!(matches!(of(Value::Null), Ok(Format::Text)));
        let schema =
            json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": true, "schema": {} } });
        assert!(matches!(of(schema), Ok(Format::JsonSchema(_))));
        let wrong =
            of(json!({ "type": "json_schema", "json_schema": { "name": "x" } })).expect_err("no schema");
        assert_eq!(wrong.param.as_deref(), Some("response_format.json_schema.schema"));
        assert_eq!(
            of(json!({ "type": "xml" })).expect_err("xml").param.as_deref(),
            Some("response_format.type")
        );
    }
}
