//! What the guests' process does first.

use std::fs::File;
use std::io;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use super::channel::{Channel, ChannelError, Receiver, Sender};
use super::confine::{Confinement, confine};
use super::handover;

/// The argument with which the daemon's own executable becomes a guests' process.
pub const GUEST_WORKER: &str = "guest-worker";

/// The first frame of a child.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Greeting {
    /// It is confined and serves.
    Ready(Confinement),
    /// It is not, and ends.
    Failed(String),
}

#[derive(Debug, thiserror::Error)]
enum ChildError {
    #[error("what the daemon hands over cannot be taken: {0}")]
    Handover(#[source] io::Error),
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("the greeting cannot be written: {0}")]
    Greeting(#[from] rmp_serde::encode::Error),
    #[error("{0}")]
    NotConfined(String),
}

/// Runs a guests' process: takes what the daemon hands over at standard input, confines itself, and serves. The process has no
/// other thread yet.
#[must_use]
pub fn guest_worker_main(serve: impl FnOnce(Sender, Receiver)) -> ExitCode {
    match begin() {
        Ok((sender, receiver)) => {
            serve(sender, receiver);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{GUEST_WORKER}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn begin() -> Result<(Sender, Receiver), ChildError> {
    let (handover, fds) = handover::take(io::stdin()).map_err(ChildError::Handover)?;
    // Nothing is to come by the socket.
    let nothing = File::open("/dev/null").map_err(ChildError::Handover)?;
    rustix::stdio::dup2_stdin(&nothing).map_err(|errno| ChildError::Handover(errno.into()))?;
    drop(nothing);
    // It is mapped before memory that is shared can no longer be.
    let (mut sender, receiver) = Channel::from_fds(fds, handover.frame_bytes_max)?.split();
    let confined = confine(&handover.confine).map_err(|error| error.to_string());
    let greeting = match &confined {
        Ok(confinement) => Greeting::Ready(confinement.clone()),
        Err(reason) => Greeting::Failed(reason.clone()),
    };
    sender.send(&rmp_serde::to_vec_named(&greeting)?)?;
    confined.map_err(ChildError::NotConfined)?;
    Ok((sender, receiver))
}
