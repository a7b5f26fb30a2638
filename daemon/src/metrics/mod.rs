//! What the daemon tells monitoring: counters and gauges of the whole daemon, in the text formats of Prometheus.
//!
//! - Comes in: what the service reads off itself at the moment it is asked, and what sessions and loads have counted
//!   (`sessions`, `loads`). Counters that would go back
//!   are held where they were (`busy`). Nothing is sampled in between: a daemon that nobody asks does no work for this.
//! - Goes out: an [`Exposition`] as text, to a client over the socket, or over HTTP to whoever asks on a loopback address
//!   (`http`).
//! - Every metric stands in `table`, with its name and what it means. Names of vLLM's and of OpenTelemetry's conventions are taken
//!   where what they mean there is what they mean here (`requests` says what a request is); all others begin with `trellis_`.
//! - Must not happen: a metric that the table does not have; a zero for what is not measured, where no sample belongs; a label
//!   that tells users or guests apart, since all users of the machine may look.

mod busy;
mod exposition;
mod histograms;
mod http;
mod loads;
mod requests;
mod sessions;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use busy::BusySeen;
pub use exposition::{Exposition, TextFormat};
pub(crate) use http::{Endpoint, is_loopback};
pub(crate) use loads::Loads;
pub(crate) use sessions::Request as SessionRequest;
pub use sessions::SessionCounts;
pub use table::{Kind, METRICS, Metric};
