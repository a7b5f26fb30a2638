//! Answers with particles (sequential Monte Carlo): many texts side by side, and after a few tokens those that count for little
//! may give way to copies of those that count for much (A. K. Lew and others, "Sequential Monte Carlo Steering of Large
//! Language Models using Probabilistic Programs", 2023).
//!
//! Texts are drawn at a temperature and weighed towards the model's own distribution, by p over q for each token (importance
//! sampling): a text that goes astray because it is drawn hot is soon left behind. With `--letters` a text with a longer word
//! is out, which is the paper's first example; masking tokens instead would lead into sentences that cannot end well. The paper
//! draws several ways on for each particle and takes some of them away without replacement; here this is plain sequential Monte
//! Carlo, with systematic resampling wherever the effective size is below three quarters of the particles. The paper's language
//! for such programs and its better proposals are not here.
//!
//! ```text
//! trellis run smc --letters 6 --piece 2 "Tell me a short story."
//! trellis run smc --particles 8 --temperature 2.5 --json "Think step by step: what is 468 + 275?"
//! ```

use serde::Serialize;
use trellis_guest::programs::{Definition, library};
use trellis_guest::{
    Args, Chat, Model, Particle, Particles, Random, Result, Sampler, emit, emit_json, generate_all, seed,
};

trellis_guest::main!(run);

const USAGE: &str =
    "smc [--particles N] [--piece N] [--letters N] [--temperature T] [--max-tokens N] [--json] PROMPT";

#[derive(Serialize)]
struct Report {
    /// One text, as likely as its weight says.
    text: Option<String>,
    /// All that are left, with their shares.
    texts: Vec<(String, f64)>,
    n_resampled: usize,
    /// An estimate: the logarithm of the share of the model's texts that keep to the rule.
    log_evidence: f64,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let n_particles = args.option("--particles")?.unwrap_or(16);
    let n_piece = args.option("--piece")?.unwrap_or(4u32).max(1);
    let n_letters = args.option("--letters")?.unwrap_or(usize::MAX);
    let temperature: f32 = args.option("--temperature")?.unwrap_or(1.0);
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(160);
    let power = temperature.recip();
    if !(power > 0.0 && power.is_finite()) {
        return Err(args.mistake(format!("--temperature is {temperature}, and has to be finite and above 0")));
    }
    let prompt = args.text()?;

    let model = Model::open_default()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user(&prompt))?;
    let n_before = context.length();
    let max_tokens = max_tokens.min(context.capacity() - n_before);
    // Token v is drawn with probability p(v)^power / Z, and the sum of all ln Z so far is reported.
    let definition = Definition::build(|b| library::power(b.logits(), b.parameter(0)));
    let sampler = Sampler::by_program(&model.program(&definition)?, seed())?;
    sampler.set_parameters(&[power])?;
    let mut particles = Particles::new(&context, &sampler, n_particles)?;
    let mut random = Random::new(seed());

    let tokens_of = |particle: &Particle| particle.context.tokens_from(n_before);
    let log_normalizers = |particle: &Particle| particle.context.reports().first().copied().unwrap_or(0.0);
    let n_next = |particle: &Particle| {
        let tokens = tokens_of(particle);
        let is_whole = tokens.last().is_some_and(|&token| model.is_stop(token));
        let goes_on = !is_whole && particle.log_weight > f64::NEG_INFINITY;
        if goes_on { n_piece.min(max_tokens - tokens.len() as u32) } else { 0 }
    };
    let mut n_resampled = 0;
    while particles.iter().any(|particle| n_next(particle) > 0) {
        let before: Vec<f32> = particles.iter().map(log_normalizers).collect();
        let pieces = generate_all(particles.iter().map(|particle| {
            particle.context.generate(&sampler).seed(random.bits()).max_tokens(n_next(particle))
        }))?;
        for (idx, (piece, before)) in pieces.iter().zip(before).enumerate() {
            let particle = &mut particles[idx];
            // p over p^power / Z, of each token.
            let log_ratio = (1.0 - power) * piece.logprob() + log_normalizers(particle) - before;
            let text = model.decode(&tokens_of(particle))?;
            let mut words = text.split(|c: char| !c.is_alphabetic());
            let is_out = words.any(|word| word.chars().count() > n_letters);
            particle.log_weight += if is_out { f64::NEG_INFINITY } else { f64::from(log_ratio) };
        }
        if particles.effective_size() < 0.75 * particles.len() as f64 && particles.resample()? {
            n_resampled += 1;
        }
    }

    let text_of = |particle: &Particle| model.decode(&tokens_of(particle));
    let (log_evidence, shares) = (particles.log_evidence(), particles.shares());
    let left = particles.iter().zip(shares).filter(|(_, share)| *share > 0.0);
    let texts = left.map(|(particle, share)| Ok((text_of(particle)?, share))).collect::<Result<Vec<_>>>()?;
    let text = particles.draw().map(text_of).transpose()?;
    if json {
        return emit_json(&Report { text, texts, n_resampled, log_evidence });
    }
    emit!("{}\n", text.as_deref().unwrap_or("no text was left; more --particles or --letters may help"))
}
