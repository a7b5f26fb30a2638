//! Why there is no guests' process.

use std::io;
use std::path::PathBuf;

use super::channel::ChannelError;

/// Why a guests' process was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The executable does not start.
    #[error("{} cannot be run for guests: {source}", exe.display())]
    Exe {
        /// Which.
        exe: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There are no descriptors, memory or threads for it.
    #[error("a guests' process cannot be prepared: {0}")]
    System(#[from] io::Error),
    /// Its channel cannot be made or has ended.
    #[error("the channel to a guests' process: {0}")]
    Channel(#[from] ChannelError),
    /// It could not confine itself, and so has served nothing.
    #[error("a guests' process is not confined: {reason}")]
    NotConfined {
        /// Which step failed, and why.
        reason: String,
    },
    /// It ended before it was ready.
    #[error("a guests' process ended before it was ready: {status}{}", said.as_ref().map(|said| format!(": {said}")).unwrap_or_default())]
    Died {
        /// How.
        status: String,
        /// The last line of its complaints.
        said: Option<String>,
    },
    /// It was not ready in time.
    #[error("a guests' process was not ready within the limit of {limit_ms} ms")]
    Late {
        /// The limit.
        limit_ms: u64,
    },
    /// It began with something else than it should.
    #[error("a guests' process began with {n_bytes} bytes that do not say how it is confined")]
    Greeting {
        /// How many.
        n_bytes: usize,
    },
}

impl From<rustix::io::Errno> for SpawnError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::System(errno.into())
    }
}
