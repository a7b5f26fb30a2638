//! Histograms: those that engines have counted, and the bounds of those that are counted here.

use std::fmt;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::Histogram;
use trellis_engine::Distribution;

use super::exposition::{Exposition, Labels};
use super::table::metric;

/// Those of guests, which may answer at once, or live for days.
const GUEST_BOUNDS: [f64; 14] =
    [0.01, 0.04, 0.16, 0.64, 2.5, 10.0, 40.0, 150.0, 600.0, 1800.0, 3600.0, 14400.0, 43200.0, 86400.0];

/// Those of loads: from a model that is compiled in to one of hundreds of gigabytes.
const LOAD_BOUNDS: [f64; 10] = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0];

pub(super) fn of_guests() -> Histogram {
    Histogram::new(GUEST_BOUNDS)
}

pub(super) fn of_loads() -> Histogram {
    Histogram::new(LOAD_BOUNDS)
}

/// What engines have counted, each with its labels, by bounds that are among theirs.
#[derive(Debug)]
struct Observed {
    bounds: &'static [f64],
    samples: Vec<(Labels, Distribution)>,
}

impl EncodeMetric for Observed {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        for (labels, observed) in &self.samples {
            let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
            let counts = observed.counts(self.bounds);
            let count = counts.iter().sum();
            let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
            let mut sample = encoder.encode_family(labels)?;
            sample.encode_histogram::<NoLabelSet>(observed.sum(), count, &buckets, None)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl Exposition {
    /// Adds a histogram of what engines have counted: the values of its labels, in the order of the table, and the observations.
    /// A label without a value is left out.
    pub(super) fn add_observed<'a, const N: usize>(
        &mut self,
        name: &'static str,
        bounds: &'static [f64],
        samples: impl IntoIterator<Item = ([&'a str; N], Distribution)>,
    ) {
        let names = metric(name).labels;
        debug_assert_eq!(names.len(), N, "{name}");
        let labels = |values: [&str; N]| -> Labels {
            let told = names.iter().copied().zip(values).filter(|(_, value)| !value.is_empty());
            told.map(|(label, value)| (label, value.to_owned())).collect()
        };
        let samples: Vec<_> =
            samples.into_iter().map(|(values, observed)| (labels(values), observed)).collect();
        if !samples.is_empty() {
            self.register(name, Observed { bounds, samples });
        }
    }
}
