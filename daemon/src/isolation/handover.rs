//! What the child gets from the daemon: one message over a socket that is its standard input.
//!
//! A message carries descriptors as such, so that they need no numbers that both know.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

use super::channel::{ChannelFds, N_CHANNEL_FDS};
use super::confine::ConfineSettings;

/// The longest message.
const MESSAGE_BYTES_MAX: usize = 4 << 10;

const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(N_CHANNEL_FDS));

/// What the child has to know before it serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Handover {
    pub(super) confine: ConfineSettings,
    /// The longest frame of the channel.
    pub(super) frame_bytes_max: usize,
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The socket of the child, with the message in it.
pub(super) fn give(handover: &Handover, fds: ChannelFds) -> io::Result<OwnedFd> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let message = rmp_serde::to_vec_named(handover).map_err(invalid)?;
    let fds = fds.into_array();
    let borrowed = fds.each_ref().map(AsFd::as_fd);
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)), "there is room for all descriptors");
    sendmsg(&ours, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(theirs)
}

/// Takes the message out of the socket.
pub(super) fn take(socket: impl AsFd) -> io::Result<(Handover, ChannelFds)> {
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    let handover = rmp_serde::from_slice(&message[..received.bytes]).map_err(invalid)?;
    let n_fds = fds.len();
    let fds = fds.try_into().map_err(|_| {
        let said = format!("{n_fds} descriptors came, where a channel takes {N_CHANNEL_FDS}");
        io::Error::new(io::ErrorKind::InvalidData, said)
    })?;
    Ok((handover, ChannelFds::from_array(fds)))
}
