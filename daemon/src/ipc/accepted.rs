//! A connection that was accepted and has no place yet. It is not registered with the runtime: for one that is turned away that
//! would cost more than all the rest.

use std::io::{self, Write};
use std::os::fd::OwnedFd;

use interprocess::local_socket::traits::StreamCommon;
use interprocess::os::unix::uds_local_socket as uds;

use crate::session::{Actor, SessionError, last_words};

/// The user and process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its user and group.
    pub actor: Actor,
    /// Its process; it may be gone, and its number another's, by the time it is looked at.
    pub pid: Option<i32>,
}

/// A connection that waits for what becomes of it.
#[derive(Debug)]
pub struct Accepted {
    stream: uds::Stream,
    peer: Peer,
}

impl Accepted {
    /// # Errors
    /// The connection is gone already, or the system does not name its user.
    pub(super) fn new(stream: uds::Stream) -> io::Result<Self> {
        let peer = stream.peer_creds()?;
        let (Some(uid), Some(gid)) = (peer.euid(), peer.egid()) else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the system does not name the peer's user",
            ));
        };
        Ok(Self { stream, peer: Peer { actor: Actor { uid, gid }, pid: peer.pid() } })
    }

    /// Who is at the other end.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// The connection, for a session. Needs a tokio runtime.
    ///
    /// # Errors
    /// The system is out of something.
    pub fn into_stream(self) -> io::Result<uds::tokio::Stream> {
        OwnedFd::from(self.stream).try_into()
    }

    /// Tells the client why it is not served. These few bytes fit in any socket, or are lost: nobody waits here.
    pub(super) fn turn_away(self, error: &SessionError) {
        let _ = (&self.stream).write(&last_words(error.to_body()));
    }
}
