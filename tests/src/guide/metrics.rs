//! The table of the metrics, as the daemon has it.

use std::fmt::Write as _;

use trellis::metrics::METRICS;

/// The table for the guide.
pub(super) fn table() -> String {
    let mut text = String::from("| metric | | labels | what it means |\n|---|---|---|---|\n");
    for metric in METRICS {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, kind, labels) = (metric.sample_name(), metric.kind.name(), labels.join(", "));
        writeln!(text, "| `{name}` | {kind} | {labels} | {} |", metric.about).expect("a string takes all");
    }
    text
}
