//! Power sampling that draws a text anew from where the model had to decide: Entropy-Cut Metropolis–Hastings (F. Zhou,
//! A. Mehrotra and Q. C. Liu, "Reasoning with Sampling: Cutting at Decision Points", 2026, arXiv 2605.30327). Answers come from
//! p^α, as in `power-sampling`. There a text is cut anywhere, mostly in the midst of what follows from what was said. Here it is
//! cut where the entropy of what comes next rises: a place is the likelier, by the fourth power, the more the model was at a
//! loss there than one token before.
//!
//! ```text
//! trellis run entropy-cut "What is 37 + 48?"
//! trellis run entropy-cut --alpha 4 --sharpness 4 --chains 8 --json "Think step by step: what is 468 + 275?"
//! ```
//!
//! The entropies come with the tokens, from the same steps.

mod chain;
mod cuts;

use chain::{Text, power, redraw};
use serde::Serialize;
use trellis_guest::{Args, Chat, Model, Random, Result, Sampler, Token, emit, emit_json, seed};

trellis_guest::main!(run);

const USAGE: &str = "entropy-cut [--alpha A] [--sharpness S] [--chains N] [--block N] [--moves N] [--top-k K] \
                     [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Answer {
    text: String,
    tokens: Vec<Token>,
    /// How likely the text is cut before each token.
    cuts: Vec<f64>,
    n_accepted: u32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let alpha: f32 = args.option("--alpha")?.unwrap_or(4.0);
    let sharpness: f64 = args.option("--sharpness")?.unwrap_or(4.0);
    let n_chains: usize = args.option("--chains")?.unwrap_or(1);
    let n_block: u32 = args.option("--block")?.unwrap_or(16);
    let n_moves: u32 = args.option("--moves")?.unwrap_or(10);
    let top_k: Option<u32> = args.option("--top-k")?;
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(64);
    for (name, value) in [("--alpha", f64::from(alpha)), ("--sharpness", sharpness)] {
        if !(value > 0.0 && value.is_finite()) {
            return Err(args.mistake(format!("{name} is {value}, and has to be above 0")));
        }
    }
    if n_block == 0 || top_k == Some(0) {
        return Err(args.mistake("--block and --top-k are at least 1".to_owned()));
    }
    let question = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.set_chat(&Chat::new().user(&question))?;
    let n_before = prompt.length();
    let sampler = Sampler::by_program(&model.program(&power(top_k))?, 0)?;
    sampler.set_parameters(&[alpha])?;

    let mut random = Random::new(seed());
    let mut texts = (0..n_chains).map(|_| Text::new(&prompt)).collect::<Result<Vec<_>>>()?;
    let mut n_accepted = vec![0; n_chains];
    let n_tokens_max = max_tokens.min(prompt.capacity() - n_before);
    let mut n_most = 0;
    while n_most < n_tokens_max {
        n_most = n_tokens_max.min(n_most + n_block);
        let mut growing: Vec<&mut Text> = texts.iter_mut().filter(|text| !text.is_whole()).collect();
        let ends = growing.iter().map(|text| (&**text, text.entropies.len())).collect();
        let longer = redraw(ends, n_most, &sampler, &mut random)?;
        for (text, longer) in growing.iter_mut().zip(longer) {
            **text = longer;
        }
        for _ in 0..n_moves {
            let cuts: Vec<Vec<f64>> =
                texts.iter().map(|text| cuts::probabilities(&text.entropies, sharpness)).collect();
            let chosen: Vec<usize> =
                cuts.iter().map(|cuts| random.choose(cuts).expect("they come to 1")).collect();
            let proposals =
                redraw(texts.iter().zip(chosen.iter().copied()).collect(), n_most, &sampler, &mut random)?;
            for (idx, proposal) in proposals.into_iter().enumerate() {
                // As in power-sampling the normalizers of the tokens are left, and how likely the cut is, from here to
                // there and back.
                let cut = chosen[idx];
                let back = cuts::probabilities(&proposal.entropies, sharpness)[cut];
                let log_ratio =
                    proposal.log_normalizers - texts[idx].log_normalizers + (back / cuts[idx][cut]).ln();
                if random.uniform().ln() < log_ratio {
                    texts[idx] = proposal;
                    n_accepted[idx] += 1;
                }
            }
        }
    }

    let answers = texts.iter().zip(n_accepted).map(|(text, n_accepted)| {
        let tokens = text.context.tokens_from(n_before);
        let cuts = cuts::probabilities(&text.entropies, sharpness);
        Ok(Answer { text: model.decode(&tokens)?, tokens, cuts, n_accepted })
    });
    let answers = answers.collect::<Result<Vec<_>>>()?;
    if json {
        return emit_json(&answers);
    }
    answers.iter().try_for_each(|answer| emit!("{}\n", answer.text))
}
