//! What is measured, what it should be, and how that is shown.

use serde::Serialize;

use super::samples::{quantile, sorted};
use crate::cli::table::{Align, Table};

/// Something that is measured. [`TABLE`] has its name, unit and target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quantity {
    Stream,
    GuestStream,
    GuestOverhead,
    Contexts,
    Prefill,
    FirstToken,
    LaunchToOutput,
    LaunchInHost,
    HostCall,
    DaemonReady,
    ResidentReady,
    ResidentUsed,
}

/// What a value should be, for the bundled model on two cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
    None,
}

/// What a desktop at rest uses, and more. Beyond it timings say as much about the other programs as about ours.
const BUSY_PERCENT_MAX: f64 = 10.0;

struct Spec {
    quantity: Quantity,
    /// For programs; the unit is its end.
    name: &'static str,
    /// For people.
    title: &'static str,
    unit: &'static str,
    target: Target,
}

const fn spec(
    quantity: Quantity,
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    target: Target,
) -> Spec {
    Spec { quantity, name, title, unit, target }
}

#[rustfmt::skip]
const TABLE: [Spec; 12] = [
    spec(Quantity::Stream, "stream_tokens_per_s", "one greedy stream, engine alone", "tokens/s", Target::AtLeast(600.0)),
    spec(Quantity::GuestStream, "guest_stream_tokens_per_s", "the same through guest, socket and client", "tokens/s", Target::None),
    spec(Quantity::GuestOverhead, "guest_overhead_percent", "what that costs, median over pairs of runs", "%", Target::AtMost(5.0)),
    spec(Quantity::Contexts, "contexts_tokens_per_s", "many contexts, all together", "tokens/s", Target::AtLeast(3000.0)),
    spec(Quantity::Prefill, "prefill_tokens_per_s", "a long prompt", "tokens/s", Target::None),
    spec(Quantity::FirstToken, "first_token_ms", "first token after a prompt of 128", "ms", Target::None),
    spec(Quantity::LaunchInHost, "launch_in_host_us", "launch of a cached component, its one host call and its end, in the host", "µs", Target::AtMost(1000.0)),
    spec(Quantity::LaunchToOutput, "launch_to_output_us", "launch of a cached component to its first output, at the client", "µs", Target::None),
    spec(Quantity::HostCall, "host_call_us", "one idle host call", "µs", Target::AtMost(2.0)),
    spec(Quantity::DaemonReady, "daemon_ready_ms", "daemon, from start to first connection", "ms", Target::AtMost(300.0)),
    spec(Quantity::ResidentReady, "resident_ready_mb", "resident memory of the daemon when ready", "MB", Target::AtMost(150.0)),
    spec(Quantity::ResidentUsed, "resident_used_mb", "resident memory of the daemon after these runs", "MB", Target::AtMost(150.0)),
];

impl Target {
    /// Whether a value meets it; NaN meets nothing.
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= bound,
            Self::AtMost(bound) => value <= bound,
            Self::None => true,
        }
    }

    fn show(self) -> String {
        match self {
            Self::AtLeast(bound) => format!("≥ {bound}"),
            Self::AtMost(bound) => format!("≤ {bound}"),
            Self::None => String::new(),
        }
    }
}

/// One value, as programs get it.
#[derive(Debug, Serialize)]
pub(crate) struct Measure {
    #[serde(skip)]
    quantity: Quantity,
    name: &'static str,
    /// The median, if it was measured more than once.
    value: f64,
    /// Between which half of the samples lie.
    quartiles: [f64; 2],
    n_samples: usize,
    unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
}

/// Whether the targets are for what is being measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Targets {
    Apply,
    Ignore,
}

/// All values, and on what they were taken.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) device: String,
    pub(crate) model: String,
    pub(crate) n_tokens: usize,
    pub(crate) n_contexts: usize,
    /// What was found to give the same tokens before anything was measured.
    pub(crate) verified: String,
    /// How busy other programs kept the processors before anything was measured, where the system tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) busy_percent: Option<f64>,
    pub(crate) measures: Vec<Measure>,
    #[serde(skip)]
    pub(crate) targets: Targets,
}

impl Report {
    /// Adds what was measured, once or more often.
    ///
    /// # Panics
    /// There is no sample.
    pub(crate) fn push(&mut self, quantity: Quantity, samples: Vec<f64>) {
        let samples = sorted(samples);
        let value = quantile(&samples, 0.5);
        let spec = TABLE.iter().find(|spec| spec.quantity == quantity).expect("the table has every quantity");
        let target = match self.targets {
            Targets::Apply => spec.target,
            Targets::Ignore => Target::None,
        };
        let has_target = target != Target::None;
        self.measures.push(Measure {
            quantity,
            name: spec.name,
            value,
            quartiles: [quantile(&samples, 0.25), quantile(&samples, 0.75)],
            n_samples: samples.len(),
            unit: spec.unit,
            target: has_target.then(|| target.show()),
            met: has_target.then(|| target.is_met(value)),
        });
    }

    /// The names of the values that miss their targets.
    pub(crate) fn missed(&self) -> Vec<&'static str> {
        self.measures
            .iter()
            .filter(|measure| measure.met == Some(false))
            .map(|measure| measure.name)
            .collect()
    }

    pub(crate) fn render(&self) -> String {
        let mut table = Table::new([
            ("MEASURE", Align::Left),
            ("MEDIAN", Align::Right),
            ("QUARTILES", Align::Right),
            ("UNIT", Align::Left),
            ("TARGET", Align::Right),
            ("", Align::Left),
        ]);
        for spec in &TABLE {
            for measure in self.measures.iter().filter(|measure| measure.quantity == spec.quantity) {
                table.push([
                    spec.title.to_owned(),
                    number(measure.value),
                    measure.spread(),
                    measure.unit.to_owned(),
                    measure.target.clone().unwrap_or_default(),
                    measure.met.map_or("", |met| if met { "ok" } else { "MISSED" }).to_owned(),
                ]);
            }
        }
        let head = [("device", &self.device), ("model", &self.model), ("verified", &self.verified)];
        let head: String = head.iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect();
        let busy = self.busy_percent.filter(|&percent| percent > BUSY_PERCENT_MAX).map(|percent| {
            format!("warning   other programs use {percent:.0}% of the processors: the values are not to be trusted\n")
        });
        format!("{head}{}\n{}", busy.unwrap_or_default(), table.render())
    }
}

/// Three digits that mean something, and no more.
fn number(value: f64) -> String {
    match value.abs() {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

impl Measure {
    /// How far apart the samples lie: a target is met or missed for certain only outside.
    fn spread(&self) -> String {
        match self.n_samples {
            1 => String::new(),
            _ => format!("{} to {}", number(self.quartiles[0]), number(self.quartiles[1])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(targets: Targets) -> Report {
        Report {
            device: "cpu".to_owned(),
            model: "tiny".to_owned(),
            n_tokens: 8,
            n_contexts: 2,
            verified: "8 tokens".to_owned(),
            busy_percent: None,
            measures: Vec::new(),
            targets,
        }
    }

    #[test]
    fn every_quantity_has_one_row() {
        for (idx, spec) in TABLE.iter().enumerate() {
            assert!(
                TABLE[..idx].iter().all(|other| other.quantity != spec.quantity && other.name != spec.name)
            );
        }
    }

    #[test]
    fn targets_are_missed_by_name() {
        let mut report = report(Targets::Apply);
        report.push(Quantity::Stream, vec![600.0]);
        report.push(Quantity::HostCall, vec![2.1]);
        report.push(Quantity::GuestOverhead, vec![f64::NAN]);
        report.push(Quantity::Prefill, vec![1.0]);
        assert_eq!(report.missed(), ["host_call_us", "guest_overhead_percent"]);
        let text = report.render();
        assert!(text.contains("MISSED") && text.contains("≤ 2 "), "{text}");
    }

    #[test]
    fn another_model_has_no_targets() {
        let mut report = report(Targets::Ignore);
        report.push(Quantity::Stream, vec![1.0]);
        assert!(report.missed().is_empty());
    }

    #[test]
    fn a_busy_machine_is_mentioned() {
        let at = |percent| Report { busy_percent: percent, ..report(Targets::Apply) }.render();
        assert!(at(Some(60.4)).contains("use 60% of the processors"));
        assert!(!at(Some(2.0)).contains("warning") && !at(None).contains("warning"));
    }

    #[test]
    fn samples_are_summed_up() {
        let mut report = report(Targets::Apply);
        report.push(Quantity::Stream, vec![500.0, 900.0, 700.0, 600.0, 800.0]);
        let measure = &report.measures[0];
        assert_eq!((measure.value, measure.quartiles, measure.n_samples), (700.0, [600.0, 800.0], 5));
        assert!(report.render().contains("600 to 800"));
    }

    #[test]
    fn three_digits_are_shown() {
        assert_eq!([1.234, 12.34, 1234.5, -0.5].map(number), ["1.23", "12.3", "1234", "-0.50"]);
    }
}
