//! Beam search written in the guest. Shows the raw speed: the engine ranks the next tokens of all beams in one
//! batch, and the guest decides which of them live.
//!
//! ```text
//! trellis run beam "What is 37 + 48?"
//! trellis run beam --beams 8 --length-penalty 0.6 --early-stopping true "Tell me a short story."
//! trellis run beam --raw --json "<|begin_of_text|>Once upon a time"
//! ```
//!
//! `--early-stopping` is `false`, `true` or `never`, as in Hugging Face transformers, and so are the results,
//! token for token. `--raw` takes the prompt as it is, special tokens included, in place of a chat message.
//! `--json` prints `{"sequences": [[token, ...], ...], "scores": [...]}`, best first.

mod search;

use std::num::NonZeroUsize;

use search::{EarlyStopping, Search, Settings};
use serde::Serialize;
use trellis_guest::{Args, Chat, Context, Model, Result, Token, emit, emit_json, top_all};

trellis_guest::main!(run);

const USAGE: &str = "beam [--beams N] [--n-best N] [--max-tokens N] [--length-penalty P] \
                     [--early-stopping false|true|never] [--raw] [--json] PROMPT";

#[derive(Serialize)]
struct Report {
    sequences: Vec<Vec<Token>>,
    scores: Vec<f32>,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let (json, raw) = (args.flag("--json"), args.flag("--raw"));
    let n_beams = args.option::<NonZeroUsize>("--beams")?.map_or(4, NonZeroUsize::get);
    let n_best = args.option("--n-best")?.unwrap_or(n_beams);
    let max_tokens = args.option::<NonZeroUsize>("--max-tokens")?.map_or(40, NonZeroUsize::get);
    let length_penalty = args.option("--length-penalty")?.unwrap_or(1.0);
    if !f64::is_finite(length_penalty) {
        return Err(args.mistake(format!("--length-penalty cannot be {length_penalty}")));
    }
    let early_stopping = args.option("--early-stopping")?.unwrap_or(EarlyStopping::False);
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    if raw {
        context.append_markup(&prompt)?;
    } else {
        context.set_chat(&Chat::new().user(&prompt))?;
    }

    let stop_tokens = model.info().stop_tokens.clone();
    let max_tokens = max_tokens.min((context.capacity() - context.length()) as usize).max(1);
    let settings = Settings { n_beams, max_tokens, length_penalty, early_stopping, stop_tokens };
    let n_candidates = settings.n_candidates().min(model.info().vocab_size as usize) as u32;
    let mut search = Search::new(settings);
    let mut contexts = vec![context];
    loop {
        let tops = top_all(&contexts, n_candidates)?;
        if search.advance(tops.iter().map(|top| top.candidates.as_slice())).is_break() {
            break;
        }
        contexts = search
            .running()
            .map(|beam| {
                let context = contexts[beam.parent_idx].fork()?;
                context.append(&[beam.token])?;
                Ok(context)
            })
            .collect::<Result<Vec<Context>>>()?;
    }

    let (sequences, scores) = search.best(n_best);
    if json {
        return emit_json(&Report { sequences, scores });
    }
    for (sequence, score) in sequences.iter().zip(scores) {
        emit!("{score:9.5}  {}\n", model.decode(sequence)?)?;
    }
    Ok(())
}
