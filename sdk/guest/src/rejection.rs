//! Choices among what passes a test, with few tests.

use crate::Random;

/// What [`Random::choose_where`] chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passed {
    /// The index that passed.
    pub choice: usize,
    /// An estimate of the share of all weight that passes, in (0, 1].
    pub share: f64,
}

impl Random {
    /// Draws indices as likely as their weights, none twice, until one passes a test; none where none does. For tests that cost
    /// too much to be made of all indices, such as whether a text may go on with a token.
    ///
    /// What is chosen is as likely as its weight among all that pass. A text whose weight is multiplied with
    /// [`share`](Passed::share) also pays for what did not pass: on average an index weighs what it has of all weight where it
    /// passes, and nothing elsewhere. So [`Particles`](crate::Particles) stand for the distribution under the test (B. Lipkin and
    /// others, "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling", 2025; the estimator
    /// that the authors' genlm-control calls recursive).
    ///
    /// ```
    /// # use trellis_guest::Random;
    /// let only = Random::new(7).choose_where(&[1.0, 0.0, 3.0], |idx| idx == 0).expect("it passes");
    /// assert_eq!(only.choice, 0);
    /// assert!(Random::new(7).choose_where(&[1.0, 3.0], |_| false).is_none());
    /// ```
    pub fn choose_where(&mut self, weights: &[f64], mut passes: impl FnMut(usize) -> bool) -> Option<Passed> {
        let all: f64 = weights.iter().sum();
        let mut weights = weights.to_vec();
        loop {
            let left: f64 = weights.iter().sum();
            let choice = self.choose(&weights)?;
            let own = std::mem::take(&mut weights[choice]);
            if passes(choice) {
                // What was refused does not pass, and this one does. Whether the rest passes one more draw says, as a coin does:
                // all of it counts, or none.
                let rest_passes = self.choose(&weights).is_some_and(passes);
                let share = if rest_passes { left } else { own } / all;
                return Some(Passed { choice, share });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean of the share over runs that chose an index is, for each, the index's own share: what a draw from all and a
    /// test would give.
    #[test]
    fn weighted_draws_stand_for_the_distribution_under_the_rule() {
        let weights = [4.0, 1.0, 2.0, 0.5, 0.0, 0.5, 8.0];
        let sum: f64 = weights.iter().sum();
        for rule in [0b111_1111u32, 0b000_1010, 0b011_1101, 0b100_0000, 0b000_1000] {
            let passes = |idx: usize| rule >> idx & 1 == 1;
            let (mut random, n_runs) = (Random::new(u64::from(rule)), 400_000);
            let mut found = [0.0; 7];
            for _ in 0..n_runs {
                let passed = random.choose_where(&weights, passes).expect("something passes");
                found[passed.choice] += passed.share / f64::from(n_runs);
            }
            for (idx, (found, weight)) in found.into_iter().zip(weights).enumerate() {
                let expected = if passes(idx) { weight / sum } else { 0.0 };
                // Shares are at most 1, so five deviations of the mean are below this.
                assert!((found - expected).abs() < 0.004, "{found} for {expected} of {idx} under {rule:b}");
            }
        }
    }

    #[test]
    fn each_is_tested_once_at_most() {
        let mut random = Random::new(5);
        let mut tested = Vec::new();
        let none = random.choose_where(&[1.0, 0.0, 3.0], |idx| {
            tested.push(idx);
            false
        });
        assert!(none.is_none());
        tested.sort_unstable();
        assert_eq!(tested, [0, 2]);
    }
}
