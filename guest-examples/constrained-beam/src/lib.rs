//! Searches for a probable answer that has all of some words in it: grid beam search (C. Hokamp and Q. Liu, "Lexically
//! Constrained Decoding for Sequence Generation Using Grid Beam Search", 2017). Hypotheses are kept in banks by how many of the
//! words they have, so that those with many compete among themselves and not with those that the model would rather write. In
//! each step every hypothesis goes on by itself, and once more with each word that it lacks; what ends without all is dropped.
//! The first `--beams` answers that are whole end the search, so that the best of them may not be the most probable of all.
//! In the paper a word comes token by token, each in a step; here it is put in as a whole, in one. A word is its tokens: the
//! model may make a longer one of it.
//!
//! ```text
//! trellis run constrained-beam --word robot "Tell me a short story."
//! trellis run constrained-beam --word owl --word harbor --beams 8 --json "Tell me a short story."
//! ```

use std::collections::BTreeSet;

use serde::Serialize;
use trellis_guest::{Args, Chat, Kept, Model, Result, Token, emit, emit_json, score_all};

trellis_guest::main!(run);

const USAGE: &str = "constrained-beam [--word WORD]... [--beams N] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Answer {
    text: String,
    tokens: Vec<Token>,
    /// The log-probability of the average token, in nats.
    score: f32,
}

/// What may live on.
struct Hypothesis {
    /// The place of the one that lives with which it begins.
    idx: usize,
    tokens: Vec<Token>,
    logprob: f32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_beams = args.option("--beams")?.unwrap_or(4usize).max(1);
    let max_tokens = args.option("--max-tokens")?.map_or(60, std::num::NonZeroUsize::get);
    let model = Model::open_default()?;
    let mut words = BTreeSet::new();
    while let Some(word) = args.option::<String>("--word")? {
        words.insert(model.encode(&format!(" {word}"))?);
    }
    let question = args.text()?;

    let prompt = model.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    prompt.prefill()?;
    let max_tokens = max_tokens.min((prompt.capacity() - prompt.length()).saturating_sub(1).max(1) as usize);
    let has = |tokens: &[Token], word: &[Token]| tokens.windows(word.len()).any(|run| run == word);
    let n_words = |tokens: &[Token]| words.iter().filter(|word| has(tokens, word)).count();
    let score = |it: &Hypothesis| it.logprob / it.tokens.len() as f32;
    // Whether a hypothesis is finished is for the guest to say: no token ends it for the search, and its length neither.
    let n_rows = (n_beams * (words.len() + 1)) as u32;
    let search = prompt.beams(n_rows).max_tokens(max_tokens as u32 + 1).stop_tokens(&[]).open()?;
    // What is added to the log-probabilities of each bank, so that a step finds the best of all on one level.
    let mut levels = vec![0.0; words.len() + 1];
    let mut finished: Vec<Answer> = Vec::new();
    while finished.len() < n_beams {
        let live = search.step()?;
        let mut next = Vec::new();
        for (idx, one) in live.iter().enumerate() {
            let tokens = search.tokens(idx)?;
            let logprob = one.logprob - levels[n_words(&tokens[..tokens.len() - 1])];
            let it = Hypothesis { idx, tokens, logprob };
            if !model.is_stop(it.tokens[it.tokens.len() - 1]) && it.tokens.len() < max_tokens {
                next.push(it);
            } else if n_words(&it.tokens) == words.len() && finished.iter().all(|of| of.tokens != it.tokens) {
                let text = model.decode(&it.tokens)?;
                finished.push(Answer { text, score: score(&it), tokens: it.tokens });
            }
        }
        if next.is_empty() {
            break;
        }

        let mut longer = Vec::new();
        for it in &next {
            let lacking = words.iter().filter(|word| !has(&it.tokens, word));
            longer.extend(lacking.map(|word| (it.idx, [&it.tokens[..], word].concat())));
        }
        // The model may have come to the same by itself.
        longer.retain(|(_, with)| with.len() < max_tokens && next.iter().all(|it| it.tokens != *with));
        let forks = longer.iter().map(|_| prompt.fork()).collect::<Result<Vec<_>>>()?;
        let logprobs = score_all(forks.iter().zip(longer.iter().map(|(_, tokens)| &tokens[..])))?;
        let scored = longer.into_iter().zip(logprobs);
        next.extend(scored.map(|((idx, tokens), of)| Hypothesis { idx, tokens, logprob: of.iter().sum() }));
        next.sort_by(|a, b| score(b).total_cmp(&score(a)));

        let bank = |n| next.iter().filter(move |it| n_words(&it.tokens) == n).take(n_beams);
        let best = |n| bank(n).map(|it| it.logprob).fold(f32::NEG_INFINITY, f32::max);
        levels = (0..=words.len()).map(|n| -best(n)).collect();
        search.keep((0..=words.len()).flat_map(bank).map(|it| {
            let logprob = it.logprob + levels[n_words(&it.tokens)];
            Kept::live(it.idx, logprob).then(&it.tokens[live[it.idx].n_tokens as usize..])
        }))?;
    }

    finished.sort_by(|a, b| b.score.total_cmp(&a.score));
    if json {
        return emit_json(&finished);
    }
    finished.iter().try_for_each(|it| emit!("{:9.5}  {}\n", it.score, it.text))
}
