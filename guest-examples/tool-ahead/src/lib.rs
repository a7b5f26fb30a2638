//! Guesses what a tool will say and decodes on from the guess while the tool is still at work. When its result comes and is what
//! was guessed, what was decoded stays; otherwise it is rolled back. The text is the same as without the guess, and comes sooner:
//! N. Ye and others, "Speculative Actions: A Lossless Framework for Faster Agentic Systems", 2025.
//!
//! Of the paper, this is the case of one tool and one guess, made by the model itself, and its losslessness; guesses at what the
//! agent will call next, and several guesses at once, are not here.
//!
//! ```text
//! trellis run tool-ahead "Use the calculator tool to work out 12 * 7."     then type the result: 84
//! trellis run tool-ahead --no-guess --json "Use the calculator tool to work out 12 * 7."
//! ```
//!
//! The client is the tool: it is sent `{"expression": "12 * 7"}`, and its next message is the result.

use serde::{Deserialize, Serialize};
use trellis_guest::{
    Args, Chat, Constraint, Inbox, Model, Result, Sampler, emit, emit_json, receive, seed, try_receive,
};

trellis_guest::main!(run);

const USAGE: &str = "tool-ahead [--no-guess] [--temperature T] [--max-tokens N] [--json] PROMPT";

#[derive(Deserialize, Serialize)]
struct Call {
    expression: String,
}

#[derive(Default, Serialize)]
struct Report {
    /// None where no result came.
    text: Option<String>,
    guess: Option<String>,
    /// None where none came, or no tool was called.
    result: Option<String>,
    /// Tokens of the text that were there when the result came.
    n_ahead: u32,
    /// Those that were decoded after it.
    n_after: u32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let (no_guess, json) = (args.flag("--no-guess"), args.flag("--json"));
    let temperature = args.option("--temperature")?.unwrap_or(0.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(64);
    let mut chat = Chat::new().user(&args.text()?);

    let model = Model::open_default()?;
    let context = model.context()?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    context.set_chat(&chat)?;
    let said = context.generate(&sampler).max_tokens(max_tokens).run()?.text;
    let Ok(call) = serde_json::from_str::<Call>(&said) else {
        return tell(json, &Report { text: Some(said), ..Report::default() });
    };
    emit_json(&call)?;
    chat.push("assistant", &said);

    // What the context holds and this conversation does not begin with is taken back.
    let answer_to = |result: &str| {
        context.set_chat(&chat.clone().with("tool", result))?;
        context.stream(&sampler).max_tokens(max_tokens).text()
    };
    let guess = if no_guess { None } else { Some(guess(&model, &call)?) };
    let (mut text, mut n_ahead, mut stream, mut result) = (String::new(), 0, None, None);
    if let Some(guess) = &guess {
        let ahead = stream.insert(answer_to(guess)?);
        let n_before = context.length();
        while result.is_none()
            && let Some(piece) = ahead.next()
        {
            text += &piece?;
            if let Inbox::Message(message) = try_receive()? {
                result = Some(message);
            }
        }
        n_ahead = context.length() - n_before;
    }

    let Some(result) = result.map_or_else(receive, |result| Ok(Some(result)))? else {
        return tell(json, &Report { guess, n_ahead, ..Report::default() });
    };
    let result = result.trim().to_owned();
    if guess.as_ref() != Some(&result) {
        (text, n_ahead, stream) = (String::new(), 0, Some(answer_to(&result)?));
    }
    let n_before = context.length();
    for piece in stream.into_iter().flatten() {
        text += &piece?;
    }
    let n_after = context.length() - n_before;
    tell(json, &Report { text: Some(text), guess, result: Some(result), n_ahead, n_after })
}

fn tell(json: bool, report: &Report) -> Result {
    let text = report.text.as_deref().unwrap_or("no result came");
    if json { emit_json(report) } else { emit!("{text}\n") }
}

/// What the model believes that the tool will say.
fn guess(model: &Model, call: &Call) -> Result<String> {
    let context = model.context()?;
    context.set_chat(&Chat::new().user(&format!("What is {}?", call.expression)))?;
    let number = Constraint::regex(model, r"-?[0-9]+(\.[0-9]+)?")?;
    let sampler = Sampler::seeded(0).temperature(0.0).constraint(&number).build()?;
    Ok(context.generate(&sampler).max_tokens(12).run()?.text)
}
