//! What is told at one moment, and its texts.

use std::fmt;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::table::{Kind, metric};

/// The labels of a sample.
pub(super) type Labels = Vec<(&'static str, String)>;

/// The text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format 0.0.4 of Prometheus, for whoever does not ask for the other.
    Prometheus,
}

impl TextFormat {
    /// The type of such a text, for HTTP.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
        }
    }
}

/// All metrics, with their samples at one moment.
#[derive(Debug, Default)]
pub struct Exposition {
    registry: Registry,
}

/// Numbers that were read off at one moment.
#[derive(Debug)]
struct Samples {
    kind: MetricType,
    samples: Vec<(Labels, f64)>,
}

impl EncodeMetric for Samples {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        for (labels, value) in &self.samples {
            let mut sample = encoder.encode_family(labels)?;
            match self.kind {
                MetricType::Counter => sample.encode_counter::<NoLabelSet, _, f64>(value, None)?,
                _ => sample.encode_gauge(value)?,
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        self.kind
    }
}

impl Exposition {
    /// Adds the samples of a counter or a gauge: the values of its labels, in the order of the table, and the number. Without
    /// samples it is not told.
    pub(crate) fn add<'a, const N: usize>(
        &mut self,
        name: &'static str,
        samples: impl IntoIterator<Item = ([&'a str; N], f64)>,
    ) {
        let metric = metric(name);
        debug_assert_eq!(metric.labels.len(), N, "{name}");
        let labels =
            |values: [&str; N]| metric.labels.iter().copied().zip(values.map(str::to_owned)).collect();
        let samples: Vec<_> = samples.into_iter().map(|(values, number)| (labels(values), number)).collect();
        let kind = match metric.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge | Kind::Histogram => MetricType::Gauge,
        };
        if !samples.is_empty() {
            self.register(name, Samples { kind, samples });
        }
    }

    /// Adds what was counted elsewhere.
    pub(super) fn register(
        &mut self,
        name: &'static str,
        samples: impl EncodeMetric + fmt::Debug + Send + Sync + 'static,
    ) {
        let metric = metric(name);
        // The registry puts units behind names, and full stops behind what they mean.
        let about = metric.about.trim_end_matches('.');
        match metric.unit() {
            Some(unit) => {
                let stem = &name[..name.len() - unit.len() - 1];
                self.registry.register_with_unit(stem, about, Unit::Other(unit.to_owned()), samples);
            }
            None => self.registry.register(name, about, samples),
        }
    }

    /// As text.
    ///
    /// # Panics
    /// Never: a string takes all that is written to it.
    #[must_use]
    pub fn text(&self, format: TextFormat) -> String {
        let mut text = String::new();
        let written = match format {
            TextFormat::OpenMetrics => text::encode(&mut text, &self.registry),
            TextFormat::Prometheus => prometheus_text::encode(&mut text, &self.registry),
        };
        written.expect("a string takes all");
        text
    }
}
