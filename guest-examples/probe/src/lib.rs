//! The guest of `trellis bench`: does one thing often, so that the client can measure what it costs.
//!
//! ```text
//! trellis run probe first                  one call to the host, then the end
//! trellis run probe idle 100000            so many calls that ask the host for next to nothing
//! trellis run probe stream 256 "A text"    a greedy stream, piece by piece, then its tokens
//! ```
//!
//! A guest has no precise clock, on purpose: it could time its neighbours. Whoever wants to know how long
//! something takes measures outside, and subtracts a run that does less of it.

use std::hint::black_box;

use trellis_guest::{Args, Model, Result, Sampler, emit, emit_tokens};

trellis_guest::main!(run);

const USAGE: &str = "probe first | probe idle N | probe stream N TEXT";

fn run() -> Result {
    let args = Args::of_session(USAGE);
    let text = args.text()?;
    let mut words = text.splitn(3, ' ');
    let mode = words.next().unwrap_or_default();
    let n = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    match (mode, n) {
        ("first", _) => emit("."),
        ("idle", n) => idle(n),
        ("stream", n) if n > 0 => stream(n, words.next().unwrap_or_default()),
        _ => Err(Args::new(USAGE, Vec::new()).mistake(format!("there is no {text:?}"))),
    }
}

/// Makes `n` calls that do no work in the host.
fn idle(n: u32) -> Result {
    let context = Model::open_default()?.context()?;
    for _ in 0..n {
        black_box(context.length());
    }
    emit(".")
}

/// Sends the text of `n` tokens as they come, then the tokens. Stop tokens are tokens like any other here.
fn stream(n: u32, text: &str) -> Result {
    let model = Model::open_default()?;
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(text)?;
    let n_prompt = context.length();
    for piece in context.stream(&Sampler::greedy()).stop_tokens(&[]).max_tokens(n).text()? {
        emit(&piece?)?;
    }
    emit_tokens(&context.tokens_from(n_prompt))
}
