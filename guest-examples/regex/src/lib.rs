//! Answers by a regular expression, however hot they are drawn: decoding along an automaton, of whose state it depends which
//! tokens may come (B. T. Willard and R. Louf, "Efficient Guided Generation for Large Language Models", 2023; T. Koo, F. Liu and
//! L. He, "Automata-based constraints for language model decoding", 2024).
//!
//! In the papers the tokens of all states are worked out before. The host's llguidance (github.com/guidance-ai/llguidance) goes
//! along derivatives of the expression and makes the mask of a state when it comes there, while the model computes.
//!
//! ```text
//! trellis run regex --regex "[0-9]{2}" "What is 37 + 48?"
//! trellis run regex --after " " --regex "[A-Z][a-z]+\." "Tell me a short story."
//! ```
//!
//! With `--after` what is kept to begins after that text, and what is before it is free.

use std::error::Error;

use trellis_guest::{Args, Beginning, Chat, Constraint, Model, Result, Sampler, emit, seed};

trellis_guest::main!(run);

const USAGE: &str = "regex [--regex REGEX] [--after TEXT] [--temperature T] [--max-tokens N] PROMPT";

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = Args::of_session(USAGE);
    let regex = args.option("--regex")?.unwrap_or_else(|| "[0-9]+".to_owned());
    let begins = args.option("--after")?.map_or(Beginning::FirstDraw, Beginning::AfterText);
    let temperature = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(200);
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let constraint = Constraint::regex(&model, &regex)?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    sampler.set_constraint(Some(&constraint), &begins)?;

    let context = model.context()?;
    context.set_chat(&Chat::new().user(&prompt))?;
    let answer = context.generate(&sampler).max_tokens(max_tokens).emit().run()?;
    if !answer.is_finished() {
        return Err(format!("the expression does not match the text of {max_tokens} tokens").into());
    }
    Ok(emit("\n")?)
}
