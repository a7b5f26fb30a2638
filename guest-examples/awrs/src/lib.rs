//! Continues a text in which no word is longer than so many letters, with particles whose tokens all pass: adaptive weighted
//! rejection sampling (B. Lipkin and others, "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection
//! Sampling", 2025). In `smc` a text that breaks the rule is out. Here tokens are drawn until one keeps to it, none twice, and the
//! text is weighed by an estimate of how probable such tokens were: a rule that is expensive to test is tested on a few tokens,
//! not on the whole vocabulary. What is left is as probable as the model says among all texts that keep to the rule; masking alone
//! would favour texts whose beginnings leave little to go on with.
//!
//! Reproduced is the sampler with the recursive estimator of its weights; of its uses only a rule on words is here. The model's
//! distribution is cut to the `--top-k` most probable tokens, which come with one call for all particles.
//!
//! ```text
//! trellis run awrs "Once upon a time"
//! trellis run awrs --particles 32 --letters 4 --json "Ownership is"
//! ```

use serde::Serialize;
use trellis_guest::{
    Args, Context, Model, Particle, Particles, Passed, Random, Result, Sampler, Token, emit, emit_json, seed,
    top_all,
};

trellis_guest::main!(run);

const USAGE: &str = "awrs [--particles N] [--letters N] [--top-k K] [--max-tokens N] [--json] TEXT";

#[derive(Default, Serialize)]
struct Report {
    texts: Vec<Weighed>,
    /// Tokens that were appended, and those that were tested for it.
    n_tokens: usize,
    n_tested: usize,
    /// The logarithm of the share of all texts that keep to the rule.
    log_evidence: f64,
}

/// A text that is left, and how likely it is among them.
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
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(40);
    let text = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.append(model.info().bos_token.as_slice())?;
    prompt.append_text(&text)?;
    let start = prompt.length();
    let mut random = Random::new(seed());
    let mut particles = Particles::new(&prompt, &Sampler::seeded(random.bits()).build()?, n_particles)?;

    let keeps = |tokens: &[Token]| {
        let is_short = |word: &str| word.chars().count() <= n_letters;
        model.decode(tokens).is_ok_and(|text| text.split(|c: char| !c.is_alphabetic()).all(is_short))
    };
    let ends = |text: &Context| text.tokens_from(start).pop().is_some_and(|token| model.is_stop(token));
    let goes_on = |it: &Particle| it.log_weight > f64::NEG_INFINITY && !ends(&it.context);
    let mut report = Report::default();
    for _ in 0..max_tokens.min(prompt.capacity() - start) {
        let going: Vec<usize> = (0..particles.len()).filter(|&idx| goes_on(&particles[idx])).collect();
        if going.is_empty() {
            break;
        }
        let nexts = top_all(going.iter().map(|&idx| &particles[idx].context), top_k)?;
        for (idx, next) in going.into_iter().zip(nexts) {
            let weights: Vec<f64> = next.candidates.iter().map(|it| f64::from(it.logprob).exp()).collect();
            let tokens = particles[idx].context.tokens_from(start);
            let passed = random.choose_where(&weights, |choice| {
                report.n_tested += 1;
                keeps(&[&tokens[..], &[next.candidates[choice].token]].concat())
            });
            let Some(Passed { choice, share }) = passed else {
                particles[idx].log_weight = f64::NEG_INFINITY;
                continue;
            };
            particles[idx].log_weight += share.ln();
            particles[idx].context.append(&[next.candidates[choice].token])?;
            report.n_tokens += 1;
        }
        if particles.effective_size() < 0.5 * particles.len() as f64 && !particles.resample()? {
            break;
        }
    }

    report.log_evidence = particles.log_evidence();
    for (particle, share) in particles.iter().zip(particles.shares()).filter(|(_, share)| *share > 0.0) {
        let tokens = particle.context.tokens_from(start);
        report.texts.push(Weighed { text: model.decode(&tokens)?, tokens, share });
    }
    if json {
        return emit_json(&report);
    }
    match particles.draw() {
        Some(particle) => emit!("{}\n", model.decode(&particle.context.tokens_from(start))?),
        None => emit!("no text was left; more --particles, --letters or --top-k may help\n"),
    }
}
