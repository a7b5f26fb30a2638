//! Samples n answers and keeps the one the model is surest of, by the log-probability of the average token: sample-and-rank
//! (D. Adiwardana and others, "Towards a Human-like Open-Domain Chatbot", 2020). A model of rewards, by which others choose, is not
//! here.
//!
//! ```text
//! trellis run best-of-n --n 8 --temperature 3 "What is 37 + 48?"
//! trellis run best-of-n --json "Tell me a short story."
//! ```
//!
//! The prompt is computed once. Every fork shares its KV cache, and all forks are decoded in one batch, so
//! eight answers take little longer than one.

use std::num::NonZeroU64;

use serde::Serialize;
use trellis_guest::{Args, Chat, Model, Result, Sampler, emit, emit_json, generate_all, seed};

trellis_guest::main!(run);

const USAGE: &str = "best-of-n [--n N] [--temperature T] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Answer {
    text: String,
    mean_logprob: f32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n = args.option::<NonZeroU64>("--n")?.map_or(8, NonZeroU64::get);
    let temperature = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(128);
    let prompt = args.text()?;

    let base = Model::open_default()?.context()?;
    base.set_chat(&Chat::new().user(&prompt))?;
    base.prefill()?;

    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    let tries = base.forks(n, &sampler)?;
    let completions =
        generate_all(tries.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(max_tokens)))?;

    let mut answers: Vec<Answer> = completions
        .into_iter()
        .map(|completion| Answer { mean_logprob: completion.mean_logprob(), text: completion.text })
        .collect();
    answers.sort_by(|a, b| b.mean_logprob.total_cmp(&a.mean_logprob));
    if json { emit_json(&answers) } else { emit!("{}\n", answers[0].text) }
}
