//! Writes on for as long as it is asked to, in the memory of a window: of all tokens the first few stay, the *sinks*, and the
//! last ones (G. Xiao and others, "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, arXiv 2309.17453).
//! Each token is computed once, however long the text gets. At the end it says what the window cost: the perplexity of the
//! beginning of the text as it was written, beside that under a context that holds all of it.
//!
//! ```text
//! trellis run streaming-llm "Once upon a time"
//! trellis run streaming-llm --window 256 --sinks 4 --max-tokens 2000 --json "Once upon a time"
//! ```

use serde::Serialize;
use trellis_guest::{
    Args, Model, Result, Sampler, SlidingWindow, Token, emit, emit_json, seed, time_left, usage,
};

trellis_guest::main!(run);

const USAGE: &str =
    "streaming-llm [--window N] [--sinks N] [--piece N] [--max-tokens N] [--temperature T] [--json] TEXT";

/// Tokens whose perplexity is taken with and without the window.
const N_COMPARED: usize = 1000;

#[derive(Serialize)]
struct Report {
    n_tokens: usize,
    /// Tokens that the model computed for them, those of the prompt included.
    n_computed: u64,
    n_evicted: u32,
    /// The most pages that were held after any token.
    n_pages_most: u64,
    /// What each thousand tokens took, in milliseconds.
    ms_of_thousands: Vec<u64>,
    n_compared: usize,
    perplexity: f64,
    perplexity_of_all: f64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_window: u32 = args.option("--window")?.unwrap_or(256);
    let n_sinks: u32 = args.option("--sinks")?.unwrap_or(4);
    let n_piece: u32 = args.option("--piece")?.unwrap_or(1);
    let max_tokens: usize = args.option("--max-tokens")?.unwrap_or(2000);
    let temperature = args.option("--temperature")?.unwrap_or(0.8);
    // A token that may go, and the last one, which stays.
    if n_window < 2 || n_sinks > n_window - 2 {
        let least = "and has to have two tokens more than there are --sinks";
        return Err(args.mistake(format!("--window is {n_window}, {least}, {n_sinks}")));
    }
    let n_piece_max = n_window - n_sinks - 1;
    if !(1..=n_piece_max).contains(&n_piece) {
        return Err(args.mistake(format!("--piece is {n_piece}, and has to be from 1 to {n_piece_max}")));
    }
    let text = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    context.append(model.info().bos_token.as_slice())?;
    context.append_text(&text)?;
    let prompt = context.tokens();
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    let window = SlidingWindow::new(n_sinks, n_window);

    let (mut written, mut logprobs) = (Vec::new(), Vec::new());
    let (mut n_evicted, mut n_pages_most) = (0, 0);
    let (mut ms_of_thousands, mut before) = (Vec::new(), time_left());
    let mut decoder = model.text_decoder();
    while written.len() < max_tokens {
        if context.length() >= n_window {
            n_evicted += window.make_room(&context, n_piece)?;
        }
        let drawn = context.step(&sampler)?;
        written.push(drawn.token);
        logprobs.push(f64::from(drawn.logprob));
        n_pages_most = usage().pages.used.max(n_pages_most);
        if written.len().is_multiple_of(1000) {
            let now = time_left();
            ms_of_thousands.push(before.saturating_sub(now).as_millis() as u64);
            before = now;
        }
        if !json {
            emit!("{}", decoder.push(drawn.token)?)?;
        }
    }
    let n_computed = usage().tokens.used;

    let n_free = context.capacity() as usize - prompt.len();
    let n_compared = written.len().min(N_COMPARED).min(n_free);
    let perplexity_of_all = perplexity(&scored(&model, &prompt, &written[..n_compared])?);
    let perplexity = perplexity(&logprobs[..n_compared]);
    let n_tokens = written.len();
    if json {
        return emit_json(&Report {
            n_tokens,
            n_computed,
            n_evicted,
            n_pages_most,
            ms_of_thousands,
            n_compared,
            perplexity,
            perplexity_of_all,
        });
    }
    emit!("{}\n\n", decoder.finish())?;
    emit!("{n_tokens} tokens, {n_computed} computed, at most {n_pages_most} pages; ")?;
    emit!(
        "perplexity of the first {n_compared}: {perplexity:.2}, with all of them in sight {perplexity_of_all:.2}\n"
    )
}

/// The log-probabilities of the tokens in a context that holds all before each.
fn scored(model: &Model, prompt: &[Token], tokens: &[Token]) -> Result<Vec<f64>> {
    if tokens.is_empty() {
        return Ok(Vec::new());
    }
    let whole = model.context()?;
    whole.append(prompt)?;
    Ok(whole.score(tokens)?.into_iter().map(f64::from).collect())
}

fn perplexity(logprobs: &[f64]) -> f64 {
    (-logprobs.iter().sum::<f64>() / logprobs.len().max(1) as f64).exp()
}
