//! Answers in JSON that keeps to a schema, however hot it is drawn. The host works out what may come next while the model
//! computes, and several tokens that the schema forces (the keys of an object) come in one step.
//!
//! Of the approaches that S. Geng and others compare, "JSONSchemaBench: A Rigorous Benchmark of Structured Outputs for Language
//! Models" (2025), the host takes llguidance's (github.com/guidance-ai/llguidance): an Earley parser beside a mask for each
//! token. A keyword of JSON Schema that it would not wholly keep to is refused.
//!
//! ```text
//! trellis run json-schema "Ada, a pilot from Oslo, is 36."
//! trellis run json-schema --schema '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}' "Name some primes."
//! ```
//!
//! With `--after "</think>"` the JSON begins after that text, and what is before it is free.

use std::error::Error;

use trellis_guest::{Args, Beginning, Chat, Constraint, Model, Result, Sampler, emit, seed};

trellis_guest::main!(run);

const USAGE: &str = "json-schema [--schema JSON] [--after TEXT] [--temperature T] [--max-tokens N] PROMPT";

/// What is kept to unless something else is said.
const PERSON: &str = r#"{"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "skills": {"type": "array", "items": {"enum": ["reads", "writes", "sings"]}, "maxItems": 3}
}, "required": ["name", "age", "skills"], "additionalProperties": false}"#;

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = Args::of_session(USAGE);
    let schema = args.option("--schema")?.unwrap_or_else(|| PERSON.to_owned());
    let begins = args.option("--after")?.map_or(Beginning::FirstDraw, Beginning::AfterText);
    let temperature = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(200);
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let constraint = Constraint::json_schema(&model, &schema)?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    sampler.set_constraint(Some(&constraint), &begins)?;

    let context = model.context()?;
    context.set_chat(&Chat::new().user(&prompt))?;
    let answer = context.generate(&sampler).max_tokens(max_tokens).emit().run()?;
    if !answer.is_finished() {
        return Err(format!("the JSON is not whole after {max_tokens} tokens").into());
    }
    Ok(emit("\n")?)
}
