//! Populations of contexts with weights, for sequential Monte Carlo.

use std::ops::{Index, IndexMut};

use crate::{Candidate, Context, Random, Result, Sampler, step_all};

/// A context that stands for a part of a distribution over texts.
#[derive(Debug)]
pub struct Particle {
    /// Its text so far.
    pub context: Context,
    /// The logarithm of its weight: 0 for 1, negative infinity for a text that is out. A policy adds the logarithm of what
    /// makes a token better or worse than its sampler thought.
    pub log_weight: f64,
    sampler: Sampler,
}

/// Particles that begin alike and draw with seeds of their own (A. K. Lew and others, "Sequential Monte Carlo Steering of
/// Large Language Models using Probabilistic Programs", 2023).
///
/// Weighted as they are, they stand for the distribution of the sampler times all that their weights were multiplied with.
/// Resampling lets good ones go on several times in the place of bad ones. A copy shares all pages of what it is a copy of.
///
/// ```no_run
/// # use trellis_guest::{Context, Particles, Result, Sampler};
/// # fn f(prompt: &Context, is_good: impl Fn(u32) -> bool) -> Result<()> {
/// let sampler = Sampler::seeded(7).temperature(1.0).build()?;
/// let mut particles = Particles::new(prompt, &sampler, 16)?;
/// for _ in 0..40 {
///     for (idx, drawn) in particles.step(|_| true)? {
///         if !is_good(drawn.token) {
///             particles[idx].log_weight = f64::NEG_INFINITY;
///         }
///     }
///     if particles.effective_size() < 8.0 && !particles.resample()? {
///         break; // all are out
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Particles {
    particles: Vec<Particle>,
    /// Of the weights that resampling has taken away.
    log_evidence: f64,
    random: Random,
}

impl Particles {
    /// So many forks of a context, of weight 1 each. Particle `i` draws with the seed of the sampler, its lowest bits
    /// flipped by `i`.
    ///
    /// # Errors
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded) for contexts or objects.
    pub fn new(prompt: &Context, sampler: &Sampler, n: u64) -> Result<Self> {
        let forks = prompt.forks(n, sampler)?.into_iter();
        let particles =
            forks.map(|(context, sampler)| Particle { context, log_weight: 0.0, sampler }).collect();
        Ok(Self { particles, log_evidence: 0.0, random: Random::new(sampler.seed()) })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.particles.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.particles.is_empty()
    }

    /// Draws a token for each particle that goes on and is not out, in one batch; returns what was drawn, by particle.
    ///
    /// # Errors
    /// Those of [`Context::step`].
    pub fn step(&mut self, goes_on: impl Fn(&Particle) -> bool) -> Result<Vec<(usize, Candidate)>> {
        let draws = |particle: &Particle| particle.log_weight > f64::NEG_INFINITY && goes_on(particle);
        let drawing: Vec<(usize, &Particle)> =
            self.particles.iter().enumerate().filter(|(_, particle)| draws(particle)).collect();
        let drawn = step_all(drawing.iter().map(|(_, particle)| (&particle.context, &particle.sampler)))?;
        Ok(drawing.iter().map(|&(idx, _)| idx).zip(drawn).collect())
    }

    /// The share of each particle in all weight; zeros where all are out.
    pub fn shares(&self) -> Vec<f64> {
        shares(self.particles.iter().map(|particle| particle.log_weight))
    }

    /// How many particles of equal weight would say as much (Kong, Liu and Wong, 1994): 1 where one has all the weight, 0
    /// where all are out.
    pub fn effective_size(&self) -> f64 {
        let squares: f64 = self.shares().iter().map(|share| share * share).sum();
        if squares > 0.0 { 1.0 / squares } else { 0.0 }
    }

    /// The logarithm of the mean weight of all that was drawn: an estimate of how much of the sampler's distribution is left
    /// under the weights.
    pub fn log_evidence(&self) -> f64 {
        self.log_evidence + log_mean(self.particles.iter().map(|particle| particle.log_weight))
    }

    /// Replaces the particles by as many of weight 1, each of them about as often as its share says (systematic resampling:
    /// G. Kitagawa, 1996). False where all are out; nothing is changed then.
    ///
    /// # Errors
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded) for contexts; nothing is changed then.
    pub fn resample(&mut self) -> Result<bool> {
        let Some(ancestors) = systematic(&self.shares(), self.random.uniform()) else { return Ok(false) };
        // The first copy of a particle is the particle itself.
        let mut forks = Vec::with_capacity(ancestors.len());
        for (slot, &ancestor) in ancestors.iter().enumerate() {
            let is_first = slot == 0 || ancestors[slot - 1] != ancestor;
            forks.push(if is_first { None } else { Some(self.particles[ancestor].context.fork()?) });
        }
        self.log_evidence = self.log_evidence();
        let mut contexts: Vec<Option<Context>> = Vec::with_capacity(ancestors.len());
        let mut samplers = Vec::with_capacity(ancestors.len());
        for Particle { context, sampler, .. } in self.particles.drain(..) {
            contexts.push(Some(context));
            samplers.push(sampler);
        }
        let slots = ancestors.into_iter().zip(forks).zip(samplers);
        self.particles = slots
            .map(|((ancestor, fork), sampler)| {
                let context = fork.or_else(|| contexts[ancestor].take()).expect("taken once");
                Particle { context, log_weight: 0.0, sampler }
            })
            .collect();
        Ok(true)
    }

    /// One particle, as likely as its share says; none where all are out.
    pub fn draw(&mut self) -> Option<&Particle> {
        let idx = self.random.choose(&self.shares())?;
        self.particles.get(idx)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Particle> {
        self.particles.iter()
    }
}

impl Index<usize> for Particles {
    type Output = Particle;

    fn index(&self, idx: usize) -> &Particle {
        &self.particles[idx]
    }
}

impl IndexMut<usize> for Particles {
    fn index_mut(&mut self, idx: usize) -> &mut Particle {
        &mut self.particles[idx]
    }
}

fn shares(log_weights: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    let most = log_weights.clone().fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY {
        return log_weights.map(|_| 0.0).collect();
    }
    let weights: Vec<f64> = log_weights.map(|weight| (weight - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

fn log_mean(log_weights: impl Iterator<Item = f64> + Clone) -> f64 {
    let most = log_weights.clone().fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY {
        return most;
    }
    let n = log_weights.clone().count() as f64;
    most + (log_weights.map(|weight| (weight - most).exp()).sum::<f64>() / n).ln()
}

/// The particle that goes on in each place, in rising order: places are `(i + u) / n` along the shares. None where there are
/// no shares.
fn systematic(shares: &[f64], u: f64) -> Option<Vec<usize>> {
    let last = shares.iter().rposition(|&share| share > 0.0)?;
    let n = shares.len() as f64;
    let (mut idx, mut below) = (0, shares[0]);
    let place = |slot: usize| {
        let place = (slot as f64 + u) / n;
        while place >= below && idx < last {
            idx += 1;
            below += shares[idx];
        }
        idx
    };
    Some((0..shares.len()).map(place).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_goes_on_as_often_as_its_share_says() {
        assert_eq!(systematic(&[0.25; 4], 0.3), Some(vec![0, 1, 2, 3]));
        assert_eq!(systematic(&[0.0, 1.0, 0.0], 0.99), Some(vec![1, 1, 1]));
        assert_eq!(systematic(&[0.0; 3], 0.5), None);
        let shares = [0.1, 0.0, 0.42, 0.03, 0.45];
        let (mut random, n_runs) = (Random::new(3), 20_000);
        let mut counts = [0usize; 5];
        for _ in 0..n_runs {
            let places = systematic(&shares, random.uniform()).expect("there is weight");
            for (idx, share) in shares.iter().enumerate() {
                let n = places.iter().filter(|&&place| place == idx).count();
                assert!((n as f64 - 5.0 * share).abs() < 1.0, "{n} of {share}");
                counts[idx] += n;
            }
        }
        for (n, share) in counts.into_iter().zip(shares) {
            assert!((n as f64 / (5 * n_runs) as f64 - share).abs() < 0.01, "{n} of {share}");
        }
        // Shares that come to a little less than 1.
        assert_eq!(systematic(&[0.5, 0.5 - 1e-15, 0.0], 0.999_999), Some(vec![0, 1, 1]));
    }

    #[test]
    fn weights_of_any_size_are_compared() {
        let of = |weights: &[f64]| shares(weights.iter().copied());
        assert_eq!(of(&[-1e300, 0.0]), [0.0, 1.0]);
        assert_eq!(of(&[-5000.0, -5000.0]), [0.5, 0.5]);
        assert_eq!(of(&[f64::NEG_INFINITY; 2]), [0.0, 0.0]);
        let mean = log_mean([2f64.ln(), f64::NEG_INFINITY, 4f64.ln()].into_iter());
        assert!((mean - 2f64.ln()).abs() < 1e-12, "{mean}");
        assert_eq!(log_mean([f64::NEG_INFINITY].into_iter()), f64::NEG_INFINITY);
    }
}
