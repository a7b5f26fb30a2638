//! A tool call: the guest stops at the model's call, works it out, forces the result into the conversation and
//! lets the model go on.
//!
//! ```text
//! trellis run calculator "Use the calculator tool to work out 12 * 7."
//! ```
//!
//! The stream is dropped at the closing brace of the call, whatever the model would have said next. What the
//! engine had decoded ahead is forgotten, and the result takes its place.

mod expression;

use serde::Deserialize;
use trellis_guest::{Args, Chat, Context, LogLevel, Model, Result, Sampler, emit, log};

trellis_guest::main!(run);

const USAGE: &str = "calculator [--max-tokens N] PROMPT";

/// So that a model which calls for ever comes to an end.
const N_CALLS_MAX: usize = 4;

#[derive(Deserialize)]
struct Call {
    tool: String,
    expression: String,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(128);
    let mut chat = Chat::new().user(&args.text()?);

    let context = Model::open_default()?.context()?;
    for _ in 0..N_CALLS_MAX {
        context.set_chat(&chat)?;
        let (text, call) = answer(&context, max_tokens)?;
        let Some(call) = call else { return emit!("{text}\n") };
        let result = match expression::evaluate(&call.expression) {
            Ok(value) => value.to_string(),
            Err(problem) => format!("error: {problem}"),
        };
        log(LogLevel::Info, &format!("calculator: {} = {result}", call.expression));
        chat.push("assistant", &text);
        chat.push("tool", &result);
    }
    emit!("gave up after {N_CALLS_MAX} calls\n")
}

/// The model's answer, cut off where it turns out to be a call.
fn answer(context: &Context, max_tokens: u32) -> Result<(String, Option<Call>)> {
    let mut text = String::new();
    for piece in context.stream(&Sampler::greedy()).max_tokens(max_tokens).text()? {
        text.push_str(&piece?);
        let call = serde_json::from_str::<Call>(&text).ok().filter(|call| call.tool == "calculator");
        if call.is_some() {
            return Ok((text, call));
        }
    }
    Ok((text, None))
}
