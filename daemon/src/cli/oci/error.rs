//! Why an artifact does not come or go.

use std::io;
use std::path::PathBuf;

use super::digest::Digest;
use crate::guest::GuestError;

/// Why an artifact was not pulled or pushed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OciError {
    #[error("{word:?} names no artifact: {reason}")]
    Reference { word: String, reason: String },
    /// Something on the way, or the place itself, gave other bytes than were asked for.
    #[error("{what} is not what was asked for\n  asked for: {expected}\n  came:      {actual}")]
    Digest { what: String, expected: Digest, actual: Digest },
    #[error("{what} is of the type {found:?}; a guest's is {expected:?}")]
    MediaType { what: &'static str, found: String, expected: &'static str },
    #[error("{what} is not a guest's: {reason}")]
    Shape { what: &'static str, reason: String },
    #[error("{what} has {n_bytes} bytes, more than the limit of {limit_bytes}")]
    TooLarge { what: String, n_bytes: u64, limit_bytes: u64 },
    /// An answer that does not say how long it is, and does not end.
    #[error("{what} does not end within the {limit_bytes} bytes that it may have")]
    Endless { what: String, limit_bytes: u64 },
    #[error("{what} has {n_bytes} bytes, its descriptor says {said_bytes}")]
    Length { what: String, n_bytes: u64, said_bytes: u64 },
    #[error("{0} is not there")]
    NotFound(String),
    #[error("{host} does not let this user: {reason}")]
    Unauthorised { host: String, reason: String },
    #[error("the password for {host} cannot be had: {reason}")]
    Credentials { host: String, reason: String },
    /// Anybody on the way could read it, and what authorises it.
    #[error("{url} would be asked for without TLS")]
    Plain { url: String },
    #[error("{from} sends elsewhere, to {to}, which only content that a digest names may come from")]
    Redirected { from: String, to: String },
    #[error("{url} is not answered as the OCI distribution specification has it: {reason}")]
    Protocol { url: String, reason: String },
    #[error("{url} was answered with {status}{}{message}", if message.is_empty() { "" } else { ": " })]
    Status { url: String, status: u16, message: String },
    #[error("{url} did not answer in time")]
    TimedOut { url: String },
    #[error("{url} cannot be asked: {reason}")]
    Unreachable { url: String, reason: String },
    /// Nobody that this machine trusts says that the host is who it says.
    #[error("{url} cannot be trusted: {reason}")]
    Untrusted { url: String, reason: String },
    #[error("{what}: {source}")]
    NoGuest { what: String, source: GuestError },
    #[error(transparent)]
    Cache(GuestError),
    #[error("{} is a link, or not a file or folder as an image layout has them", path.display())]
    NotPlain { path: PathBuf },
    #[error("{} is no OCI image layout: {reason}", path.display())]
    NoLayout { path: PathBuf, reason: String },
    #[error("{} is being pushed to by another command, and has been for {waited_s} seconds", path.display())]
    Busy { path: PathBuf, waited_s: u64 },
    #[error("cannot {doing}: {source}")]
    Io { doing: String, source: io::Error },
}

impl OciError {
    pub(super) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }

    /// Whether the same may succeed another time, unchanged.
    pub(crate) fn is_retryable(&self) -> bool {
        match self {
            Self::TimedOut { .. } | Self::Unreachable { .. } | Self::Busy { .. } => true,
            Self::Status { status, .. } => *status == 429 || *status >= 500,
            _ => false,
        }
    }

    /// What the user can do next.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::Plain { .. } => {
                "--plain-http does so; it is for registries that are reached over a network that can be trusted"
            }
            Self::Unauthorised { .. } => {
                "`docker login REGISTRY` keeps a password where this command finds it"
            }
            Self::Untrusted { .. } => {
                "SSL_CERT_FILE names a file of certificates to trust in the place of the system's"
            }
            Self::Digest { .. } => "it was changed where it lies or on the way: ask who keeps it there",
            Self::TooLarge { what, .. } if what == COMPONENT => {
                "the limit is the daemon's: component_bytes under [limits] in its configuration"
            }
            _ => return None,
        })
    }
}

/// What a guest's one layer is called.
pub(super) const COMPONENT: &str = "the component";
