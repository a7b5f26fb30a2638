//! Random numbers of a guest's own.

use crate::Candidate;

/// Numbers that depend on the seed alone, on every machine the same (G. L. Steele and others, "Fast Splittable Pseudorandom
/// Number Generators", 2014): for what a guest decides by chance beside the draws of a [`Sampler`](crate::Sampler), which
/// have noise of their own. Not for secrets.
///
/// ```
/// use trellis_guest::Random;
///
/// assert_eq!(Random::new(7).uniform(), Random::new(7).uniform());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Random(u64);

/// What the state moves on by with each number.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The seed of the fork of this number, from 0, of several that start from one seed: fork 0 has that seed itself, the others have
/// what [`Random`] gives for it one after the other. Seeds that are near each other have no fork but by chance in common, as they
/// would have if the number were only added.
pub fn fork_seed(seed: u64, number: u64) -> u64 {
    match number.checked_sub(1) {
        None => seed,
        Some(n_before) => Random(seed.wrapping_add(n_before.wrapping_mul(GAMMA))).bits(),
    }
}

impl Random {
    /// Numbers of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Numbers of the seed that the client or the daemon chose for this run.
    pub fn of_session() -> Self {
        Self::new(crate::seed())
    }

    /// 64 bits, for the seed of a sampler or a generation for one.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 up to, and without, 1.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An index into weights, each as likely as its share in their sum. None where no weight is above 0.
    ///
    /// ```
    /// let mut random = trellis_guest::Random::new(7);
    /// assert_eq!(random.choose(&[0.0, 2.5, 0.0]), Some(1));
    /// assert_eq!(random.choose(&[0.0, 0.0]), None);
    /// ```
    pub fn choose(&mut self, weights: &[f64]) -> Option<usize> {
        let u = self.uniform();
        let last = weights.iter().rposition(|&weight| weight > 0.0)?;
        let below = u * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let idx = weights.iter().position(|weight| {
            sum += weight;
            below < sum
        });
        // Rounding may leave a little past the last of them.
        Some(idx.unwrap_or(last))
    }

    /// One of these candidates, each as likely as its probability is among them, whether they are the whole vocabulary or its
    /// most probable tokens. None where no probability is above 0.
    ///
    /// ```
    /// use trellis_guest::{Candidate, Random};
    ///
    /// let [low, high] = [(4, -2.5), (9, -0.1)].map(|(token, logprob)| Candidate { token, logprob });
    /// let mut random = Random::new(7);
    /// let n_high = (0..1000).filter(|_| random.draw(&[low, high]).is_some_and(|it| it.token == 9)).count();
    /// assert!((880..950).contains(&n_high)); // e^−0.1 in e^−0.1 + e^−2.5 is 0.917
    /// ```
    pub fn draw(&mut self, candidates: &[Candidate]) -> Option<Candidate> {
        let largest = candidates.iter().map(|it| it.logprob).fold(f32::NEG_INFINITY, f32::max);
        let weights = candidates.iter().map(|it| f64::from(it.logprob - largest).exp());
        self.choose(&weights.collect::<Vec<_>>()).map(|idx| candidates[idx])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_of_neighbouring_seeds_have_seeds_of_their_own() {
        let mut seeds: Vec<u64> =
            (0..64).flat_map(|seed| (0..64).map(move |number| fork_seed(seed, number))).collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 64 * 64);
        let mut random = Random::new(7);
        assert_eq!(
            [0, 1, 2, 3].map(|number| fork_seed(7, number)),
            [7, random.bits(), random.bits(), random.bits()]
        );
    }

    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        // The first of seed 1234567, as https://prng.di.unimi.it/splitmix64.c gives them.
        let mut random = Random::new(1_234_567);
        let first = [(); 3].map(|()| random.bits());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn indices_are_as_likely_as_their_weights() {
        let (weights, n) = ([1.0, 0.0, 5.0, 2.0], 100_000);
        let mut random = Random::new(3);
        let mut counts = [0u32; 4];
        for _ in 0..n {
            counts[random.choose(&weights).expect("there is weight")] += 1;
        }
        for (count, weight) in counts.into_iter().zip(weights) {
            let share = f64::from(count) / f64::from(n);
            assert!((share - weight / 8.0).abs() < 0.01, "{share} of {weight}");
        }
        assert_eq!(counts[1], 0);
    }

    #[test]
    fn candidates_are_as_likely_as_they_are_probable_whatever_they_sum_to() {
        let (probabilities, n) = ([0.1f32, 0.3, 0.0], 100_000);
        let candidates: Vec<Candidate> =
            (0..).zip(probabilities).map(|(token, p)| Candidate { token, logprob: p.ln() - 200.0 }).collect();
        let mut random = Random::new(5);
        let mut counts = [0u32; 3];
        for _ in 0..n {
            counts[random.draw(&candidates).expect("there is probability").token as usize] += 1;
        }
        assert!((f64::from(counts[0]) / f64::from(n) - 0.25).abs() < 0.01, "{counts:?}");
        assert_eq!(counts[2], 0);
        assert!(random.draw(&candidates[2..]).is_none() && random.draw(&[]).is_none());
    }
}
