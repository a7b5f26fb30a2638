//! Answers from a part of a long prompt: the attention of its last tokens, the observation window, says which of the tokens
//! before them are needed, the others are evicted, and the answer is written in the memory that is left (Y. Li and others,
//! "SnapKV: LLM Knows What You are Looking for Before Generation", 2024). In the paper each head of each layer keeps tokens
//! of its own; here a context has one choice, by the mean over all heads and layers. As there, attention is pooled over a few
//! neighbours, so that what is kept are pieces and not single tokens. Positions are kept. `--at-random` keeps as many tokens by
//! chance, to compare.
//!
//! ```text
//! trellis run snapkv --context "A long text." "What is 37 + 48?"
//! trellis run snapkv --budget 24 --window 6 --context "A long text." --json "Give me JSON: Ada, a pilot from Oslo, is 36."
//! ```

use serde::Serialize;
use trellis_guest::{
    Args, Chat, Context, Model, Positions, Random, Result, Sampler, attention_all, emit, emit_json, usage,
};

trellis_guest::main!(run);

const USAGE: &str = "snapkv [--context TEXT] [--budget N] [--window N] [--kernel N] [--at-random] [--max-tokens N] \
                     [--json] QUESTION";

#[derive(Serialize)]
struct Report {
    text: String,
    n_prompt: usize,
    /// Which tokens of the prompt were left, by their indices in it.
    kept: Vec<usize>,
    /// Pages that were held before the eviction, and at the end of the answer.
    n_pages: [u64; 2],
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let is_random = args.flag("--at-random");
    let before: String = args.option("--context")?.unwrap_or_default();
    let n_budget = args.option("--budget")?.unwrap_or(64usize).max(2);
    let n_window = args.option("--window")?.unwrap_or(8usize).clamp(1, n_budget - 1);
    let n_kernel = args.option("--kernel")?.unwrap_or(5usize).max(1);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(64);
    let question = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user(format!("{before} {question}").trim()))?;
    context.prefill()?;
    let n_prompt = context.length() as usize;
    let n_window = n_window.min(n_prompt);
    let n_pages_before = usage().pages.used;

    let masses = if is_random {
        let mut random = Random::of_session();
        (0..n_prompt - n_window).map(|_| random.uniform()).collect()
    } else {
        pooled(&observed(&context, n_window)?, n_kernel)
    };
    let mut by_mass: Vec<usize> = (0..masses.len()).collect();
    by_mass.sort_by(|&a, &b| masses[b].total_cmp(&masses[a]));
    let mut kept: Vec<usize> = by_mass.into_iter().take(n_budget - n_window).collect();
    kept.extend(masses.len()..n_prompt);
    kept.sort_unstable();

    // From the last hole on: those before keep their indices.
    let starts = kept.iter().copied().chain([n_prompt]).rev();
    for (end, start) in starts.zip(kept.iter().rev().map(|idx| idx + 1).chain([0])) {
        context.evict(start as u32, end as u32, Positions::Keep)?;
    }
    let text = context.generate(&Sampler::greedy()).max_tokens(max_tokens).run()?.text;
    let n_pages = [n_pages_before, usage().pages.used];
    if json {
        return emit_json(&Report { text, n_prompt, kept, n_pages });
    }
    emit!("{text}\n\n{} of {n_prompt} tokens were kept; ", kept.len())?;
    emit!("{} pages before, {} at the end\n", n_pages[0], n_pages[1])
}

/// The attention on each token before the last `n_window`, summed over those.
fn observed(context: &Context, n_window: usize) -> Result<Vec<f64>> {
    let (n, layers) = (context.length(), (0..context.model().info().n_layers).collect::<Vec<_>>());
    let forks = (0..n_window as u32).map(|idx| {
        let fork = context.fork()?;
        fork.truncate(n - idx)?;
        Ok(fork)
    });
    let mut sums = vec![0.0; n as usize - n_window];
    for masses in attention_all(&forks.collect::<Result<Vec<_>>>()?, &layers)? {
        for (sum, mass) in sums.iter_mut().zip(masses) {
            *sum += f64::from(mass);
        }
    }
    Ok(sums)
}

/// Of each place the most that is within a kernel around it.
fn pooled(masses: &[f64], n_kernel: usize) -> Vec<f64> {
    let around = |idx: usize| idx.saturating_sub(n_kernel / 2)..masses.len().min(idx + n_kernel.div_ceil(2));
    (0..masses.len()).map(|idx| masses[around(idx)].iter().copied().fold(0.0, f64::max)).collect()
}
