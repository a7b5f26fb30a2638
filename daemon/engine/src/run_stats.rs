//! What becomes of runs: how long they take, how many tokens they have and draw, and how they end.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::observed::{Distribution, Observed};
use crate::run::Finish;

/// How a run came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunEnd {
    /// A stop token was drawn, or its constraint allowed nothing more.
    Stop,
    /// It drew as many tokens as asked for, or the context was full.
    Length,
    /// Its guest went on otherwise, or ended.
    Abort,
    /// It failed.
    Error,
}

impl RunEnd {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Abort, Self::Error];

    /// As vLLM names it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

impl From<Finish> for RunEnd {
    fn from(finish: Finish) -> Self {
        match finish {
            Finish::Stop | Finish::Complete => Self::Stop,
            Finish::MaxTokens | Finish::ContextFull => Self::Length,
        }
    }
}

/// Up to the first token, in seconds.
const FIRST_BOUNDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];

/// From one token to the next, in seconds.
const EACH_BOUNDS: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];

/// From begin to end, in seconds: those of vLLM and those of OpenTelemetry.
const WHOLE_BOUNDS: [f64; 35] = [
    0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.32, 0.5, 0.64, 0.8, 1.0, 1.28, 1.5, 2.0, 2.5, 2.56, 5.0, 5.12, 10.0,
    10.24, 15.0, 20.0, 20.48, 30.0, 40.0, 40.96, 50.0, 60.0, 81.92, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
];

/// Tokens of a run: the bounds of vLLM and those of OpenTelemetry.
const TOKENS_BOUNDS: [f64; 32] = [
    1.0, 2.0, 4.0, 5.0, 10.0, 16.0, 20.0, 50.0, 64.0, 100.0, 200.0, 256.0, 500.0, 1e3, 1024.0, 2e3, 4096.0,
    5e3, 1e4, 16384.0, 2e4, 5e4, 65536.0, 1e5, 2e5, 262144.0, 5e5, 1e6, 1048576.0, 4194304.0, 16777216.0,
    67108864.0,
];

/// Tokens of a step.
const STEP_BOUNDS: [f64; 13] =
    [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

const NANOS: f64 = 1e9;

/// The runs of a model, and the sizes of its steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStats {
    first: Observed,
    first_of_finished: Observed,
    gap: Observed,
    each: Observed,
    /// In the order of [`RunEnd::ALL`].
    whole: [Observed; 4],
    n_begun_with: Observed,
    n_drawn: Observed,
    step: Observed,
    n_tokens_drawn: u64,
}

impl Default for RunStats {
    fn default() -> Self {
        let whole = || Observed::new(&WHOLE_BOUNDS);
        Self {
            first: Observed::new(&FIRST_BOUNDS),
            first_of_finished: Observed::new(&FIRST_BOUNDS),
            gap: Observed::new(&EACH_BOUNDS),
            each: Observed::new(&EACH_BOUNDS),
            whole: [whole(), whole(), whole(), whole()],
            n_begun_with: Observed::new(&TOKENS_BOUNDS),
            n_drawn: Observed::new(&TOKENS_BOUNDS),
            step: Observed::new(&STEP_BOUNDS),
            n_tokens_drawn: 0,
        }
    }
}

fn note_time(observed: &mut Observed, bounds: &[f64], time: Duration) {
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    observed.note(bounds, time.as_secs_f64(), nanos);
}

fn note_tokens(observed: &mut Observed, bounds: &[f64], n_tokens: usize) {
    observed.note(bounds, n_tokens as f64, n_tokens as u64);
}

impl RunStats {
    /// Both, number by number.
    #[must_use]
    pub fn combined(&self, other: &Self, combine: fn(u64, u64) -> u64) -> Self {
        let both = |of: fn(&Self) -> &Observed| of(self).combined(of(other), combine);
        let [stop, length, abort, error] = &self.whole;
        let [other_stop, other_length, other_abort, other_error] = &other.whole;
        Self {
            first: both(|stats| &stats.first),
            first_of_finished: both(|stats| &stats.first_of_finished),
            gap: both(|stats| &stats.gap),
            each: both(|stats| &stats.each),
            whole: [
                stop.combined(other_stop, combine),
                length.combined(other_length, combine),
                abort.combined(other_abort, combine),
                error.combined(other_error, combine),
            ],
            n_begun_with: both(|stats| &stats.n_begun_with),
            n_drawn: both(|stats| &stats.n_drawn),
            step: both(|stats| &stats.step),
            n_tokens_drawn: combine(self.n_tokens_drawn, other.n_tokens_drawn),
        }
    }

    /// Seconds from the turn that took up a run to the one that gave its first token.
    #[must_use]
    pub fn first(&self) -> Distribution {
        self.first.with(&FIRST_BOUNDS, NANOS)
    }

    /// The same of those alone that came to their ends well.
    #[must_use]
    pub fn first_of_finished(&self) -> Distribution {
        self.first_of_finished.with(&FIRST_BOUNDS, NANOS)
    }

    /// Seconds from one token to the next, of runs that do not wait for their guests. Tokens that come in one turn are one.
    #[must_use]
    pub fn gap(&self) -> Distribution {
        self.gap.with(&EACH_BOUNDS, NANOS)
    }

    /// The mean time of a token after the first in seconds, of runs that did not wait for their guests and came to their ends
    /// well.
    #[must_use]
    pub fn each(&self) -> Distribution {
        self.each.with(&EACH_BOUNDS, NANOS)
    }

    /// Seconds from begin to end, of those that ended in one of these ways.
    #[must_use]
    pub fn whole(&self, ends: &[RunEnd]) -> Distribution {
        let these = ends.iter().map(|&end| &self.whole[end as usize]);
        let sum = Observed::new(&WHOLE_BOUNDS);
        these.fold(sum, |sum, one| sum.combined(one, u64::saturating_add)).with(&WHOLE_BOUNDS, NANOS)
    }

    /// Tokens of the context where a run began, computed before or not.
    #[must_use]
    pub fn n_begun_with(&self) -> Distribution {
        self.n_begun_with.with(&TOKENS_BOUNDS, 1.0)
    }

    /// Tokens that a run drew.
    #[must_use]
    pub fn n_drawn(&self) -> Distribution {
        self.n_drawn.with(&TOKENS_BOUNDS, 1.0)
    }

    /// Tokens computed in a step.
    #[must_use]
    pub fn step(&self) -> Distribution {
        self.step.with(&STEP_BOUNDS, 1.0)
    }

    /// Tokens that runs have drawn, those that are under way included.
    #[must_use]
    pub fn n_tokens_drawn(&self) -> u64 {
        self.n_tokens_drawn
    }

    pub(crate) fn note_first(&mut self, time: Duration) {
        note_time(&mut self.first, &FIRST_BOUNDS, time);
    }

    pub(crate) fn note_first_of_finished(&mut self, time: Duration) {
        note_time(&mut self.first_of_finished, &FIRST_BOUNDS, time);
    }

    pub(crate) fn note_gap(&mut self, time: Duration) {
        note_time(&mut self.gap, &EACH_BOUNDS, time);
    }

    pub(crate) fn note_each(&mut self, time: Duration) {
        note_time(&mut self.each, &EACH_BOUNDS, time);
    }

    pub(crate) fn note_drawn(&mut self) {
        self.n_tokens_drawn += 1;
    }

    pub(crate) fn note_end(&mut self, end: RunEnd, time: Duration, n_begun_with: usize, n_drawn: usize) {
        note_time(&mut self.whole[end as usize], &WHOLE_BOUNDS, time);
        note_tokens(&mut self.n_begun_with, &TOKENS_BOUNDS, n_begun_with);
        note_tokens(&mut self.n_drawn, &TOKENS_BOUNDS, n_drawn);
    }

    pub(crate) fn note_step(&mut self, n_tokens: usize) {
        note_tokens(&mut self.step, &STEP_BOUNDS, n_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_by_their_ends() {
        let mut stats = RunStats::default();
        for (idx, end) in RunEnd::ALL.into_iter().enumerate() {
            for _ in 0..=idx {
                stats.note_end(end, Duration::from_millis(15), 100, idx);
            }
        }
        for (idx, end) in RunEnd::ALL.into_iter().enumerate() {
            assert_eq!(stats.whole(&[end]).counts(&[0.01, 0.02]), [0, idx as u64 + 1, 0], "{end:?}");
        }
        let all = stats.whole(&RunEnd::ALL);
        assert_eq!(all.counts(&[]), [10]);
        assert!((all.sum() - 0.15).abs() < 1e-9, "{all:?}");
        assert!((stats.n_drawn().sum() - 20.0).abs() < 1e-9);
        assert_eq!(stats.n_begun_with().counts(&[50.0, 100.0]), [0, 10, 0]);
        let both = stats.combined(&RunStats::default(), u64::saturating_add);
        assert_eq!(both, stats);
    }

    #[test]
    fn bounds_ascend() {
        let all: [&[f64]; 5] = [&FIRST_BOUNDS, &EACH_BOUNDS, &WHOLE_BOUNDS, &TOKENS_BOUNDS, &STEP_BOUNDS];
        for bounds in all {
            assert!(bounds.is_sorted_by(|a, b| a < b), "{bounds:?}");
        }
    }
}
