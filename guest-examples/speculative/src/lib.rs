//! Speculative decoding: a small model that shares the tokenizer guesses what comes, and the model takes over what it would have
//! drawn itself, several tokens in one step (Y. Leviathan and others, "Fast Inference from Transformers via Speculative
//! Decoding", ICML 2023). With `--width` the guesses are a tree: beside each token of the draft stand those that it finds as
//! likely, so that a step goes on where its second choice is the model's first (X. Miao and others, "SpecInfer", 2023; T. Cai
//! and others, "Medusa", 2024).
//!
//! In the paper a guess is accepted by chance, so that the text is distributed as without. Here both models draw with the same
//! noise, and a guess is right where it is what the model draws: the text is the very same as without, at any temperature. The
//! trees are of a draft model, as in SpecInfer; Medusa's additional heads are not there.
//!
//! ```text
//! trellis run --model tiny --model draft speculative "Think step by step: what is 468 + 275?"
//! trellis run --model tiny --model draft speculative --width 3 --temperature 0.7 --raw "Ownership is"
//! ```
//!
//! `--raw` takes the prompt as it is, special tokens included, in place of a chat message. `complete --guess draft` leaves all of
//! this to the host.

use serde::Serialize;
use trellis_guest::{
    Args, Chat, Error, GuessTree, LogLevel, Model, Result, Sampler, Token, emit, emit_json, log, seed,
};

trellis_guest::main!(run);

const USAGE: &str = "speculative [--draft MODEL] [--guesses N] [--width N] [--temperature T] [--max-tokens N] \
                     [--raw] [--json] PROMPT";

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
    let draft = args.option("--draft")?.unwrap_or_else(|| "draft".to_owned());
    let n_guesses: u32 = args.option("--guesses")?.unwrap_or(4);
    let width: usize = args.option("--width")?.unwrap_or(1);
    let temperature = args.option("--temperature")?.unwrap_or(0.0);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(200);
    let prompt = args.text()?;

    let (model, small) = (Model::open_default()?, Model::open(&draft)?);
    // The tokens of one model say nothing to another that counts them otherwise.
    if model.info().tokenizer != small.info().tokenizer {
        return Err(Error::ModelMismatch { left: model.info().name.clone(), right: draft });
    }
    let (context, draft) = (model.context()?, small.context()?);
    if raw {
        context.append_markup(&prompt)?;
    } else {
        context.set_chat(&Chat::new().user(&prompt))?;
    }
    draft.append(&context.tokens())?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;

    let (mut tokens, mut steps, mut guessed, mut accepted) = (Vec::new(), 0, 0, 0);
    let n_free = context.capacity().min(draft.capacity()) - context.length();
    let end = context.length() + max_tokens.min(n_free);
    let mut has_stopped = false;
    while !has_stopped && context.length() < end {
        // The draft may guess the end of an answer too. The last token is drawn without a guess.
        let n = n_guesses.min(end - context.length() - 1);
        let guess = draft.generate(&sampler).stop_tokens(&[]).max_tokens(n).top(width as u32).run()?;
        let mut tree = GuessTree::new();
        tree.add_chain(None, &guess.tokens);
        for (depth, top) in guess.tops.iter().enumerate() {
            let behind = tree.add_chain(None, &guess.tokens[..depth]);
            let others = top.candidates.iter().filter(|other| other.token != guess.tokens[depth]);
            for other in others.take(width - 1) {
                tree.add(behind, other.token);
            }
        }

        let drawn = context.speculate_tree(&sampler, &tree)?;
        steps += 1;
        guessed += tree.len();
        accepted += tree.n_right(&drawn);
        let drawn: Vec<Token> = drawn.iter().map(|drawn| drawn.token).collect();
        // The draft goes back to where it was right, and on with what was drawn.
        let n_right = guess.tokens.iter().zip(&drawn).take_while(|(guess, drawn)| guess == drawn).count();
        draft.truncate(draft.length() - (guess.tokens.len() - n_right) as u32)?;
        draft.append(&drawn[n_right..])?;

        let n_to_stop = drawn.iter().position(|&token| model.is_stop(token));
        has_stopped = n_to_stop.is_some();
        tokens.extend(&drawn[..n_to_stop.map_or(drawn.len(), |n| n + 1)]);
    }

    let text = model.decode(if has_stopped { &tokens[..tokens.len() - 1] } else { &tokens })?;
    let tokens = tokens.len();
    // Of no tokens nothing is saved.
    let saved = 1.0 - f64::from(steps.max(1)) / tokens.max(1) as f64;
    if json {
        return emit_json(&Report { text, tokens, steps, guessed, accepted, saved });
    }
    let cost = format!("{tokens} tokens in {steps} steps, {:.0}% saved", 100.0 * saved);
    log(LogLevel::Info, &format!("{cost}; {accepted} of {guessed} guesses were right"));
    emit!("{text}\n")
}
