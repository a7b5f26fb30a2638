//! Draws without replacement, until one passes.

use trellis_guest::Random;

/// What was drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    /// The first that passed.
    pub(crate) choice: usize,
    /// An estimate of the share of all that pass. Its mean is right whatever was drawn before, so a text that is multiplied
    /// with it stands for the model's distribution under the rule.
    pub(crate) share: f64,
}

/// Draws indices as likely as their weights, none twice, until one passes; none where none does.
///
/// What was refused is known not to pass. Of what is left, the one that passed is certain; whether the rest passes one more
/// draw says, as a coin does: all of it counts, or none. (The estimator that the authors' genlm-control calls recursive.)
pub(crate) fn draw(
    mut weights: Vec<f64>,
    random: &mut Random,
    mut passes: impl FnMut(usize) -> bool,
) -> Option<Passed> {
    let all: f64 = weights.iter().sum();
    loop {
        let left: f64 = weights.iter().sum();
        let choice = random.choose(&weights)?;
        let own = std::mem::take(&mut weights[choice]);
        if passes(choice) {
            let rest_passes = random.choose(&weights).is_some_and(passes);
            let share = if rest_passes { left } else { own } / all;
            return Some(Passed { choice, share });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean of the share over runs that drew an index is, for each, the index's own share: what a draw from all and a
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
                let passed = draw(weights.to_vec(), &mut random, passes).expect("something passes");
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
        let none = draw(vec![1.0, 0.0, 3.0], &mut random, |idx| {
            tested.push(idx);
            false
        });
        assert!(none.is_none());
        tested.sort_unstable();
        assert_eq!(tested, [0, 2]);
    }
}
