use std::time::Duration;

/// What one client, and one user's clients together, may ask of the sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections of one user at a time.
    pub n_connections_per_actor_max: usize,
    /// Components of one user on their way in at a time; more uploads wait for a place.
    pub n_uploads_per_actor_max: usize,
    /// Uploads of one user that wait for a place, or for another upload of the same component.
    pub n_uploads_waiting_per_actor_max: usize,
    /// How long an upload that has its place may bring no bytes.
    pub upload_idle_timeout: Duration,
    /// Requests in flight on one connection.
    pub n_requests_max: usize,
    /// Bytes of a component.
    pub component_bytes_max: u64,
    /// Messages in a guest's inbox; more wait outside it.
    pub n_messages_max: usize,
    /// Bytes in a guest's inbox; more wait outside it.
    pub inbox_bytes_max: usize,
    /// Bytes of one message to a guest.
    pub message_bytes_max: usize,
    /// Bytes of the messages of one connection that wait for room in an inbox; a message beyond that is refused.
    /// Not reading on instead would keep the credit from a guest that has to send before it receives.
    pub waiting_message_bytes_max: usize,
    /// Credit that a client may leave open for one guest, in bytes: what the daemon may have to hold for it.
    pub credit_bytes_max: u64,
    /// How long a client may take to say hello.
    pub hello_timeout: Duration,
    /// How long a guest may take to end once it is told to; also how long a closing connection may take to send
    /// what is left.
    pub stop_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            n_connections_per_actor_max: 256,
            n_uploads_per_actor_max: 4,
            n_uploads_waiting_per_actor_max: 1024,
            upload_idle_timeout: Duration::from_secs(30),
            n_requests_max: 256,
            component_bytes_max: 64 * 1024 * 1024,
            n_messages_max: 16,
            inbox_bytes_max: 1024 * 1024,
            message_bytes_max: 256 * 1024,
            waiting_message_bytes_max: 1024 * 1024,
            credit_bytes_max: 4 * 1024 * 1024,
            hello_timeout: Duration::from_secs(5),
            stop_timeout: Duration::from_secs(10),
        }
    }
}
