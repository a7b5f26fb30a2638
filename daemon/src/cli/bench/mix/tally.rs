//! What a load was seen to do, and the numbers that come of it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::cli::bench::samples::{median, quantile, sorted};

/// A token that was pulled, or a prompt that was done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    pub(super) at: Instant,
    /// Since the token before; of a prompt, since it was sent.
    pub(super) gap: Option<Duration>,
}

#[derive(Debug, Default)]
struct Inner {
    marks: Vec<Mark>,
    last: Option<Instant>,
}

/// The marks of one stream, one guest or one row of prompts.
#[derive(Debug, Default)]
pub(super) struct Marks(Mutex<Inner>);

impl Marks {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A token has come.
    pub(super) fn token(&self) {
        let at = Instant::now();
        let mut inner = self.lock();
        let gap = inner.last.replace(at).map(|last| at - last);
        inner.marks.push(Mark { at, gap });
    }

    /// The next token says nothing about a gap: the benchmark itself did something in between.
    pub(super) fn pause(&self) {
        self.lock().last = None;
    }

    /// Something that began then is done.
    pub(super) fn done_since(&self, begun: Instant) {
        let at = Instant::now();
        self.lock().marks.push(Mark { at, gap: Some(at - begun) });
    }

    /// All marks so far.
    pub(super) fn all(&self) -> Vec<Mark> {
        self.lock().marks.clone()
    }
}

/// Times between tokens, or of prompts, in milliseconds; nothing without samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Gaps {
    pub(super) n: usize,
    /// The mean of those that end in a window, the median over the windows: finer than a rate, which counts whole tokens.
    pub(super) mean_ms: f64,
    pub(super) p50_ms: f64,
    pub(super) p90_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) longest_ms: f64,
}

impl Gaps {
    /// Those that ended in the windows, whose bounds are given: one more than there are windows.
    pub(super) fn of(marks: &[Mark], bounds: &[Instant]) -> Option<Self> {
        let mut windows = vec![Vec::new(); bounds.len() - 1];
        for mark in marks {
            if let (Some(gap), Some(window)) = (mark.gap, window(mark, bounds)) {
                windows[window].push(gap.as_secs_f64() * 1e3);
            }
        }
        let means = windows.iter().filter(|gaps| !gaps.is_empty());
        let means = means.map(|gaps| gaps.iter().sum::<f64>() / gaps.len() as f64).collect::<Vec<_>>();
        let samples = sorted(windows.concat());
        let &longest_ms = samples.last()?;
        Some(Self {
            n: samples.len(),
            mean_ms: median(means),
            longest_ms,
            p50_ms: quantile(&samples, 0.5),
            p90_ms: quantile(&samples, 0.9),
            p99_ms: quantile(&samples, 0.99),
        })
    }
}

/// The window in which a mark is, if it is in any.
fn window(mark: &Mark, bounds: &[Instant]) -> Option<usize> {
    let n_begun = bounds.partition_point(|bound| *bound <= mark.at);
    n_begun.checked_sub(1).filter(|&window| window + 1 < bounds.len())
}

/// Tokens a second in each window, whose bounds are given: one more than there are windows.
pub(super) fn rates(marks: &[Mark], bounds: &[Instant]) -> Vec<f64> {
    let mut counts = vec![0_u64; bounds.len() - 1];
    for window in marks.iter().filter_map(|mark| window(mark, bounds)) {
        counts[window] += 1;
    }
    per_second(&counts, bounds)
}

/// A rate of each window from a counter that was read at its bounds.
pub(super) fn counter_rates(readings: &[u64], bounds: &[Instant]) -> Vec<f64> {
    let counts: Vec<u64> = readings.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    per_second(&counts, bounds)
}

fn per_second(counts: &[u64], bounds: &[Instant]) -> Vec<f64> {
    let lengths = bounds.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64());
    counts.iter().zip(lengths).map(|(&count, seconds)| count as f64 / seconds).collect()
}

/// The median rate. Prompts come in large pieces: of theirs, the mean over all windows.
pub(super) fn pace(rates: &[f64], is_even: bool) -> f64 {
    if is_even { median(rates.to_vec()) } else { rates.iter().sum::<f64>() / rates.len() as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(begin: Instant, ms: u64) -> Instant {
        begin + Duration::from_millis(ms)
    }

    #[test]
    fn gaps_are_those_of_the_measured_time() {
        let begin = Instant::now();
        let mark = |ms, gap_ms: u64| Mark { at: at(begin, ms), gap: Some(Duration::from_millis(gap_ms)) };
        let mut marks: Vec<Mark> = (1..=100).map(|i| mark(10 * i, i)).collect();
        marks.push(Mark { at: at(begin, 500), gap: None });
        marks.push(mark(5_000, 900));
        // Nothing ends in the last window, which has no mean.
        let bounds = [0, 105, 1_500, 2_000].map(|ms| at(begin, ms));
        let gaps = Gaps::of(&marks, &bounds).expect("gaps");
        assert_eq!((gaps.n, gaps.p50_ms, gaps.longest_ms), (100, 50.5, 100.0));
        // The means are 5.5 and 55.5.
        assert!((gaps.mean_ms - 30.5).abs() < 1e-9, "{gaps:?}");
        assert!((gaps.p90_ms - 90.1).abs() < 1e-9 && (gaps.p99_ms - 99.01).abs() < 1e-9, "{gaps:?}");
        assert_eq!(Gaps::of(&marks, &[begin, at(begin, 5)]), None);
    }

    #[test]
    fn a_token_counts_in_its_window() {
        let begin = Instant::now();
        let bounds = [begin, at(begin, 100), at(begin, 300)];
        let marks: Vec<Mark> =
            [0, 50, 99, 100, 299, 300].map(|ms| Mark { at: at(begin, ms), gap: None }).to_vec();
        assert_eq!(rates(&marks, &bounds), [30.0, 10.0]);
        assert_eq!(counter_rates(&[5, 5, 25], &bounds), [0.0, 100.0]);
        assert_eq!((pace(&[1.0, 9.0, 2.0], true), pace(&[1.0, 9.0, 2.0], false)), (2.0, 4.0));
    }

    #[test]
    fn a_pause_hides_one_gap() {
        let marks = Marks::default();
        marks.token();
        marks.token();
        marks.pause();
        marks.token();
        let gaps: Vec<bool> = marks.all().iter().map(|mark| mark.gap.is_some()).collect();
        assert_eq!(gaps, [false, true, false]);
    }
}
