//! What sessions count: requests for guests, and how guests ended.

use std::time::Instant;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use super::exposition::{Exposition, Labels};
use super::histograms::of_guests;

/// What a client is told of a guest that was given up with its connection.
const GIVEN_UP: &str = "cancelled";

/// Counters of all sessions that there were. Clones count together.
#[derive(Clone, Debug)]
pub struct SessionCounts {
    requests: Family<Labels, Histogram, fn() -> Histogram>,
    ended: Family<Labels, Counter>,
}

impl Default for SessionCounts {
    fn default() -> Self {
        Self { requests: Family::new_with_constructor(of_guests), ended: Family::default() }
    }
}

impl SessionCounts {
    /// A client asks for a guest.
    pub(crate) fn begin(&self) -> Request {
        Request {
            counts: self.clone(),
            begun: Instant::now(),
            has_run: false,
            error: Some(GIVEN_UP.to_owned()),
        }
    }

    /// Adds them to what is told.
    pub(crate) fn add_to(&self, exposition: &mut Exposition) {
        exposition.register("trellis_guest_duration_seconds", self.requests.clone());
        exposition.register("trellis_guests_ended", self.ended.clone());
    }
}

/// A request for a guest; counted when it is dropped.
#[derive(Debug)]
pub(crate) struct Request {
    counts: SessionCounts,
    begun: Instant,
    has_run: bool,
    error: Option<String>,
}

impl Request {
    /// Its guest runs.
    pub(crate) fn note_run(&mut self) {
        self.has_run = true;
    }

    /// It ends now, well or with an error of this code.
    pub(crate) fn end(mut self, error: Option<&str>) {
        self.error = error.map(str::to_owned);
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let reason = vec![("reason", self.error.take().unwrap_or_else(|| "finished".to_owned()))];
        if self.has_run {
            self.counts.ended.get_or_create(&reason).inc();
        }
        self.counts.requests.get_or_create(&reason).observe(self.begun.elapsed().as_secs_f64());
    }
}
