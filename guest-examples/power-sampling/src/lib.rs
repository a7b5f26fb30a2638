//! Draws answers from a power of the model's distribution over whole texts: what is probable becomes more so, as a text and not
//! token by token (A. Karan and Y. Du, "Reasoning with Sampling: Your Base Model is Smarter Than You Think", 2025, arXiv
//! 2510.14901). Drawing at temperature 1/α raises each token's distribution to the power α, and knows nothing of what a token
//! leads to. So texts that are drawn like that are only proposals: a text is cut at a random place and drawn anew from there,
//! and what comes of it is taken or not (Metropolis and Hastings), so that the texts come to stand for p^α.
//!
//! ```text
//! trellis run power-sampling "What is 37 + 48?"
//! trellis run power-sampling --alpha 4 --chains 8 --block 16 --moves 10 --json "What is 37 + 48?"
//! ```
//!
//! As in the paper a text grows in blocks, with so many moves after each. All chains move in one batch and with one call, and
//! what is before a cut is not computed again.

mod chain;

use chain::{Text, power, redraw};
use serde::Serialize;
use trellis_guest::{Args, Chat, Model, Random, Result, Sampler, Token, emit, emit_json, seed};

trellis_guest::main!(run);

const USAGE: &str = "power-sampling [--alpha A] [--chains N] [--block N] [--moves N] [--top-k K] [--max-tokens N] \
                     [--json] PROMPT";

#[derive(Serialize)]
struct Answer {
    text: String,
    tokens: Vec<Token>,
    n_accepted: u32,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let alpha: f32 = args.option("--alpha")?.unwrap_or(4.0);
    let n_chains: usize = args.option("--chains")?.unwrap_or(1);
    let n_block: u32 = args.option("--block")?.unwrap_or(16);
    let n_moves: u32 = args.option("--moves")?.unwrap_or(10);
    let top_k: Option<u32> = args.option("--top-k")?;
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(64);
    if !(alpha > 0.0 && alpha.is_finite()) {
        return Err(args.mistake(format!("--alpha is {alpha}, and has to be above 0")));
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
        let ends = growing.iter().map(|text| (&**text, text.n_tokens)).collect();
        let longer = redraw(ends, n_most, &sampler, &mut random)?;
        for (text, longer) in growing.iter_mut().zip(longer) {
            **text = longer;
        }
        for _ in 0..n_moves {
            let cut = |text: &Text| (random.uniform() * f64::from(text.n_tokens)) as u32;
            let cuts: Vec<u32> = texts.iter().map(cut).collect();
            let proposals = redraw(texts.iter().zip(cuts).collect(), n_most, &sampler, &mut random)?;
            for (idx, proposal) in proposals.into_iter().enumerate() {
                if random.uniform().ln() < log_ratio(&texts[idx], &proposal) {
                    texts[idx] = proposal;
                    n_accepted[idx] += 1;
                }
            }
        }
    }

    let answers = texts.iter().zip(n_accepted).map(|(text, n_accepted)| {
        let tokens = text.context.tokens_from(n_before);
        Ok(Answer { text: model.decode(&tokens)?, tokens, n_accepted })
    });
    let answers = answers.collect::<Result<Vec<_>>>()?;
    if json {
        return emit_json(&answers);
    }
    answers.iter().try_for_each(|answer| emit!("{}\n", answer.text))
}

/// The logarithm of how likely a proposal y is taken in the place of x, where it is below 0.
///
/// It is p(y)^α q(x) over p(x)^α q(y). Of n tokens x is cut at each place with probability 1/n. From the cut on it is proposed
/// with that of its tokens, each p^α / Z. All p^α stand above and below, and are the same: what is left are the normalizers Z
/// and the lengths.
fn log_ratio(text: &Text, proposal: &Text) -> f64 {
    let log_n = |text: &Text| f64::from(text.n_tokens).ln();
    proposal.log_normalizers - text.log_normalizers + log_n(text) - log_n(proposal)
}
