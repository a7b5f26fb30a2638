//! What sessions have in use of their limits, at one moment.

/// What the connections of one user, and those of all, have in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionsUsed {
    /// Of the user that asks.
    pub user: Used,
    /// Of all users together.
    pub all: Used,
}

/// Amounts by the names of [`SessionLimits`](super::SessionLimits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Connections.
    pub n_connections: u64,
    /// Components on their way in.
    pub n_uploads: u64,
    /// Uploads that wait.
    pub n_uploads_waiting: u64,
    /// Detached guests that run.
    pub n_detached: u64,
    /// Those that have ended and are kept for their clients.
    pub n_detached_ended: u64,
}
