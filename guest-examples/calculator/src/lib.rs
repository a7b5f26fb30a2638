//! A tool call: the guest stops at the model's call, works it out, forces the result into the conversation and
//! lets the model go on (a calculator is among the tools of T. Schick and others, "Toolformer: Language Models Can Teach
//! Themselves to Use Tools", 2023; how a model learns to call them is not here, and the calls are JSON).
//!
//! ```text
//! trellis run calculator "Use the calculator tool to work out 12 * 7."
//! ```
//!
//! The stream is dropped at the closing brace of the call, whatever the model would have said next. What the
//! engine had decoded ahead is forgotten, and the result takes its place.

use fasteval3::{EmptyNamespace, ez_eval};
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
        let result = evaluate(&call.expression);
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

/// The value of an expression, or what is wrong with it, for the model to read. Long ones and deep ones are errors too.
fn evaluate(expression: &str) -> String {
    match ez_eval(expression, &mut EmptyNamespace) {
        Ok(value) if value.is_finite() => value.to_string(),
        Ok(_) => "error: the result is not a finite number".to_owned(),
        Err(error) => format!("error: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::evaluate;

    #[test]
    fn what_is_wrong_is_said_to_the_model() {
        assert_eq!(evaluate("(2 + 3) * -4 / 8"), "-2.5");
        assert_eq!(evaluate("1 / (2 - 2)"), "error: the result is not a finite number");
        for wrong in ["12 ? 7", "12 *", "", "(1 2)", "1.2.3", "x", &"(".repeat(1000), &"-".repeat(9999)] {
            assert!(evaluate(wrong).starts_with("error: "), "{wrong}");
        }
    }
}
