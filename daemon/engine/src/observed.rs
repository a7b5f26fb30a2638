//! What is observed again and again, counted by bounds.

use serde::{Deserialize, Serialize};

/// Observations by the bounds up to which they lie, and their sum. Whoever counts into it has the bounds, which stay the same. The
/// last count is of those beyond all bounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Observed {
    counts: Vec<u64>,
    /// In tokens, or nanoseconds.
    sum: u64,
}

/// Observations with their bounds, as they are told.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Observed {
    pub(crate) fn new(bounds: &[f64]) -> Self {
        Self { counts: vec![0; bounds.len() + 1], sum: 0 }
    }

    /// Counts one: `value` in the unit of the bounds, `amount` in that of the sum.
    pub(crate) fn note(&mut self, bounds: &[f64], value: f64, amount: u64) {
        self.counts[bounds.partition_point(|&bound| bound < value)] += 1;
        self.sum = self.sum.saturating_add(amount);
    }

    /// Both, number by number.
    pub(crate) fn combined(&self, other: &Self, combine: fn(u64, u64) -> u64) -> Self {
        let counts = self.counts.iter().zip(&other.counts).map(|(a, b)| combine(*a, *b));
        Self { counts: counts.collect(), sum: combine(self.sum, other.sum) }
    }

    /// With the bounds that it was counted by; the sum in their unit, of which there are so many to one of its own.
    pub(crate) fn with(&self, bounds: &'static [f64], n_per_unit: f64) -> Distribution {
        Distribution { bounds, counts: self.counts.clone(), sum: self.sum as f64 / n_per_unit }
    }
}

impl Distribution {
    /// How many lie up to each of these bounds and beyond the one before it, and, last, beyond all. They are among those that it
    /// was counted by.
    #[must_use]
    pub fn counts(&self, bounds: &[f64]) -> Vec<u64> {
        debug_assert!(bounds.iter().all(|bound| self.bounds.contains(bound)), "{bounds:?}");
        let mut counts = vec![0; bounds.len() + 1];
        for (idx, count) in self.counts.iter().enumerate() {
            let place = self.bounds.get(idx).map_or(bounds.len(), |own| bounds.partition_point(|b| b < own));
            counts[place] += count;
        }
        counts
    }

    /// All observations together, in the unit of the bounds.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: [f64; 4] = [1.0, 2.0, 5.0, 10.0];

    #[test]
    fn what_is_at_a_bound_counts_up_to_it() {
        let mut observed = Observed::new(&BOUNDS);
        for n in [0, 1, 2, 10, 11] {
            observed.note(&BOUNDS, n as f64, n * 1000);
        }
        let told = observed.with(&BOUNDS, 1000.0);
        assert_eq!(told.counts(&BOUNDS), [2, 1, 0, 1, 1]);
        assert!((told.sum() - 24.0).abs() < 1e-9, "{told:?}");
        let both = observed.combined(&observed, u64::saturating_add).with(&BOUNDS, 1000.0);
        assert_eq!(both.counts(&BOUNDS), [4, 2, 0, 2, 2]);
    }

    #[test]
    fn fewer_bounds_leave_nothing_out() {
        let mut observed = Observed::new(&BOUNDS);
        for n in [1, 2, 3, 9, 40] {
            observed.note(&BOUNDS, n as f64, n);
        }
        assert_eq!(observed.with(&BOUNDS, 1.0).counts(&[2.0, 10.0]), [2, 2, 1]);
        assert_eq!(observed.with(&BOUNDS, 1.0).counts(&[]), [5]);
    }
}
