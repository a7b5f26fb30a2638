//! Text that keeps to a JSON schema, a regular expression, a Lark grammar or a choice, however hot it is drawn.
//!
//! ```text
//! trellis run constrained --choice "yes|no|perhaps" "Is 12 a prime number?"
//! trellis run constrained --schema '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}' "Name some primes."
//! trellis run constrained --after "</think>" --regex "[0-9]+" "What is 37 + 48?"
//! ```
//!
//! The host compiles the grammar with llguidance (github.com/guidance-ai/llguidance) and works out what may come next while the
//! model computes: decoding token by token under a grammar as in Willard and Louf, "Efficient Guided Generation for Large
//! Language Models" (2023), and Koo, Liu and He, "Automata-based constraints for language models" (2024). The sampler
//! need not know of it: only the tokens that the grammar has at their place are left to it.

use std::error::Error;

use trellis_guest::{Args, Beginning, Chat, Constraint, Model, Result, Sampler, emit, seed};

trellis_guest::main!(run);

const USAGE: &str = "constrained [--schema JSON | --regex REGEX | --lark GRAMMAR | --choice A|B|...] [--after TEXT] \
                     [--temperature T] [--max-tokens N] TEXT";

/// What is kept to unless something else is said.
const PERSON: &str = r#"{"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "skills": {"type": "array", "items": {"enum": ["reads", "writes", "sings"]}, "maxItems": 3}
}, "required": ["name", "age", "skills"], "additionalProperties": false}"#;

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = Args::of_session(USAGE);
    let [schema, regex, lark, choice, after] =
        ["--schema", "--regex", "--lark", "--choice", "--after"].map(|name| args.option::<String>(name));
    let (schema, regex, lark, choice, after) = (schema?, regex?, lark?, choice?, after?);
    let temperature = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(200);
    let text = args.text()?;

    let model = Model::open_default()?;
    let constraint = match (schema, regex, lark, choice) {
        (None, Some(regex), None, None) => Constraint::regex(&model, &regex)?,
        (None, None, Some(grammar), None) => Constraint::lark(&model, &grammar)?,
        (None, None, None, Some(texts)) => Constraint::choice(&model, texts.split('|'))?,
        (schema, None, None, None) => Constraint::json_schema(&model, schema.as_deref().unwrap_or(PERSON))?,
        _ => return Err(format!("one grammar at a time\nusage: {USAGE}").into()),
    };
    let begins = after.map_or(Beginning::FirstDraw, Beginning::AfterText);
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    sampler.set_constraint(Some(&constraint), &begins)?;

    let context = model.context()?;
    context.set_chat(&Chat::new().user(&text))?;
    let answer = context.generate(&sampler).max_tokens(max_tokens).emit().run()?;
    if !answer.is_finished() {
        return Err(format!("the text is not whole after {max_tokens} tokens").into());
    }
    Ok(emit("\n")?)
}
