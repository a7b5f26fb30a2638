//! What was measured of both kinds, what the one costs more, and what that may be.

use serde::Serialize;

use crate::cli::bench::samples::{quantile, sorted};
use crate::cli::table::{Align, Table};

/// Something that is measured, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantity {
    LaunchInHost,
    LaunchToOutput,
    NearCall,
    Ask,
    Step,
    AheadToken,
    Stream,
    SlowStream,
}

/// Its name for programs, for people, and what is said about it.
const TABLE: [(Quantity, &str, &str); 8] = [
    (
        Quantity::LaunchInHost,
        "launch_in_host",
        "launch of a cached guest, its one call and its end, in the host",
    ),
    (
        Quantity::LaunchToOutput,
        "launch_to_output",
        "launch of a cached guest to its first output, at the client",
    ),
    (Quantity::NearCall, "call_without_engine", "host call that asks no engine"),
    (Quantity::Ask, "call_with_engine", "host call that an engine answers without a step"),
    (Quantity::Step, "step", "step of one token"),
    (Quantity::AheadToken, "token_ahead", "token of a stream whose guest is slow"),
    (Quantity::SlowStream, "slow_stream", "the whole of that stream"),
    (Quantity::Stream, "stream", "token of a stream whose guest is fast"),
];

/// The two kinds, as the configuration has them.
const KINDS: [&str; 2] = ["thread", "process"];

/// What is promised of guests in processes of their own.
const LAUNCH_US_MAX: f64 = 300.0;
const CALL_US_MAX: f64 = 15.0;
const STREAM_PERCENT_MAX: f64 = 2.0;

/// All that was measured.
#[derive(Debug)]
pub(super) struct IsolationReport {
    device: String,
    model: String,
    n_tokens: usize,
    busy_percent: Option<f64>,
    /// As in the table, of both kinds.
    samples_us: [[Vec<f64>; 2]; TABLE.len()],
}

/// One quantity, of guests of one kind.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    isolation: &'static str,
    n_samples: usize,
    p50_us: f64,
    p90_us: f64,
    p99_us: f64,
}

/// What a process of its own costs, of medians.
#[derive(Debug, Serialize)]
struct Cost {
    name: &'static str,
    #[serde(skip)]
    title: &'static str,
    value: f64,
    unit: &'static str,
    at_most: f64,
    met: bool,
}

impl Cost {
    fn new(name: &'static str, title: &'static str, value: f64, unit: &'static str, at_most: f64) -> Self {
        // NaN meets nothing.
        Self { name, title, value, unit, at_most, met: value <= at_most }
    }
}

impl Serialize for IsolationReport {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Whole<'a> {
            device: &'a str,
            model: &'a str,
            n_tokens: usize,
            busy_percent: Option<f64>,
            measures: Vec<Row>,
            costs: Vec<Cost>,
        }
        let Self { device, model, n_tokens, busy_percent, .. } = self;
        let (measures, costs) = (self.rows().into_iter().flatten().collect(), self.costs());
        Whole { device, model, n_tokens: *n_tokens, busy_percent: *busy_percent, measures, costs }
            .serialize(serializer)
    }
}

impl IsolationReport {
    pub(super) fn new(device: &str, model: &str, n_tokens: usize, busy_percent: Option<f64>) -> Self {
        let samples_us = std::array::from_fn(|_| [Vec::new(), Vec::new()]);
        Self { device: device.to_owned(), model: model.to_owned(), n_tokens, busy_percent, samples_us }
    }

    /// Adds a sample; `kind_idx` is 0 for threads and 1 for processes.
    pub(super) fn push(&mut self, quantity: Quantity, kind_idx: usize, sample_us: f64) {
        let idx = TABLE.iter().position(|(other, ..)| *other == quantity).expect("the table has all");
        self.samples_us[idx][kind_idx].push(sample_us);
    }

    /// Of both kinds, as in the table; those without samples left out.
    fn rows(&self) -> Vec<Vec<Row>> {
        let row = |name: &'static str, kind_idx: usize, samples: &Vec<f64>| {
            let samples = sorted(samples.clone());
            let at = |share| quantile(&samples, share);
            let isolation = KINDS[kind_idx];
            let (p50_us, p90_us, p99_us) = (at(0.5), at(0.9), at(0.99));
            Row { name, isolation, n_samples: samples.len(), p50_us, p90_us, p99_us }
        };
        let of_both = |idx: usize| -> Vec<Row> {
            let (_, name, _) = TABLE[idx];
            let filled = self.samples_us[idx].iter().enumerate().filter(|(_, samples)| !samples.is_empty());
            filled.map(|(kind_idx, samples)| row(name, kind_idx, samples)).collect()
        };
        (0..TABLE.len()).map(of_both).collect()
    }

    /// The medians of a quantity; NaN without samples.
    fn medians(&self, quantity: Quantity) -> [f64; 2] {
        let idx = TABLE.iter().position(|(other, ..)| *other == quantity).expect("the table has all");
        self.samples_us[idx].each_ref().map(|samples| match samples.is_empty() {
            true => f64::NAN,
            false => quantile(&sorted(samples.clone()), 0.5),
        })
    }

    fn costs(&self) -> Vec<Cost> {
        let more = |quantity| {
            let [thread, process] = self.medians(quantity);
            process - thread
        };
        let percent = |quantity| {
            let [thread, process] = self.medians(quantity);
            100.0 * (process / thread - 1.0)
        };
        let launch = self.medians(Quantity::LaunchInHost)[1];
        vec![
            Cost::new("launch_us", "a launch", launch, "µs", LAUNCH_US_MAX),
            Cost::new(
                "call_us_more",
                "a call that an engine answers, more",
                more(Quantity::Ask),
                "µs",
                CALL_US_MAX,
            ),
            Cost::new("step_us_more", "a step of one token, more", more(Quantity::Step), "µs", CALL_US_MAX),
            Cost::new(
                "ahead_us_more",
                "a token that is there already, more",
                more(Quantity::AheadToken),
                "µs",
                1.0,
            ),
            Cost::new(
                "stream_percent",
                "a stream, slower by",
                percent(Quantity::Stream),
                "%",
                STREAM_PERCENT_MAX,
            ),
            Cost::new(
                "slow_stream_percent",
                "a stream of a slow guest, slower by",
                percent(Quantity::SlowStream),
                "%",
                STREAM_PERCENT_MAX,
            ),
        ]
    }

    /// The names of what costs more than it may.
    pub(super) fn missed(&self) -> Vec<&'static str> {
        self.costs().iter().filter(|cost| !cost.met).map(|cost| cost.name).collect()
    }

    pub(super) fn render(&self) -> String {
        let mut table = Table::new([
            ("MEASURE, µs", Align::Left),
            ("GUESTS IN", Align::Left),
            ("N", Align::Right),
            ("P50", Align::Right),
            ("P90", Align::Right),
            ("P99", Align::Right),
        ]);
        for (rows, (.., title)) in self.rows().into_iter().zip(&TABLE) {
            for (idx, row) in rows.into_iter().enumerate() {
                let title = if idx == 0 { (*title).to_owned() } else { String::new() };
                let [p50, p90, p99] = [row.p50_us, row.p90_us, row.p99_us].map(|us| format!("{us:.1}"));
                table.push([title, row.isolation.to_owned(), row.n_samples.to_string(), p50, p90, p99]);
            }
        }
        let mut costs = Table::new([
            ("IN A PROCESS, MEDIANS", Align::Left),
            ("", Align::Right),
            ("AT MOST", Align::Right),
            ("", Align::Left),
        ]);
        for Cost { title, value, unit, at_most, met, .. } in self.costs() {
            let met = if met { "met" } else { "MISSED" };
            costs.push([
                title.to_owned(),
                format!("{value:.1} {unit}"),
                format!("{at_most} {unit}"),
                met.to_owned(),
            ]);
        }
        let Self { device, model, n_tokens, .. } = self;
        let busy = self.busy_percent.map_or(String::new(), |percent| {
            format!("; other programs used {percent:.0}% of the processors before")
        });
        format!(
            "{model} on {device}; {n_tokens} greedy tokens are the same in threads and in processes{busy}\n\n{}\n{}",
            table.render(),
            costs.render(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_costs_more_than_it_may_is_named() {
        let mut report = IsolationReport::new("a processor", "tiny", 4, Some(1.0));
        for (quantity, [thread, process]) in [
            (Quantity::LaunchInHost, [100.0, 299.0]),
            (Quantity::Ask, [20.0, 35.5]),
            (Quantity::Step, [1_000.0, 1_015.0]),
            (Quantity::AheadToken, [0.5, 0.5]),
            (Quantity::Stream, [1_000.0, 1_021.0]),
        ] {
            report.push(quantity, 0, thread);
            report.push(quantity, 1, process);
        }
        // The last was not measured.
        assert_eq!(report.missed(), ["call_us_more", "stream_percent", "slow_stream_percent"]);
        let text = report.render();
        assert!(text.contains("15.5 µs") && text.contains("MISSED") && text.contains("2.1 %"), "{text}");
        let json = serde_json::to_value(&report).expect("plain data");
        assert_eq!(json["measures"].as_array().map(Vec::len), Some(10));
        assert_eq!(json["costs"][0]["met"], true);
    }
}
