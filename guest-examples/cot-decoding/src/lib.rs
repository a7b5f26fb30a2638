//! Goes on greedily from each of the k most probable first tokens, and keeps the answer whose tokens were least in
//! doubt: by how far apart, on average, the two most probable tokens in each place were.
//!
//! X. Wang and D. Zhou, "Chain-of-Thought Reasoning Without Prompting" (2024): what a model answers first is often not
//! the way that it is surest of. There only the tokens of the final answer count; here all that are drawn do.
//!
//! ```text
//! trellis run cot-decoding --branches 10 "What is 37 + 48?"
//! trellis run cot-decoding --json "What is 37 + 48?"
//! ```
//!
//! The prompt is computed once, all branches are decoded in one batch, and what else each token could have been comes
//! with it.

use serde::Serialize;
use trellis_guest::{
    Args, Chat, Completion, Context, Model, Result, Sampler, Token, emit, emit_json, generate_all,
};

trellis_guest::main!(run);

const USAGE: &str = "cot-decoding [--branches K] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Branch {
    text: String,
    /// The first of them is the branch's own.
    tokens: Vec<Token>,
    margin: f32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_branches = args.option("--branches")?.unwrap_or(10);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(128);
    let question = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    let mut firsts = prompt.top(n_branches)?.candidates;
    firsts.retain(|first| !model.is_stop(first.token));
    let begun = firsts.iter().map(|first| {
        let branch = prompt.fork()?;
        branch.append(&[first.token])?;
        Ok(branch)
    });
    let begun: Vec<Context> = begun.collect::<Result<_>>()?;

    let greedy = Sampler::greedy();
    let completions =
        generate_all(begun.iter().map(|branch| branch.generate(&greedy).max_tokens(max_tokens).top(2)))?;

    let branches = begun.iter().zip(&completions).map(|(branch, completion)| {
        let tokens = branch.tokens_from(prompt.length());
        Ok(Branch { text: model.decode(&tokens)?, tokens, margin: margin(completion) })
    });
    let mut branches = branches.collect::<Result<Vec<_>>>()?;
    branches.sort_by(|a, b| b.margin.total_cmp(&a.margin));
    match branches.first() {
        _ if json => emit_json(&branches),
        Some(best) => emit!("{}\n", best.text),
        None => emit("\n"),
    }
}

/// By how much the most probable token was more probable than the next one, on average.
fn margin(completion: &Completion) -> f32 {
    let probability = |logprob: Option<f32>| logprob.map_or(0.0, f32::exp);
    let margins = completion.tops.iter().map(|top| {
        let mut logprobs = top.candidates.iter().map(|candidate| candidate.logprob);
        probability(logprobs.next()) - probability(logprobs.next())
    });
    margins.sum::<f32>() / completion.tops.len().max(1) as f32
}
