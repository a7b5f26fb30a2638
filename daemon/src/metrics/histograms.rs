//! Histograms: those of runs as an engine has counted them, and the bounds of those that are counted here.

use std::fmt;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::Histogram;
use trellis_engine::Durations;

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

/// What engines have counted, each with its labels.
#[derive(Debug)]
struct Timed {
    bounds: &'static [f64],
    samples: Vec<(Labels, Durations)>,
}

impl EncodeMetric for Timed {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        for (labels, times) in &self.samples {
            let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(times.counts().iter().copied()).collect();
            let count = times.counts().iter().sum();
            let mut sample = encoder.encode_family(labels)?;
            sample.encode_histogram::<NoLabelSet>(times.sum().as_secs_f64(), count, &buckets, None)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl Exposition {
    /// Adds what engines have counted of the runs of each model.
    pub(crate) fn add_runs(
        &mut self,
        name: &'static str,
        bounds: &'static [f64],
        models: impl IntoIterator<Item = (String, Durations)>,
    ) {
        let samples = models
            .into_iter()
            .map(|(model, times)| (metric(name).labels.iter().copied().zip([model]).collect(), times));
        let samples: Vec<_> = samples.collect();
        if !samples.is_empty() {
            self.register(name, Timed { bounds, samples });
        }
    }
}
