//! Continues a text in which no word is longer than so many letters, with particles: sequential Monte Carlo (A. K. Lew and
//! others, "Sequential Monte Carlo Steering of Large Language Models using Probabilistic Programs", 2023, whose first
//! example this is). Texts that break the rule are out, and others go on in their place: what is left is as probable as the
//! model says among all texts that keep to the rule. Masking tokens instead would lead into sentences that cannot end well.
//!
//! ```text
//! trellis run smc "Once upon a time"
//! trellis run smc --particles 64 --letters 6 --temperature 1 --json "Ownership is"
//! ```

mod words;

use serde::Serialize;
use trellis_guest::{Args, Model, Particles, Result, Sampler, emit, emit_json, seed};
use words::longest_word;

trellis_guest::main!(run);

const USAGE: &str = "smc [--particles N] [--letters N] [--temperature T] [--max-tokens N] [--json] TEXT";

#[derive(Serialize)]
struct Report {
    /// One text, as likely as its weight says.
    text: Option<String>,
    /// All that are left, with their shares.
    texts: Vec<(String, f64)>,
    n_resampled: usize,
    /// The logarithm of the share of all texts that keep to the rule.
    log_evidence: f64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_particles = args.option("--particles")?.unwrap_or(16);
    let n_letters = args.option("--letters")?.unwrap_or(5);
    let temperature = args.option("--temperature")?.unwrap_or(0.8);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(40);
    let text = args.text()?;

    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.append(model.info().bos_token.as_slice())?;
    prompt.append_text(&text)?;
    let n_before = prompt.length();
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;
    let mut particles = Particles::new(&prompt, &sampler, n_particles)?;

    let ends = |tokens: &[u32]| tokens.last().is_some_and(|&token| model.is_stop(token));
    let mut n_resampled = 0;
    for _ in 0..max_tokens {
        let drawn = particles.step(|particle| !ends(&particle.context.tokens_from(n_before)))?;
        if drawn.is_empty() {
            break;
        }
        for (idx, _) in drawn {
            let tokens = particles[idx].context.tokens_from(n_before);
            if longest_word(&model.decode(&tokens)?) > n_letters {
                particles[idx].log_weight = f64::NEG_INFINITY;
            }
        }
        if particles.effective_size() < 0.75 * particles.len() as f64 {
            if !particles.resample()? {
                break;
            }
            n_resampled += 1;
        }
    }

    let text_of = |particle: &trellis_guest::Particle| {
        let mut tokens = particle.context.tokens_from(n_before);
        tokens.pop_if(|token| model.is_stop(*token));
        model.decode(&tokens)
    };
    let log_evidence = particles.log_evidence();
    let shares = particles.shares();
    let left = particles.iter().zip(shares).filter(|(_, share)| *share > 0.0);
    let texts = left.map(|(particle, share)| Ok((text_of(particle)?, share))).collect::<Result<Vec<_>>>()?;
    let text = particles.draw().map(text_of).transpose()?;
    if json {
        return emit_json(&Report { text, texts, n_resampled, log_evidence });
    }
    match text {
        Some(text) => emit!("{text}\n"),
        None => emit!("no text was left; more --particles or --letters may help\n"),
    }
}
