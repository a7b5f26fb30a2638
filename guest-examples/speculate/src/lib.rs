//! Decodes with guesses. A small model that shares the tokenizer, or the text so far, says what may come next; the model
//! takes over what it would have drawn itself, several tokens in one step. The text is the same as without guesses.
//!
//! ```text
//! trellis run speculate "Write the days of the week three times."
//! trellis run --model tiny --model draft speculate --draft draft "Think step by step: what is 468 + 275?"
//! trellis run --model tiny --model draft speculate --draft draft --temperature 0.7 "Tell me a short story."
//! trellis run --model tiny --model draft speculate --draft draft --width 3 --raw "Ownership is"
//! ```
//!
//! With `--width` the guesses are a tree: beside each token of the draft what it finds as likely, so that a step goes one token
//! further where the draft's second choice is the model's first (Miao and others, "SpecInfer", arXiv 2305.09781; Cai and others,
//! "Medusa", arXiv 2401.10774).
//!
//! Without `--draft` the guess is what followed the last tokens when they stood in the text before. `--raw` takes the
//! prompt as it is, special tokens included, in place of a chat message. `--json` prints what was decoded and at what
//! cost: `{"text": ..., "tokens": 41, "steps": 12, "guessed": 44, "accepted": 29, "saved": 0.707}`.

mod draft;
mod lookup;

use draft::Draft;
use lookup::Lookup;
use serde::Serialize;
use trellis_guest::{
    Args, Candidate, Chat, Error, GuessTree, LogLevel, Model, Result, Sampler, emit, emit_json, log, seed,
};

trellis_guest::main!(run);

const USAGE: &str = "speculate [--draft MODEL] [--guesses N] [--width N] [--temperature T] [--top-p P] [--max-tokens N] \
                     [--raw] [--json] PROMPT";

/// Guesses in one step at most: what the host takes.
const N_GUESSES_MAX: usize = 15;

/// Alternatives in one place at most: with 15 places they are as many guesses as the host takes.
const WIDTH_MAX: usize = 4;

/// Where guesses come from.
enum Guesser {
    Draft(Draft),
    Lookup(Lookup),
}

impl Guesser {
    /// What may come next: at most `n` tokens one after the other, and `width` in each place.
    fn guess(&mut self, n: usize, width: usize) -> Result<GuessTree> {
        match self {
            Self::Draft(draft) => draft.guess(n, width),
            Self::Lookup(lookup) => {
                let mut tree = GuessTree::new();
                tree.add_chain(None, &lookup.guess(n));
                Ok(tree)
            }
        }
    }

    /// What came.
    fn follow(&mut self, drawn: &[Candidate]) -> Result {
        match self {
            Self::Draft(draft) => draft.follow(drawn),
            Self::Lookup(lookup) => {
                lookup.extend(drawn.iter().map(|drawn| drawn.token));
                Ok(())
            }
        }
    }
}

/// What was decoded, and at what cost.
#[derive(Debug, Default, Serialize)]
struct Report {
    text: String,
    tokens: usize,
    /// Steps of the model; without guesses it would be one for each token.
    steps: usize,
    guessed: usize,
    accepted: usize,
    /// The share of steps that the guesses saved.
    saved: f64,
}

/// About half as many guesses: less deep, or less wide where they are no deeper than that.
fn fewer(n: usize, width: usize) -> (usize, usize) {
    if n > width || width == 1 { (n / 2, width) } else { (n, width / 2) }
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let (json, raw) = (args.flag("--json"), args.flag("--raw"));
    let draft: Option<String> = args.option("--draft")?;
    let mut n_guesses = args.option("--guesses")?.unwrap_or(if draft.is_some() { 4 } else { N_GUESSES_MAX });
    if n_guesses > N_GUESSES_MAX {
        return Err(args.mistake(format!("--guesses cannot be {n_guesses}: at most {N_GUESSES_MAX}")));
    }
    let width: Option<usize> = args.option("--width")?;
    if let Some(width) = width.filter(|width| !(1..=WIDTH_MAX).contains(width)) {
        return Err(args.mistake(format!("--width cannot be {width}: 1 to {WIDTH_MAX}")));
    }
    if width.is_some() && draft.is_none() {
        return Err(args
            .mistake("--width is for the guesses of a --draft: the text has one for each place".to_owned()));
    }
    let mut width = width.unwrap_or(1);
    let temperature = args.option("--temperature")?.unwrap_or(0.0);
    let top_p = args.option("--top-p")?.unwrap_or(1.0);
    let max_tokens: usize = args.option("--max-tokens")?.unwrap_or(200);
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    if raw {
        context.append_markup(&prompt)?;
    } else {
        context.set_chat(&Chat::new().user(&prompt))?;
    }
    let sampler = Sampler::seeded(seed()).temperature(temperature).top_p(top_p).build()?;
    let mut guesser = match draft {
        Some(name) => Guesser::Draft(Draft::new(&model, &Model::open(&name)?, &context, &sampler)?),
        None => Guesser::Lookup(Lookup::new(context.tokens())),
    };

    let mut report = Report::default();
    let mut decoder = model.text_decoder();
    let piece = |report: &mut Report, text: String| {
        report.text += &text;
        if json || text.is_empty() { Ok(()) } else { emit(&text) }
    };
    let n_end = (context.length() as usize).saturating_add(max_tokens).min(context.capacity() as usize);
    let mut has_stopped = false;
    while !has_stopped && (context.length() as usize) < n_end {
        // The last token is drawn without a guess.
        let n_left = n_end - context.length() as usize;
        let guess = guesser.guess(n_guesses.min(n_left - 1), width)?;
        let drawn = match context.speculate_tree(&sampler, &guess) {
            // More than a step of the daemon takes: from now on it is asked less.
            Err(Error::InvalidArgument { name, .. }) if name == "guess" && !guess.is_empty() => {
                guesser.follow(&[])?;
                (n_guesses, width) = fewer(n_guesses, width);
                continue;
            }
            drawn => drawn?,
        };
        report.steps += 1;
        report.guessed += guess.len();
        report.accepted += guess.n_right(&drawn);
        for drawn in &drawn {
            report.tokens += 1;
            has_stopped = model.is_stop(drawn.token);
            if has_stopped {
                break;
            }
            piece(&mut report, decoder.push(drawn.token)?)?;
        }
        guesser.follow(&drawn)?;
    }
    piece(&mut report, decoder.finish())?;
    // Of no tokens nothing is saved.
    report.saved = 1.0 - report.steps.max(1) as f64 / report.tokens.max(1) as f64;
    if json {
        return emit_json(&report);
    }
    let Report { tokens, steps, guessed, accepted, saved, .. } = report;
    let cost = format!("{tokens} tokens in {steps} steps, {:.0}% saved", 100.0 * saved);
    log(LogLevel::Info, &format!("{cost}; {accepted} of {guessed} guesses were right"));
    emit("\n")
}
