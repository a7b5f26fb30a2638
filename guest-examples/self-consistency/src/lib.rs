//! Samples many step by step answers and takes the majority (X. Wang and others, "Self-Consistency Improves Chain of Thought
//! Reasoning in Language Models", 2022). Wrong ways scatter, right ones meet.
//!
//! As in the paper each sample has one vote. There worked examples in the prompt make the model write its steps; here it is a
//! question that it was trained to work out so.
//!
//! ```text
//! trellis run self-consistency "Think step by step: what is 468 + 275?"
//! trellis run self-consistency --samples 32 --temperature 2.5 --json "Add 468 and 275. Show your steps."
//! ```

mod vote;

use std::num::NonZeroU64;

use serde::Serialize;
use trellis_guest::{Args, Chat, Model, Result, Sampler, emit, emit_json, generate_all, seed};

trellis_guest::main!(run);

const USAGE: &str = "self-consistency [--samples N] [--temperature T] [--max-tokens N] [--json] QUESTION";

#[derive(Serialize)]
struct Report {
    /// None when no sample came to an answer.
    answer: Option<String>,
    n_samples: usize,
    /// Each answer with its votes, most first.
    votes: Vec<(String, usize)>,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_samples = args.option::<NonZeroU64>("--samples")?.map_or(12, NonZeroU64::get);
    let temperature = args.option("--temperature")?.unwrap_or(2.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(160);
    let question = args.text()?;

    let prompt = Model::open_default()?.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    prompt.prefill()?;

    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    let samples = prompt.forks(n_samples, &sampler)?;
    let ways =
        generate_all(samples.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(max_tokens)))?;

    let votes = vote::count(ways.iter().filter_map(|way| vote::answer(&way.text)));
    let answer = votes.first().map(|(answer, _)| answer.clone());
    if json {
        return emit_json(&Report { answer, n_samples: ways.len(), votes });
    }
    match votes.first() {
        Some((answer, n_votes)) => emit!("{answer} ({n_votes} of {} samples)\n", ways.len()),
        None => emit!("no sample ended with \"Answer: ...\"; a larger --max-tokens may help\n"),
    }
}
