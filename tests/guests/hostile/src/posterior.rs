//! Particles against a distribution that is known.

use trellis_guest::{Model, Particles, Sampler, Token, TokenMask, emit_json, logprobs_all};

use crate::Outcome;

/// Tokens that may be drawn at each of two places.
const N_TOKENS: usize = 4;
const N_PARTICLES: u64 = 64;

/// What a pair of tokens is multiplied with.
fn potential(first: usize, second: usize) -> f64 {
    [[1.0, 0.2, 3.0, 0.0], [0.5, 2.0, 0.1, 1.0], [0.0, 4.0, 1.0, 0.3], [2.0, 0.0, 0.0, 1.0]][first][second]
}

/// And its first token alone, as soon as it is drawn.
fn promise(first: usize) -> f64 {
    [1.0, 0.25, 2.0, 0.5][first]
}

fn normalized(weights: Vec<f64>) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Draws pairs of tokens in so many runs, resampled between the two; emits how probable each pair is, and how often it came.
pub(crate) fn posterior(arguments: &[String]) -> Outcome {
    let n_runs: u64 = arguments.first().ok_or("the runs are needed")?.parse()?;
    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.append(model.info().bos_token.as_slice())?;
    prompt.append_text("Once upon a time")?;
    prompt.prefill()?;
    let tokens: Vec<Token> = prompt.top(N_TOKENS as u32)?.candidates.iter().map(|it| it.token).collect();

    // The model's own distribution among these tokens, by arithmetic.
    let exps = |logprobs: Vec<f32>| normalized(logprobs.into_iter().map(|it| f64::from(it).exp()).collect());
    let first = exps(prompt.logprobs(&tokens)?);
    let forks = tokens.iter().map(|&token| {
        let fork = prompt.fork()?;
        fork.append(&[token])?;
        Ok(fork)
    });
    let forks = forks.collect::<trellis_guest::Result<Vec<_>>>()?;
    let second: Vec<Vec<f64>> =
        logprobs_all(forks.iter().map(|fork| (fork, &tokens[..])))?.into_iter().map(exps).collect();
    let pairs = || (0..N_TOKENS).flat_map(|a| (0..N_TOKENS).map(move |b| (a, b)));
    let expected =
        normalized(pairs().map(|(a, b)| first[a] * second[a][b] * promise(a) * potential(a, b)).collect());

    let mask = TokenMask::allow(&model, &tokens)?;
    let base = Sampler::seeded(0).temperature(1.0).build()?;
    base.set_mask(Some(&mask))?;
    let idx_of = |token| tokens.iter().position(|&it| it == token).expect("the mask allows no other");
    let mut found = vec![0.0; N_TOKENS * N_TOKENS];
    let mut evidence = 0.0;
    for run in 0..n_runs {
        let mut particles = Particles::new(&prompt, &base.with_seed(run * N_PARTICLES), N_PARTICLES)?;
        for (idx, drawn) in particles.step(|_| true)? {
            particles[idx].log_weight += promise(idx_of(drawn.token)).ln();
        }
        particles.resample()?;
        for (idx, drawn) in particles.step(|_| true)? {
            let tokens = particles[idx].context.tokens_from(prompt.length());
            particles[idx].log_weight += potential(idx_of(tokens[0]), idx_of(drawn.token)).ln();
        }
        evidence += particles.log_evidence().exp() / n_runs as f64;
        // All of them at once: that is the estimate whose mean over runs is the posterior's, weighted by the evidence.
        let of_run = particles.log_evidence().exp();
        for (particle, share) in particles.iter().zip(particles.shares()) {
            let tokens = particle.context.tokens_from(prompt.length());
            found[idx_of(tokens[0]) * N_TOKENS + idx_of(tokens[1])] += share * of_run;
        }
    }
    let exact: f64 = pairs().map(|(a, b)| first[a] * second[a][b] * promise(a) * potential(a, b)).sum();
    emit_json(&(expected, normalized(found), exact, evidence))?;
    Ok(())
}
