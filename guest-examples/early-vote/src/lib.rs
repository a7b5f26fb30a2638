//! A majority over sampled answers that stops as soon as it is certain enough: P. Aggarwal and others, "Let's Sample Step by
//! Step: Adaptive-Consistency for Efficient Reasoning and Coding with LLMs", 2023. Easy questions take a few samples, hard ones
//! all of them, and the answer is nearly always that of all.
//!
//! Of the paper, the rule is its Beta criterion over the two most frequent answers; the rule over the whole Dirichlet
//! distribution is not here. Samples come in waves that are decoded in one batch, where the paper draws one after the other.
//!
//! ```text
//! trellis run early-vote "Think step by step: what is 468 + 275?"
//! trellis run early-vote --samples 32 --certainty 0.99 --wave 2 --json "Add 468 and 275. Show your steps."
//! ```

mod vote;

use std::num::NonZeroU64;
use std::ops::Range;

use serde::Serialize;
use trellis_guest::{
    Args, Chat, Completion, Context, Model, Result, Sampler, emit, emit_json, fork_seed, generate_all, seed,
};

trellis_guest::main!(run);

const USAGE: &str = "early-vote [--samples N] [--wave N] [--certainty P] [--temperature T] [--json] QUESTION";

/// The longest sample, in tokens.
const N_TOKENS_MAX: u32 = 160;

#[derive(Serialize)]
struct Report {
    /// None when no sample came to an answer.
    answer: Option<String>,
    n_samples: u64,
    n_tokens: usize,
    certainty: f64,
    /// Each answer with its votes, most first.
    votes: Vec<(String, u64)>,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_max = args.option::<NonZeroU64>("--samples")?.map_or(24, NonZeroU64::get);
    let n_wave = args.option::<NonZeroU64>("--wave")?.map_or(4, NonZeroU64::get);
    let enough: f64 = args.option("--certainty")?.unwrap_or(0.95);
    let temperature = args.option("--temperature")?.unwrap_or(2.0);
    if !(enough > 0.0 && enough <= 1.0) {
        return Err(args.mistake(format!("--certainty is {enough}, and has to be above 0 and at most 1")));
    }
    let question = args.text()?;

    let prompt = Model::open_default()?.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    prompt.prefill()?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;

    let mut votes: Vec<(String, u64)> = Vec::new();
    let (mut n_samples, mut n_tokens, mut certainty) = (0, 0, 0.0);
    while n_samples < n_max && certainty < enough {
        let end = n_samples.saturating_add(n_wave).min(n_max);
        for way in wave(&prompt, &sampler, n_samples..end)? {
            n_tokens += way.tokens.len();
            vote::count(&mut votes, &way.text);
        }
        n_samples = end;
        certainty = vote::certainty(&votes, n_max - n_samples);
    }

    let answer = votes.first().map(|(answer, _)| answer.clone());
    if json {
        return emit_json(&Report { answer, n_samples, n_tokens, certainty, votes });
    }
    let answer = answer.as_deref().unwrap_or("no sample came to an answer");
    emit!("{answer} ({n_samples} of {n_max} samples, {:.1} % certain)\n", 100.0 * certainty)
}

/// The samples of these numbers, each with a seed of its own: those that one large wave would have under the same numbers.
fn wave(prompt: &Context, sampler: &Sampler, samples: Range<u64>) -> Result<Vec<Completion>> {
    let forks = samples.map(|i| Ok((prompt.fork()?, sampler.with_seed(fork_seed(sampler.seed(), i)))));
    let forks = forks.collect::<Result<Vec<_>>>()?;
    generate_all(forks.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(N_TOKENS_MAX)))
}
