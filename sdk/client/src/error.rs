use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use trellis_wire::{ErrorBody, ErrorCode, WireError};

/// What a call on the daemon can end with.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// No daemon answers at any of the usual places.
    #[error("no daemon is running: {}; start one with `trellis serve`", join(.tried))]
    NotRunning {
        /// Where the client looked, in that order.
        tried: Vec<Tried>,
    },
    /// There is a socket that this user cannot use.
    #[error("cannot connect to {path}: {source}", path = .path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why not.
        source: Arc<io::Error>,
    },
    /// The peer is no daemon, or speaks no version that this client speaks.
    #[error("cannot talk to the daemon: {0}")]
    Handshake(Arc<WireError>),
    /// The daemon refused or ended the request.
    #[error("{0}")]
    Daemon(Box<ErrorBody>),
    /// The connection ended before the request did.
    #[error("the connection to the daemon is lost: {0}")]
    ConnectionLost(Lost),
    /// The request does not fit in a frame.
    #[error("the request cannot be sent: {0}")]
    Request(Arc<WireError>),
    /// The daemon answered something that this client does not understand: one of the two is too old.
    #[error("the daemon gave an answer that this client does not know")]
    UnknownAnswer,
    /// The daemon is of a version that would pass over a part of the request.
    #[error(
        "the daemon ({build}) is too old to {what}: it speaks version {spoken} of the protocol, that needs {needed}"
    )]
    TooOld {
        /// What it would have to do.
        what: &'static str,
        /// Its build.
        build: String,
        /// The version of the protocol that is spoken with it.
        spoken: u16,
        /// The version that it would have to speak.
        needed: u16,
    },
    /// A daemon that is there, or that starts, was waited for in vain.
    #[error("the daemon at {socket} has not answered, nor shown that it comes on, for {} s", .waited.as_secs_f64(), socket = .socket.display())]
    Silent {
        /// Where it is.
        socket: PathBuf,
        /// For how long there was no sign of it.
        waited: Duration,
    },
    /// A daemon starts over and over.
    #[error("the daemon at {socket} starts over and over: {n_starts} starts came to nothing while it was waited for", socket = .socket.display())]
    Failing {
        /// Where it is.
        socket: PathBuf,
        /// How many starts came to nothing.
        n_starts: u32,
    },
    /// The guest has ended and takes no more messages.
    #[error("the guest has ended")]
    GuestEnded,
}

impl Error {
    /// The daemon's code, if it is an error of the daemon.
    #[must_use]
    pub fn code(&self) -> Option<&ErrorCode> {
        match self {
            Self::Daemon(body) | Self::ConnectionLost(Lost::Fault(body)) => Some(&body.code),
            _ => None,
        }
    }
}

impl Error {
    /// Whether the same request may succeed another time, with nothing changed by the caller: the device failed under
    /// it, the daemon was about to end, or it has gone without a word; or one that starts or stands still was waited for in vain.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::ConnectionLost(lost) => lost.is_retryable(),
            Self::Silent { .. } | Self::Failing { .. } => true,
            error => error.code().is_some_and(ErrorCode::is_retryable),
        }
    }
}

/// How a connection was lost.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Lost {
    /// The daemon closed it without a word.
    #[error("the daemon closed it")]
    Closed,
    /// The daemon closed it and said why.
    #[error("{0}")]
    Fault(Box<ErrorBody>),
    /// It failed, or the daemon broke the protocol.
    #[error("{0}")]
    Wire(Arc<WireError>),
}

impl Lost {
    /// As [`Error::is_retryable`]. A daemon that is killed closes its sockets and says nothing, also inside a frame.
    fn is_retryable(&self) -> bool {
        match self {
            Self::Closed => true,
            Self::Fault(body) => body.code.is_retryable(),
            Self::Wire(error) => matches!(**error, WireError::Io(_) | WireError::Truncated { .. }),
        }
    }
}

/// A place where no daemon answered.
#[derive(Clone, Debug)]
pub struct Tried {
    /// The socket.
    pub path: PathBuf,
    /// What was there instead.
    pub error: Arc<io::Error>,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match self.error.kind() {
            io::ErrorKind::NotFound => write!(f, "there is no {path}"),
            io::ErrorKind::ConnectionRefused => write!(f, "nobody listens on {path}"),
            _ => write!(f, "{path}: {}", self.error),
        }
    }
}

fn join(tried: &[Tried]) -> String {
    tried.iter().map(Tried::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_has_gone_may_come_again() {
        let reset = WireError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        let cut = WireError::Truncated { n_bytes: 2, expected: 4 };
        let broken = WireError::FrameTooLarge { n_bytes: 2, limit: 1 };
        let fault = |code| Lost::Fault(Box::new(ErrorBody::new(code, "no")));
        for (lost, is_retryable) in [
            (Lost::Closed, true),
            (Lost::Wire(Arc::new(reset)), true),
            (Lost::Wire(Arc::new(cut)), true),
            (fault(ErrorCode::ShuttingDown), true),
            (Lost::Wire(Arc::new(broken)), false),
            (fault(ErrorCode::Other("protocol".to_owned())), false),
        ] {
            assert_eq!(Error::ConnectionLost(lost.clone()).is_retryable(), is_retryable, "{lost:?}");
        }
    }
}
