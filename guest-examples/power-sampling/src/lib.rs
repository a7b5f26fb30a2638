//! Draws answers from a power of the model's distribution over whole texts: what is probable becomes more so, as a text and not
//! token by token (A. Karan and Y. Du, "Reasoning with Sampling: Your Base Model is Smarter Than You Think", 2025). Drawing at
//! temperature 1/α raises each token's distribution to the power α, and knows nothing of what a token leads to. So texts that are
//! drawn like that are only proposals: a text is cut at a random place and drawn anew from there, and what comes of it is taken
//! or not (Metropolis and Hastings), so that the texts come to stand for p^α.
//!
//! In the paper a text grows in blocks, with moves after each; here texts are drawn to their ends first, and all moves are of whole
//! ones. What they come to stand for is the same. Its benchmarks are not reproduced.
//!
//! ```text
//! trellis run power-sampling "What is 37 + 48?"
//! trellis run power-sampling --alpha 4 --chains 8 --moves 20 --json "What is 37 + 48?"
//! ```
//!
//! All chains move in one batch and with one call, and what is before a cut is not computed again.

use serde::Serialize;
use trellis_guest::programs::{Definition, library};
use trellis_guest::{
    Args, Chat, Context, Error, Model, Random, Result, Sampler, Token, emit, emit_json, generate_all, seed,
};

trellis_guest::main!(run);

const USAGE: &str =
    "power-sampling [--alpha A] [--chains N] [--moves N] [--top-k K] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Answer {
    text: String,
    tokens: Vec<Token>,
}

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
    let mut texts = (0..n_chains).map(|_| prompt.fork()).collect::<Result<Vec<_>>>()?;
    let end = start.saturating_add(max_tokens).min(n_positions);
    draw_on(&texts, end, &sampler, &mut random)?;
    for _ in 0..n_moves {
        let mut proposals = Vec::new();
        for text in &texts {
            let n_kept = random.uniform() * f64::from(text.length() - start);
            let proposal = text.fork()?;
            proposal.truncate(start + n_kept as u32)?;
            proposals.push(proposal);
        }
        draw_on(&proposals, end, &sampler, &mut random)?;
        for (text, proposal) in texts.iter_mut().zip(proposals) {
            // How likely a proposal y is taken in the place of x: p(y)^α q(x) over p(x)^α q(y). Of n tokens x is cut at each place
            // with probability 1/n, and from there on y is proposed with that of its tokens, each p^α / Z. All p^α stand above
            // and below: what is left are the normalizers Z, whose logarithms were reported, and the lengths.
            let log_weight =
                |text: &Context| f64::from(text.reports()[0]) - f64::from(text.length() - start).ln();
            if random.uniform().ln() < log_weight(&proposal) - log_weight(text) {
                *text = proposal;
            }
        }
    }

    let answers = texts.iter().map(|text| {
        let tokens = text.tokens_from(start);
        Ok(Answer { text: model.decode(&tokens)?, tokens })
    });
    let answers = answers.collect::<Result<Vec<_>>>()?;
    if json {
        return emit_json(&answers);
    }
    answers.iter().try_for_each(|answer| emit!("{}\n", answer.text))
}

/// Draws all texts on in one batch, each to its end or to this length.
fn draw_on(texts: &[Context], end: u32, sampler: &Sampler, random: &mut Random) -> Result {
    let requests = texts.iter().map(|text| {
        // A draw depends on seed, position and what comes before: with the same seed it would be the same text.
        text.generate(sampler).seed(random.bits()).max_tokens(end - text.length())
    });
    generate_all(requests).map(drop)
}
