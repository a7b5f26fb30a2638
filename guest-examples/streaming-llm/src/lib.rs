//! Writes on for as long as it is asked to, in the memory of a window: of all tokens the first few stay, the *sinks*, and the
//! last ones (G. Xiao and others, "Efficient Streaming Language Models with Attention Sinks", ICLR 2024). Each token is computed
//! once, however long the text gets. At the end it says what the window cost: the perplexity of the beginning of the text as it was
//! written, beside that under a context that holds all of it.
//!
//! As in the paper positions are those in the window. There each token makes room for one; here room is made for `--piece` tokens
//! at a time, which are then decoded without a call for each. Models that were trained with a sink are not here.
//!
//! ```text
//! trellis run streaming-llm "Once upon a time"
//! trellis run streaming-llm --window 256 --sinks 4 --max-tokens 2000 --json "Once upon a time"
//! ```

use serde::Serialize;
use trellis_guest::{Args, Model, Result, Sampler, SlidingWindow, emit, emit_json, seed, usage};

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
    /// The most pages that were held after any piece.
    n_pages_most: u64,
    n_compared: usize,
    /// Null, as the next one, where none was compared.
    perplexity: f64,
    perplexity_of_all: f64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let model = Model::open_default()?;
    let context = model.context()?;
    let n_window = args.option("--window")?.unwrap_or(256).min(context.capacity());
    let n_sinks: u32 = args.option("--sinks")?.unwrap_or(4);
    let n_piece: u32 = args.option("--piece")?.unwrap_or(16);
    let max_tokens: usize = args.option("--max-tokens")?.unwrap_or(2000);
    let temperature = args.option("--temperature")?.unwrap_or(0.8);
    // Beside the sinks and a piece there is the last token, which stays.
    if n_piece == 0 || u64::from(n_window) < u64::from(n_sinks) + u64::from(n_piece) + 1 {
        let parts = format!("{n_sinks} sinks, a piece of {n_piece}, which is at least 1, and one token more");
        return Err(args.mistake(format!("--window is {n_window}, and has to hold {parts}")));
    }
    let text = args.text()?;

    context.append(model.info().bos_token.as_slice())?;
    context.append_text(&text)?;
    let whole = context.fork()?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    let window = SlidingWindow::new(n_sinks, n_window);

    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    let (mut n_evicted, mut n_pages_most) = (0, 0);
    while tokens.len() < max_tokens {
        let n = n_piece.min((max_tokens - tokens.len()) as u32);
        n_evicted += window.make_room(&context, n)?;
        let piece = context.generate(&sampler).stop_tokens(&[]).max_tokens(n);
        let piece = if json { piece.run()? } else { piece.emit().run()? };
        tokens.extend(piece.tokens);
        logprobs.extend(piece.logprobs);
        n_pages_most = usage().pages.used.max(n_pages_most);
    }
    let n_computed = usage().tokens.used;

    let n_free = (whole.capacity() - whole.length()) as usize;
    let n_compared = tokens.len().min(N_COMPARED).min(n_free);
    let of_all = if n_compared == 0 { Vec::new() } else { whole.score(&tokens[..n_compared])? };
    let perplexity_of_all = perplexity(&of_all);
    let perplexity = perplexity(&logprobs[..n_compared]);
    let n_tokens = tokens.len();
    if json {
        return emit_json(&Report {
            n_tokens,
            n_computed,
            n_evicted,
            n_pages_most,
            n_compared,
            perplexity,
            perplexity_of_all,
        });
    }
    emit!("\n\n{n_tokens} tokens, {n_computed} computed, at most {n_pages_most} pages; ")?;
    emit!("perplexity of the first {n_compared}: {perplexity:.2}, of all in sight {perplexity_of_all:.2}\n")
}

fn perplexity(logprobs: &[f32]) -> f64 {
    let sum: f64 = logprobs.iter().map(|&logprob| f64::from(logprob)).sum();
    (-sum / logprobs.len() as f64).exp()
}
