//! How long loads of models took.

use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use super::exposition::{Exposition, Labels};
use super::histograms::of_loads;

/// Loads that have come to their ends, by these.
#[derive(Debug)]
pub(crate) struct Loads(Family<Labels, Histogram, fn() -> Histogram>);

impl Default for Loads {
    fn default() -> Self {
        Self(Family::new_with_constructor(of_loads))
    }
}

impl Loads {
    /// One came to this end: loaded, failed, or `given_up`.
    pub(crate) fn note(&self, outcome: &'static str, time: Duration) {
        self.0.get_or_create(&vec![("outcome", outcome.to_owned())]).observe(time.as_secs_f64());
    }

    /// Adds them to what is told.
    pub(crate) fn add_to(&self, exposition: &mut Exposition) {
        exposition.register("trellis_model_load_duration_seconds", self.0.clone());
    }
}
