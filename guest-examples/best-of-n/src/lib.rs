//! Samples n answers and keeps the one the model is surest of, by the log-probability of the average token: sample-and-rank
//! (D. Adiwardana and others, "Towards a Human-like Open-Domain Chatbot", 2020). With `--reject` half of those that are under way,
//! the least sure ones, are given up after 8 tokens, half of the rest after 16, and so on: speculative rejection (H. Sun and others,
//! "Fast Best-of-N Decoding via Speculative Rejection", 2024). There texts are given up whenever memory runs out, those below a
//! quantile of the reward. A model of rewards, by which that paper chooses, is not here.
//!
//! ```text
//! trellis run best-of-n --n 8 --temperature 3 "What is 37 + 48?"
//! trellis run best-of-n --n 32 --reject --json "Think step by step: what is 468 + 275?"
//! trellis run best-of-n --json "Tell me a short story."
//! ```
//!
//! The prompt is computed once. Every fork shares its KV cache, and all forks are decoded in one batch, so
//! eight answers take little longer than one.

use std::num::NonZeroU64;

use serde::Serialize;
use trellis_guest::{Args, Chat, Generations, Model, Result, Sampler, emit, emit_json, generate_each, seed};

trellis_guest::main!(run);

const USAGE: &str = "best-of-n [--n N] [--reject] [--temperature T] [--max-tokens N] [--json] PROMPT";

/// Tokens after which the least sure are given up first.
const N_FIRST: u32 = 8;

#[derive(Serialize)]
struct Answer {
    text: String,
    mean_logprob: f32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let (json, reject) = (args.flag("--json"), args.flag("--reject"));
    let n = args.option::<NonZeroU64>("--n")?.map_or(8, NonZeroU64::get);
    let temperature = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(128);
    let prompt = args.text()?;

    let base = Model::open_default()?.context()?;
    base.set_chat(&Chat::new().user(&prompt))?;
    base.prefill()?;

    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    let tries = base.forks(n, &sampler)?;
    let requests = tries.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(max_tokens));
    let mut answers = Vec::new();
    let mut all = generate_each(requests)?;
    let mut n_tokens = N_FIRST;
    while reject && n_tokens < max_tokens && all.progress().iter().any(|one| !one.is_over) {
        answers.extend(all.reach(n_tokens));
        reject_half(&mut all)?;
        n_tokens = n_tokens.saturating_mul(2);
    }
    answers.extend(all);
    // Those that end together come in any order.
    answers.sort_by_key(|ended| ended.idx);

    let answers = answers.into_iter().map(|ended| {
        let completion = ended.completion?;
        Ok(Answer { mean_logprob: completion.mean_logprob(), text: completion.text })
    });
    let mut answers = answers.collect::<Result<Vec<_>>>()?;
    answers.sort_by(|a, b| b.mean_logprob.total_cmp(&a.mean_logprob));
    if json { emit_json(&answers) } else { emit!("{}\n", answers[0].text) }
}

/// Gives up half of those that are under way: the less sure half.
fn reject_half(all: &mut Generations) -> Result {
    let progress = all.progress().into_iter().enumerate().filter(|(_, one)| !one.is_over);
    let mut under_way: Vec<_> = progress.map(|(idx, one)| (idx, one.logprob / one.n_tokens as f32)).collect();
    under_way.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (idx, _) in under_way.drain(under_way.len().div_ceil(2)..) {
        all.cancel(idx)?;
    }
    Ok(())
}
