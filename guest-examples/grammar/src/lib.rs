//! Answers by a grammar, however hot they are drawn: text in a context-free language, in the syntax of Lark, or one of some texts
//! (S. Geng and others, "Grammar-Constrained Decoding for Structured NLP Tasks without Finetuning", 2023).
//!
//! The host's llguidance (github.com/guidance-ai/llguidance) parses what was drawn and works out which tokens the grammar has
//! next. As in the paper these are drawn as likely as they are to the model among each other; grammars that depend on the prompt
//! are made by the guest, as is the choice here.
//!
//! ```text
//! trellis run grammar "Use the calculator tool to work out 12 * 7."
//! trellis run grammar --choice "yes|no|perhaps" "Is 12 a prime number?"
//! trellis run grammar --lark 'start: "red" | start " and red"' "Name some colours."
//! ```

use std::error::Error;

use trellis_guest::{Args, Chat, Constraint, Model, Result, Sampler, emit, seed};

trellis_guest::main!(run);

const USAGE: &str =
    "grammar [--lark GRAMMAR | --choice TEXT|TEXT|...] [--temperature T] [--max-tokens N] PROMPT";

/// Sums, products and parentheses: what is kept to unless something else is said.
const ARITHMETIC: &str = r#"
start: product (" + " product)*
product: factor (" * " factor)*
factor: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,2}/
"#;

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = Args::of_session(USAGE);
    let (lark, choice): (Option<String>, Option<String>) = (args.option("--lark")?, args.option("--choice")?);
    let temperature = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(200);
    if lark.is_some() && choice.is_some() {
        return Err(args.mistake("--lark and --choice are two grammars".to_owned()).into());
    }
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let constraint = match choice {
        Some(texts) => Constraint::choice(&model, texts.split('|'))?,
        None => Constraint::lark(&model, lark.as_deref().unwrap_or(ARITHMETIC))?,
    };
    let sampler = Sampler::seeded(seed()).temperature(temperature).constraint(&constraint).build()?;

    let context = model.context()?;
    context.set_chat(&Chat::new().user(&prompt))?;
    let answer = context.generate(&sampler).max_tokens(max_tokens).emit().run()?;
    if !answer.is_finished() {
        return Err(format!("the text is not whole after {max_tokens} tokens").into());
    }
    Ok(emit("\n")?)
}
