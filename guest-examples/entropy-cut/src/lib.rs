//! Power sampling that draws a text anew from where the model had to decide: Entropy-Cut Metropolis–Hastings (F. Zhou,
//! A. Mehrotra and Q. C. Liu, "Reasoning with Sampling: Cutting at Decision Points", 2026). Answers come from p^α, as in
//! `power-sampling`. There a text is cut anywhere, mostly in the midst of what follows from what was said. Here it is cut where the
//! entropy of what comes next rises: a place is the likelier, by the fourth power, the more the model was at a loss there than one
//! token before.
//!
//! In the paper a text grows in blocks, with moves after each; here texts are drawn to their ends first. Its benchmarks are not
//! reproduced.
//!
//! ```text
//! trellis run entropy-cut "What is 37 + 48?"
//! trellis run entropy-cut --alpha 4 --chains 8 --moves 20 --json "Think step by step: what is 468 + 275?"
//! ```
//!
//! The entropies come with the tokens, from the same steps.

use serde::Serialize;
use trellis_guest::programs::{Definition, library};
use trellis_guest::{
    Args, Chat, Context, Error, Model, Random, Result, Sampler, Token, emit, emit_json, generate_all, seed,
};

trellis_guest::main!(run);

const USAGE: &str =
    "entropy-cut [--alpha A] [--chains N] [--moves N] [--top-k K] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Answer {
    text: String,
    tokens: Vec<Token>,
    /// How likely the text is cut before each token.
    cuts: Vec<f64>,
}

/// A text after the prompt, and the entropy of what could have come in the place of each of its tokens, in nats.
type Text = (Context, Vec<f32>);

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let alpha: f32 = args.option("--alpha")?.unwrap_or(4.0);
    let n_chains: usize = args.option("--chains")?.unwrap_or(1);
    let n_moves: u32 = args.option("--moves")?.unwrap_or(40);
    let top_k: f32 = args.option("--top-k")?.unwrap_or(f32::MAX);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(64);
    if !(alpha > 0.0 && alpha.is_finite() && top_k >= 1.0 && max_tokens > 0) {
        return Err(args.mistake("--alpha is above 0, --top-k and --max-tokens at least 1".to_owned()));
    }
    let question = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    let (start, n_positions) = (prompt.length(), prompt.capacity());
    if start >= n_positions {
        return Err(Error::ContextFull { n_tokens: start + 1, n_positions });
    }
    let definition = Definition::build(|b| library::power(library::top_k(b.logits(), top_k), alpha));
    let sampler = Sampler::by_program(&model.program(&definition)?, 0)?;

    let mut random = Random::new(seed());
    let empty = |_| Ok((prompt.fork()?, Vec::new()));
    let mut texts = (0..n_chains).map(empty).collect::<Result<Vec<Text>>>()?;
    let end = start.saturating_add(max_tokens).min(n_positions);
    for n_moved in 0..=n_moves {
        let (mut proposals, mut cuts) = (Vec::new(), Vec::new());
        for (text, entropies) in &texts {
            let cut = random.choose(&cut_probabilities(entropies)).unwrap_or(0);
            let proposal = text.fork()?;
            proposal.truncate(start + cut as u32)?;
            proposals.push((proposal, entropies[..cut].to_vec()));
            cuts.push(cut);
        }
        let drawn = generate_all(proposals.iter().map(|(text, _)| {
            // A draw depends on seed, position and what comes before: with the same seed it would be the same text.
            text.generate(&sampler).seed(random.bits()).max_tokens(end - text.length()).top(1)
        }))?;
        for (idx, ((proposal, mut entropies), drawn)) in proposals.into_iter().zip(drawn).enumerate() {
            entropies.extend(drawn.tops.iter().map(|top| top.entropy));
            let proposal = (proposal, entropies);
            // As in `power-sampling` the normalizers of the tokens are left, and how likely the cut is, from here to there and
            // back.
            let log_weight = |(text, entropies): &Text| {
                f64::from(text.reports()[0]) + cut_probabilities(entropies)[cuts[idx]].ln()
            };
            // The first texts are taken as they come.
            if n_moved == 0 || random.uniform().ln() < log_weight(&proposal) - log_weight(&texts[idx]) {
                texts[idx] = proposal;
            }
        }
    }

    let answers = texts.iter().map(|(text, entropies)| {
        let tokens = text.tokens_from(start);
        Ok(Answer { text: model.decode(&tokens)?, tokens, cuts: cut_probabilities(entropies) })
    });
    let answers = answers.collect::<Result<Vec<_>>>()?;
    if json {
        return emit_json(&answers);
    }
    answers.iter().try_for_each(|answer| emit!("{}\n", answer.text))
}

/// How likely a text is cut before each of its tokens: as the rise of the entropy there to the fourth power, where it does not rise
/// hardly ever. The entropy in a place depends on what is before it: a rise is the same for all texts that begin alike up to the cut,
/// and only the sum differs.
fn cut_probabilities(entropies: &[f32]) -> Vec<f64> {
    let before = std::iter::once(&0.0).chain(entropies);
    let rises = entropies.iter().zip(before).map(|(entropy, before)| f64::from(entropy - before));
    let weights: Vec<f64> = rises.map(|rise| rise.max(1e-9).powi(4)).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}
