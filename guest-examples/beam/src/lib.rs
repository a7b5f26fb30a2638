//! Beam search: the most probable continuations that a search over several hypotheses at once finds, equal to those of
//! Hugging Face transformers. The engine searches; the guest looks in between only where it prunes: what is so many nats behind the
//! best is dropped after each token (M. Freitag and Y. Al-Onaizan, "Beam Search Strategies for Neural Machine Translation",
//! 2017; of their four ways of pruning this is the absolute threshold).
//!
//! ```text
//! trellis run beam "What is 37 + 48?"
//! trellis run beam --beams 8 --length-penalty 0.6 --early-stopping true "Tell me a short story."
//! trellis run beam --prune 2.5 "Tell me a short story."
//! trellis run beam --raw --json "<|begin_of_text|>Once upon a time"
//! ```
//!
//! `--early-stopping` is `false`, `true` or `never`, as in transformers, and so are the results, token for token.
//! With `--prune` what is settled is shown as it comes. `--raw` takes the prompt as it is, special tokens included, in place of a
//! chat message.
//! `--json` prints `{"sequences": [[token, ...], ...], "scores": [...]}`, best first.

use serde::Serialize;
use trellis_guest::{
    Args, BeamSearch, Chat, EarlyStopping, Finished, Kept, Model, Result, Token, emit, emit_json,
};

trellis_guest::main!(run);

const USAGE: &str = "beam [--beams N] [--n-best N] [--max-tokens N] \
                     [--length-penalty P] [--early-stopping false|true|never] [--prune NATS] [--raw] [--json] PROMPT";

#[derive(Serialize)]
struct Report {
    sequences: Vec<Vec<Token>>,
    scores: Vec<f32>,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let (json, raw) = (args.flag("--json"), args.flag("--raw"));
    let n_beams = args.option("--beams")?.unwrap_or(4);
    let n_best = args.option("--n-best")?.unwrap_or(n_beams);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(40);
    let length_penalty = args.option("--length-penalty")?.unwrap_or(1.0);
    let early_stopping = match args.option::<String>("--early-stopping")?.as_deref() {
        None | Some("false") => EarlyStopping::Heuristic,
        Some("true") => EarlyStopping::AtOnce,
        Some("never") => EarlyStopping::Never,
        Some(other) => return Err(args.mistake(format!("--early-stopping cannot be {other}"))),
    };
    let prune: Option<f32> = args.option("--prune")?;
    if let Some(nats) = prune
        && (nats.is_nan() || nats < 0.0)
    {
        return Err(args.mistake(format!("--prune is {nats}, expected at least 0")));
    }
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    if raw {
        context.append_markup(&prompt)?;
    } else {
        context.set_chat(&Chat::new().user(&prompt))?;
    }
    let search = context
        .beams(n_beams)
        .length_penalty(length_penalty)
        .early_stopping(early_stopping)
        .max_tokens(max_tokens.min(context.capacity() - context.length()))
        .open()?;
    match prune {
        Some(nats) => search_pruned(&model, &search, nats, json)?,
        None => search.run()?,
    }

    let best = search.best(n_best);
    if json {
        let (sequences, scores) = best.into_iter().map(|one| (one.tokens, one.score)).unzip();
        return emit_json(&Report { sequences, scores });
    }
    for Finished { tokens, score } in best {
        emit!("{score:9.5}  {}\n", model.decode(&tokens)?)?;
    }
    Ok(())
}

/// Goes on token by token without what is so many nats behind the best, and shows what is settled unless it is to be quiet.
fn search_pruned(model: &Model, search: &BeamSearch, nats: f32, is_quiet: bool) -> Result {
    let mut n_shown = 0;
    loop {
        let live = search.step()?;
        let settled = search.settled();
        if !is_quiet && settled.len() > n_shown {
            emit!("{}", model.decode(&settled[n_shown..])?)?;
            n_shown = settled.len();
        }
        let Some(best) = live.iter().map(|one| one.logprob).max_by(f32::total_cmp) else { break };
        let near = live.iter().enumerate().filter(|(_, one)| one.logprob >= best - nats);
        search.keep(near.map(|(idx, one)| Kept::live(idx, one.logprob)))?;
    }
    if is_quiet { Ok(()) } else { emit!("\n") }
}
