//! How long runs take to their first token, and from one to the next.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Observations by the bounds up to which they lie, and their sum. The last count is of those beyond all bounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Durations {
    counts: Vec<u64>,
    sum: Duration,
}

impl Durations {
    fn new(bounds: &[f64]) -> Self {
        Self { counts: vec![0; bounds.len() + 1], sum: Duration::ZERO }
    }

    fn note(&mut self, bounds: &[f64], time: Duration) {
        let seconds = time.as_secs_f64();
        self.counts[bounds.partition_point(|&bound| bound < seconds)] += 1;
        self.sum += time;
    }

    /// How many lie up to each bound and beyond the one before it; the last are beyond all bounds.
    #[must_use]
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Both, number by number.
    #[must_use]
    pub fn combined(&self, other: &Self, combine: fn(u64, u64) -> u64) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let counts = self.counts.iter().zip(&other.counts).map(|(a, b)| combine(*a, *b));
        let sum = Duration::from_nanos(combine(nanos(self.sum), nanos(other.sum)));
        Self { counts: counts.collect(), sum }
    }

    /// All observations together.
    #[must_use]
    pub fn sum(&self) -> Duration {
        self.sum
    }
}

/// The times of the runs of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunTimes {
    first: Durations,
    each: Durations,
}

impl Default for RunTimes {
    fn default() -> Self {
        Self { first: Durations::new(&Self::FIRST_BOUNDS), each: Durations::new(&Self::EACH_BOUNDS) }
    }
}

impl RunTimes {
    /// The bounds for [`Self::first`], in seconds: those that OpenTelemetry recommends for `gen_ai.server.time_to_first_token`.
    pub const FIRST_BOUNDS: [f64; 16] =
        [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
    /// The bounds for [`Self::each`], in seconds: those that OpenTelemetry recommends for `gen_ai.server.time_per_output_token`.
    pub const EACH_BOUNDS: [f64; 13] =
        [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

    /// Both, number by number.
    #[must_use]
    pub fn combined(&self, other: &Self, combine: fn(u64, u64) -> u64) -> Self {
        let (first, each) = (&self.first, &self.each);
        Self { first: first.combined(&other.first, combine), each: each.combined(&other.each, combine) }
    }

    /// From the turn that took up a run to the one that gave its first token.
    #[must_use]
    pub fn first(&self) -> &Durations {
        &self.first
    }

    /// The mean time of a token after the first, of runs that did not wait for their guests and came to their ends.
    #[must_use]
    pub fn each(&self) -> &Durations {
        &self.each
    }

    pub(crate) fn note_first(&mut self, time: Duration) {
        self.first.note(&Self::FIRST_BOUNDS, time);
    }

    pub(crate) fn note_each(&mut self, time: Duration) {
        self.each.note(&Self::EACH_BOUNDS, time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_at_a_bound_counts_up_to_it() {
        let mut times = RunTimes::default();
        for ms in [0, 1, 2, 10_000, 10_001] {
            times.note_first(Duration::from_millis(ms));
        }
        let counts = times.first().counts();
        assert_eq!((counts[0], counts[1], counts[15], counts[16]), (2, 1, 1, 1), "{counts:?}");
        assert_eq!(counts.iter().sum::<u64>(), 5);
        assert_eq!(times.first().sum(), Duration::from_millis(20_004));
        assert_eq!(times.each(), RunTimes::default().each());
    }
}
