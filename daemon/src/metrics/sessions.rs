//! What sessions count: requests for guests, and how guests ended.

use std::time::Instant;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use super::exposition::{Exposition, Labels};
use super::histograms::{PROVIDER, of_requests};

/// What a request for a guest is, among the operations that OpenTelemetry's conventions tell apart. They have none of this kind.
const OPERATION: &str = "run_guest";

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
        Self { requests: Family::new_with_constructor(of_requests), ended: Family::default() }
    }
}

impl SessionCounts {
    /// A client asks for a guest.
    pub(crate) fn begin(&self) -> Request<'_> {
        Request { counts: self, begun: Instant::now(), has_run: false, error: Some(GIVEN_UP.to_owned()) }
    }

    /// Adds them to what is told.
    pub(crate) fn add_to(&self, exposition: &mut Exposition) {
        exposition.register("gen_ai_server_request_duration_seconds", self.requests.clone());
        exposition.register("trellis_guests_ended", self.ended.clone());
    }
}

/// A request for a guest; counted when it is dropped.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    counts: &'a SessionCounts,
    begun: Instant,
    has_run: bool,
    error: Option<String>,
}

impl Request<'_> {
    /// Its guest runs.
    pub(crate) fn note_run(&mut self) {
        self.has_run = true;
    }

    /// It ends now, well or with an error of this code.
    pub(crate) fn end(mut self, error: Option<&str>) {
        self.error = error.map(str::to_owned);
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        let error = self.error.take();
        if self.has_run {
            let reason = error.clone().unwrap_or_else(|| "finished".to_owned());
            self.counts.ended.get_or_create(&vec![("reason", reason)]).inc();
        }
        let mut labels = vec![
            ("gen_ai_operation_name", OPERATION.to_owned()),
            ("gen_ai_provider_name", PROVIDER.to_owned()),
        ];
        labels.extend(error.map(|error| ("error_type", error)));
        self.counts.requests.get_or_create(&labels).observe(self.begun.elapsed().as_secs_f64());
    }
}
