//! What the host costs, for people and for programs.

use serde::Serialize;

use crate::cli::bench::samples::{quantile, sorted};
use crate::cli::table::{Align, Table};

/// Steps of so many rows over contexts of one length.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Case {
    pub(super) n_rows: usize,
    pub(super) context_len: usize,
    /// Steps that count: with every row in them.
    pub(super) n_steps: usize,
    pub(super) n_steps_seen: usize,
    /// Processor time of the engine's thread outside of the device.
    pub(super) median_us: f64,
    pub(super) p99_us: f64,
    pub(super) longest_us: f64,
}

impl Case {
    /// `None` without samples.
    pub(super) fn of(
        n_rows: usize,
        context_len: usize,
        samples_us: Vec<f64>,
        n_steps_seen: usize,
    ) -> Option<Self> {
        let samples_us = sorted(samples_us);
        Some(Self {
            n_rows,
            context_len,
            n_steps: samples_us.len(),
            n_steps_seen,
            longest_us: *samples_us.last()?,
            median_us: quantile(&samples_us, 0.5),
            p99_us: quantile(&samples_us, 0.99),
        })
    }
}

/// Steps in which runs end and begin.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Ends {
    #[serde(flatten)]
    pub(super) case: Case,
    pub(super) run_tokens: usize,
    pub(super) mean_rows: f64,
    /// Calls that ask the allocator for memory; nothing where the build does not count them.
    pub(super) allocations_per_step: Option<f64>,
}

/// A fork of one context; medians.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Fork {
    pub(super) n_tokens: usize,
    pub(super) n_forks: usize,
    /// Processor time of the call.
    pub(super) caller_us: f64,
    /// Of the engine's thread.
    pub(super) engine_us: f64,
    /// Of the engine's thread when the fork is dropped.
    pub(super) release_us: f64,
}

/// All of it.
#[derive(Debug, Serialize)]
pub(super) struct HostReport {
    /// A reading of the clock, two of which are in each figure in part.
    pub(super) clock_us: f64,
    pub(super) busy_percent: Option<f64>,
    pub(super) cases: Vec<Case>,
    /// One beam search each, whose steps wait for one another: all of it is between two steps.
    pub(super) searches: Vec<Case>,
    /// Guests that verify guesses, whose steps wait for one another as well.
    pub(super) verifications: Vec<Case>,
    pub(super) ends: Option<Ends>,
    pub(super) fork: Option<Fork>,
}

impl HostReport {
    pub(super) fn render(&self) -> String {
        let mut text = format!(
            "device    none: it computes nothing\nfigures   processor time of the engine's thread, a session and a guest \
             for each row; one reading of the clock takes {:.2} µs\n",
            self.clock_us
        );
        text.extend(
            self.busy_percent
                .map(|percent| format!("beside    other programs, {percent:.0}% of the processors\n")),
        );
        let mut table = Table::new([
            ("ROWS", Align::Right),
            ("CONTEXT", Align::Right),
            ("STEPS", Align::Right),
            ("MEDIAN µs", Align::Right),
            ("P99 µs", Align::Right),
            ("LONGEST µs", Align::Right),
            ("ns A ROW", Align::Right),
            ("OF THE SHORTEST", Align::Right),
        ]);
        for case in &self.cases {
            let shortest = self.cases.iter().filter(|other| other.n_rows == case.n_rows);
            let shortest = shortest.min_by_key(|other| other.context_len);
            let ratio = shortest
                .filter(|shortest| shortest.context_len < case.context_len)
                .map(|shortest| format!("{:.2} x", case.median_us / shortest.median_us));
            table.push([
                case.n_rows.to_string(),
                case.context_len.to_string(),
                case.n_steps.to_string(),
                format!("{:.1}", case.median_us),
                format!("{:.1}", case.p99_us),
                format!("{:.1}", case.longest_us),
                format!("{:.0}", case.median_us * 1e3 / case.n_rows as f64),
                ratio.unwrap_or_default(),
            ]);
        }
        text.push_str(&format!("\n{}", table.render()));
        for Case { n_rows, context_len, median_us, p99_us, .. } in &self.searches {
            text.push_str(&format!(
                "\n{n_rows} beams after {context_len}: {median_us:.1} µs between two steps in the median, {p99_us:.1} at p99"
            ));
        }
        for Case { n_rows, context_len, median_us, p99_us, .. } in &self.verifications {
            text.push_str(&format!(
                "\n{n_rows} verifications after {context_len}: {median_us:.1} µs between two steps in the median, {p99_us:.1} at p99"
            ));
        }
        text.push('\n');
        if let Some(Ends { case, run_tokens, mean_rows, allocations_per_step }) = &self.ends {
            let allocations = allocations_per_step.map_or(
                "calls of the allocator: not counted, build with --features count-allocations".to_owned(),
                |n| format!("{n:.1} calls of the allocator a step"),
            );
            text.push_str(&format!(
                "\nruns of {run_tokens} that end and begin, {} guests: {:.1} µs a step in the median, {:.1} at p99, {mean_rows:.0} \
                 rows; {allocations}\n",
                case.n_rows, case.median_us, case.p99_us
            ));
        }
        if let Some(Fork { n_tokens, n_forks, caller_us, engine_us, release_us }) = &self.fork {
            text.push_str(&format!(
                "a fork of {n_tokens} tokens: {caller_us:.1} µs in its call, {engine_us:.1} µs on the engine's thread; {release_us:.1} \
                 µs there when it is dropped (medians of {n_forks})\n"
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_contexts_are_held_against_short_ones() {
        let case =
            |context_len, us| Case::of(32, context_len, vec![us, us + 1.0, us + 2.0], 3).expect("samples");
        let report = HostReport {
            clock_us: 0.25,
            busy_percent: None,
            cases: vec![case(1_000, 99.0), case(100_000, 149.0)],
            searches: vec![case(2_048, 70.0)],
            verifications: vec![case(128, 90.0)],
            ends: None,
            fork: None,
        };
        let text = report.render();
        assert!(text.contains("100.0") && text.contains("1.50 x") && text.contains("0.25 µs"), "{text}");
        assert!(text.contains("32 beams after 2048: 71.0 µs"), "{text}");
        assert!(Case::of(1, 1, Vec::new(), 0).is_none());
    }
}
