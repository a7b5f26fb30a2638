//! Answers a question line by line as a breadth-first search: each line that was kept is gone on from several times, and the
//! few that the model is surest of are kept (S. Yao and others, "Tree of Thoughts: Deliberate Problem Solving with Large
//! Language Models", 2023). A line that went astray costs its own tokens, and not those of a whole answer.
//!
//! Of the paper this is the search over states, with several thoughts proposed for each and the best kept. Where the paper
//! prompts the model to value states or to vote on them, which takes a larger model, a state's value here is the log-probability
//! of its average token. Its depth-first search is left out.
//!
//! ```text
//! trellis run tree-of-thought "Think step by step: what is 468 + 275?"
//! trellis run tree-of-thought --proposals 8 --keep 3 --temperature 2.5 --json "Add 468 and 275. Show your steps."
//! ```

use std::collections::HashSet;

use serde::Serialize;
use trellis_guest::{
    Args, Chat, Context, Model, Random, Result, Sampler, emit, emit_json, generate_all, seed,
};

trellis_guest::main!(run);

const USAGE: &str = "tree-of-thought [--proposals N] [--keep N] [--temperature T] [--line-tokens N] [--max-tokens N] \
                     [--json] QUESTION";

/// The lines so far.
struct State {
    context: Context,
    logprob: f32,
    n_tokens: u32,
}

#[derive(Serialize)]
struct Report {
    text: String,
    /// Of the average token.
    mean_logprob: f32,
    /// Lines of the longest answer that was followed.
    depth: usize,
    /// Lines that were drawn.
    n_lines: usize,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_proposals: usize = args.option("--proposals")?.unwrap_or(4);
    let n_kept: usize = args.option("--keep")?.unwrap_or(2);
    let temperature = args.option("--temperature")?.unwrap_or(1.0);
    let line_tokens: u32 = args.option("--line-tokens")?.unwrap_or(32);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(160);
    if n_proposals == 0 || n_kept == 0 || line_tokens == 0 {
        return Err(args.mistake("--proposals, --keep and --line-tokens are at least 1".to_owned()));
    }
    let question = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    prompt.prefill()?;
    let n_before = prompt.length();
    let max_tokens = max_tokens.min(prompt.capacity() - n_before);
    let sampler = Sampler::seeded(0).temperature(temperature).build()?;
    let mut random = Random::new(seed());

    let is_whole = |state: &State| {
        let tokens = state.context.tokens_from(n_before);
        state.n_tokens >= max_tokens || tokens.last().is_some_and(|&token| model.is_stop(token))
    };
    let mut states = vec![State { context: prompt.fork()?, logprob: 0.0, n_tokens: 0 }];
    let (mut depth, mut n_lines) = (0, 0);
    while !states.iter().all(is_whole) {
        let (whole, open): (Vec<State>, Vec<State>) = states.into_iter().partition(is_whole);
        let parents: Vec<&State> = open.iter().flat_map(|state| vec![state; n_proposals]).collect();
        let forks = parents.iter().map(|parent| parent.context.fork()).collect::<Result<Vec<_>>>()?;
        let lines = generate_all(forks.iter().zip(&parents).map(|(fork, parent)| {
            let n_most = line_tokens.min(max_tokens - parent.n_tokens);
            fork.generate(&sampler).seed(random.bits()).stop_at("\n").max_tokens(n_most)
        }))?;
        (depth, n_lines) = (depth + 1, n_lines + lines.len());

        let longer = forks.into_iter().zip(parents).zip(&lines).map(|((context, parent), line)| State {
            context,
            logprob: parent.logprob + line.logprob(),
            n_tokens: parent.n_tokens + line.tokens.len() as u32,
        });
        // What was drawn twice is one state.
        let mut seen = HashSet::new();
        states =
            whole.into_iter().chain(longer).filter(|state| seen.insert(state.context.tokens())).collect();
        states.sort_by(|a, b| value(b).total_cmp(&value(a)));
        states.truncate(n_kept);
    }

    let best = &states[0];
    let text = model.decode(&best.context.tokens_from(n_before))?.trim_end().to_owned();
    if json {
        emit_json(&Report { text, mean_logprob: value(best), depth, n_lines })
    } else {
        emit!("{text}\n")
    }
}

/// What the model thinks of a state.
fn value(state: &State) -> f32 {
    state.logprob / state.n_tokens.max(1) as f32
}
