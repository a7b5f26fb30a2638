//! What one client, and one user's clients together, may ask of the sessions.

use std::time::Duration;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};
use trellis_wire::{ACKNOWLEDGED_BYTES, OUTPUT_CREDIT_BYTES_MAX};

/// Every limit of the connections, each enforced. What bounds a single guest (its component, its inbox, its credit) are
/// [`GuestLimits`](crate::guest::GuestLimits).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct SessionLimits {
    /// Connections of one user at a time.
    pub n_connections: usize,
    /// Connections of one user that may begin in a second. About those of a second may come at once, and as many wait for their turn;
    /// more are turned away.
    pub n_connections_per_s: usize,
    /// Components of one user on their way in at a time; more uploads wait for a place.
    pub n_uploads: usize,
    /// Uploads of one user that wait for a place, or for another upload of the same component.
    pub n_uploads_waiting: usize,
    /// Time in which an upload that has its place may bring no bytes.
    pub upload_idle_ms: u64,
    /// Guests of one user that run detached, without the connection that started them.
    pub n_detached: usize,
    /// Detached guests of one user that have ended, of which what they sent last and how they ended is kept; who ended first goes
    /// first. Those that a client reads stay beside them.
    pub n_detached_ended: usize,
    /// Bytes of output of one detached guest that its client has not acknowledged; the guest waits where there are more. No fewer
    /// than the largest output and what a client may take before it acknowledges (278,592). Charged to its session while it runs.
    pub detached_bytes: usize,
    /// Bytes of acknowledged output of one detached guest that are kept for who attaches anew.
    pub detached_kept_bytes: usize,
    /// Time that a detached guest may be without a client that is attached to it; then it is ended.
    pub detached_idle_ms: u64,
    /// Time after its end that what a detached guest sent last, and how it ended, is kept for its client.
    pub detached_ended_ms: u64,
    /// Requests in flight on one connection.
    pub n_requests: usize,
    /// Bytes of one message to a guest.
    pub message_bytes: usize,
    /// Bytes of the messages of one connection that wait for room in an inbox; a message beyond that is refused.
    /// Not reading on instead would keep the credit from a guest that has to send before it receives.
    pub waiting_message_bytes: usize,
    /// Time that a client may take to say hello.
    pub hello_ms: u64,
    /// Time that a guest may take to end once it is told to; also what a closing connection may take to send what is left.
    pub stop_ms: u64,
    /// Time that guests, uploads and loads have to end by themselves once the daemon is told to, in which it takes on no others; guests
    /// are told how much of it is left. The rest is ended then, with an error that may be tried again, and after a second more nothing is
    /// waited for. With 0, the rest has `stop_ms`.
    pub drain_ms: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            n_connections: 256,
            n_connections_per_s: 250,
            n_uploads: 4,
            n_uploads_waiting: 1024,
            upload_idle_ms: 30_000,
            n_detached: 32,
            n_detached_ended: 32,
            detached_bytes: 1 << 20,
            detached_kept_bytes: 64 << 10,
            detached_idle_ms: 3_600_000,
            detached_ended_ms: 3_600_000,
            n_requests: 256,
            message_bytes: 256 << 10,
            waiting_message_bytes: 1 << 20,
            hello_ms: 5_000,
            stop_ms: 10_000,
            drain_ms: 10_000,
        }
    }
}

impl SessionLimits {
    /// In which an upload may bring no bytes.
    pub(super) fn upload_idle_time(&self) -> Duration {
        Duration::from_millis(self.upload_idle_ms)
    }

    /// In which a client has to say hello.
    pub(super) fn hello_time(&self) -> Duration {
        Duration::from_millis(self.hello_ms)
    }

    /// In which what is at work may end when the daemon does.
    pub(super) fn drain_time(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }

    /// Bytes of output that a detached guest may be ahead of its client.
    pub(super) fn detached_credit_bytes(&self) -> usize {
        self.detached_bytes.max(OUTPUT_CREDIT_BYTES_MAX + ACKNOWLEDGED_BYTES)
    }

    /// In which a detached guest has to find a client.
    pub(super) fn detached_idle_time(&self) -> Duration {
        Duration::from_millis(self.detached_idle_ms)
    }

    /// For which the end of a detached guest is kept.
    pub(super) fn detached_ended_time(&self) -> Duration {
        Duration::from_millis(self.detached_ended_ms)
    }

    /// In which a guest has to end.
    pub(super) fn stop_time(&self) -> Duration {
        Duration::from_millis(self.stop_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_that_a_detached_guest_may_be_ahead_is_as_the_table_says() {
        let least = SessionLimits { detached_bytes: 0, ..SessionLimits::default() }.detached_credit_bytes();
        let docs = SessionLimits::get_field_docs("detached_bytes").expect("it is documented");
        let shown = format!("({},{:03})", least / 1000, least % 1000);
        assert!(docs.contains(&shown), "{shown}: {docs}");
        assert!(SessionLimits::default().detached_bytes > least);
    }
}
