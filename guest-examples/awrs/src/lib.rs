//! Continues a text in which no word is longer than so many letters, with particles whose tokens all pass: adaptive weighted
//! rejection sampling (B. Lipkin and others, "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection
//! Sampling", COLM 2025, arXiv 2504.05410). In `smc` a text that breaks the rule is out. Here tokens are drawn until one keeps
//! to it, none twice, and the text is weighed by an estimate of how probable such tokens were: a rule that is expensive to test
//! is tested on a few tokens, not on the whole vocabulary. What is left is as probable as the model says among all texts that
//! keep to the rule; masking alone would favour texts whose beginnings leave little to go on with.
//!
//! ```text
//! trellis run awrs "Once upon a time"
//! trellis run awrs --particles 32 --letters 4 --temperature 1 --json "Ownership is"
//! ```
//!
//! The model's distribution is cut to the `--top-k` most probable tokens, which come with one call for all particles.

mod rejection;
mod words;

use serde::Serialize;
use trellis_guest::{Args, Model, Particles, Random, Result, Sampler, Token, emit, emit_json, seed, top_all};
use words::longest_word;

trellis_guest::main!(run);

const USAGE: &str =
    "awrs [--particles N] [--letters N] [--top-k K] [--temperature T] [--max-tokens N] [--json] TEXT";

#[derive(Serialize)]
struct Report {
    /// One text, as likely as its weight says.
    text: Option<String>,
    /// All that are left, with their shares.
    texts: Vec<Weighed>,
    n_resampled: usize,
    /// Tokens that were appended, and those that were tested for it.
    n_tokens: usize,
    n_tested: usize,
    /// The logarithm of the share of all texts that keep to the rule.
    log_evidence: f64,
}

#[derive(Serialize)]
struct Weighed {
    text: String,
    tokens: Vec<Token>,
    share: f64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_particles = args.option("--particles")?.unwrap_or(16);
    let n_letters = args.option("--letters")?.unwrap_or(5);
    let top_k = args.option("--top-k")?.unwrap_or(256);
    let temperature: f64 = args.option("--temperature")?.unwrap_or(0.8);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(40);
    if !(temperature > 0.0 && temperature.is_finite()) {
        return Err(args.mistake(format!("--temperature is {temperature}, and has to be above 0")));
    }
    let text = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.append(model.info().bos_token.as_slice())?;
    prompt.append_text(&text)?;
    let n_before = prompt.length();
    let mut random = Random::new(seed());
    let mut particles = Particles::new(&prompt, &Sampler::seeded(random.bits()).build()?, n_particles)?;

    let vocabulary = model.vocabulary()?;
    let bytes_of = |tokens: &[Token]| -> Vec<u8> {
        tokens.iter().flat_map(|&token| &vocabulary[token as usize]).copied().collect()
    };
    let ends = |tokens: &[Token]| tokens.last().is_some_and(|&token| model.is_stop(token));
    let (mut n_resampled, mut n_tokens, mut n_tested) = (0, 0, 0);
    for _ in 0..max_tokens.min(prompt.capacity() - n_before) {
        let tokens: Vec<_> = particles.iter().map(|it| it.context.tokens_from(n_before)).collect();
        let goes_on = |idx: &usize| particles[*idx].log_weight > f64::NEG_INFINITY && !ends(&tokens[*idx]);
        let going: Vec<usize> = (0..particles.len()).filter(goes_on).collect();
        if going.is_empty() {
            break;
        }
        let nexts = top_all(going.iter().map(|&idx| &particles[idx].context), top_k)?;
        for (idx, next) in going.into_iter().zip(nexts) {
            let weigh = |logprob: f32| (f64::from(logprob - next.candidates[0].logprob) / temperature).exp();
            let weights = next.candidates.iter().map(|candidate| weigh(candidate.logprob)).collect();
            let text = bytes_of(&tokens[idx]);
            let passed = rejection::draw(weights, &mut random, |choice| {
                n_tested += 1;
                let whole = [&text[..], &bytes_of(&[next.candidates[choice].token])].concat();
                longest_word(&String::from_utf8_lossy(&whole)) <= n_letters
            });
            particles[idx].log_weight += passed.as_ref().map_or(f64::NEG_INFINITY, |it| it.share.ln());
            if let Some(passed) = passed {
                particles[idx].context.append(&[next.candidates[passed.choice].token])?;
                n_tokens += 1;
            }
        }
        if particles.effective_size() < 0.5 * particles.len() as f64 {
            if !particles.resample()? {
                break;
            }
            n_resampled += 1;
        }
    }

    let text_of =
        |tokens: &[Token]| model.decode(if ends(tokens) { &tokens[..tokens.len() - 1] } else { tokens });
    let log_evidence = particles.log_evidence();
    let shares = particles.shares();
    let left = particles.iter().zip(shares).filter(|(_, share)| *share > 0.0);
    let texts = left.map(|(particle, share)| {
        let tokens = particle.context.tokens_from(n_before);
        Ok(Weighed { text: text_of(&tokens)?, tokens, share })
    });
    let texts = texts.collect::<Result<Vec<_>>>()?;
    let drawn = particles.draw().map(|particle| text_of(&particle.context.tokens_from(n_before)));
    let text = drawn.transpose()?;
    if json {
        return emit_json(&Report { text, texts, n_resampled, n_tokens, n_tested, log_evidence });
    }
    match text {
        Some(text) => emit!("{text}\n"),
        None => emit!("no text was left; more --particles, --letters or --top-k may help\n"),
    }
}
