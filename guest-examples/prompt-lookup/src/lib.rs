//! Prompt lookup decoding: what followed the last tokens where they stood before, in the prompt or in the answer, is the guess at
//! what comes, and the model takes over what it would have drawn itself, several tokens in one step (A. Saxena, "Prompt Lookup
//! Decoding", 2023). It needs no second model, and saves much where an answer repeats parts of its question.
//!
//! There ten tokens are guessed after a match of three, else of two or one. Here a match has at least three, and the longer it
//! is, the more is guessed, so that little is computed in vain where nothing repeats. The text is the very same as without, at any
//! temperature.
//!
//! ```text
//! trellis run prompt-lookup "Write the days of the week three times."
//! trellis run prompt-lookup --raw --json "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
//! ```
//!
//! `--raw` takes the prompt as it is, special tokens included, in place of a chat message. `complete --guess lookup` leaves all
//! of this to the host.

use serde::Serialize;
use trellis_guest::{Args, Chat, LogLevel, Model, Result, Sampler, Token, emit, emit_json, log, seed};

trellis_guest::main!(run);

const USAGE: &str = "prompt-lookup [--guesses N] [--temperature T] [--max-tokens N] [--raw] [--json] PROMPT";

/// Tokens that have to stand there twice before anything is guessed.
const N_MATCH_MIN: usize = 3;

/// What was decoded, and at what cost.
#[derive(Serialize)]
struct Report {
    text: String,
    tokens: usize,
    /// Steps of the model; without guesses it would be one for each token.
    steps: u32,
    guessed: usize,
    accepted: usize,
    /// The share of steps that the guesses saved.
    saved: f64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let (json, raw) = (args.flag("--json"), args.flag("--raw"));
    let n_guesses: usize = args.option("--guesses")?.unwrap_or(15);
    let temperature = args.option("--temperature")?.unwrap_or(0.0);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(200);
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    if raw {
        context.append_markup(&prompt)?;
    } else {
        context.set_chat(&Chat::new().user(&prompt))?;
    }
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;

    let mut all = context.tokens();
    let n_prompt = all.len();
    let n_end = n_prompt + max_tokens.min(context.capacity() - context.length()) as usize;
    let (mut steps, mut guessed, mut accepted) = (0, 0, 0);
    let mut has_stopped = false;
    while !has_stopped && all.len() < n_end {
        // The last token is drawn without a guess.
        let guess = lookup(&all, n_guesses.min(n_end - all.len() - 1));
        let drawn = context.speculate(&sampler, &guess)?;
        steps += 1;
        guessed += guess.len();
        accepted += drawn.len() - 1;
        let n_to_stop = drawn.iter().position(|drawn| model.is_stop(drawn.token));
        has_stopped = n_to_stop.is_some();
        let n_taken = n_to_stop.map_or(drawn.len(), |n| n + 1);
        all.extend(drawn[..n_taken].iter().map(|drawn| drawn.token));
    }

    let tokens = all.len() - n_prompt;
    let text = model.decode(&all[n_prompt..all.len() - usize::from(has_stopped)])?;
    // Of no tokens nothing is saved.
    let saved = 1.0 - f64::from(steps.max(1)) / tokens.max(1) as f64;
    if json {
        return emit_json(&Report { text, tokens, steps, guessed, accepted, saved });
    }
    let cost = format!("{tokens} tokens in {steps} steps, {:.0}% saved", 100.0 * saved);
    log(LogLevel::Info, &format!("{cost}; {accepted} of {guessed} guesses were right"));
    emit!("{text}\n")
}

/// What followed the last tokens in the latest place where they stood before: at most `n` tokens, and as many as match beyond two.
fn lookup(tokens: &[Token], n: usize) -> Vec<Token> {
    let Some(last) = tokens.last_chunk::<N_MATCH_MIN>() else { return Vec::new() };
    let earlier = (N_MATCH_MIN..tokens.len()).rev().find(|&place| tokens[..place].ends_with(last));
    let Some(place) = earlier else { return Vec::new() };
    let before = tokens[..place].iter().rev().zip(tokens.iter().rev());
    let n_match = before.take_while(|(then, now)| then == now).count();
    // A loop is guessed to go on.
    tokens[place..].iter().cycle().take(n.min(n_match + 1 - N_MATCH_MIN)).copied().collect()
}
