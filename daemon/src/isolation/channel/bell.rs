//! What wakes a thread of the other process.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::error::ChannelError;

/// A doorbell: an event counter that both processes have.
///
/// It does not block. The other process cannot change that: confined, it may not set the flags of a descriptor.
#[derive(Clone, Debug)]
pub(super) struct Bell(pub(super) Arc<OwnedFd>);

impl Bell {
    pub(super) fn new() -> Result<Self, ChannelError> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub(super) fn ring(&self) -> Result<(), ChannelError> {
        loop {
            return match rustix::io::write(&*self.0, &1_u64.to_ne_bytes()) {
                // The counter is full: it has been rung and not been heard.
                Ok(_) | Err(Errno::AGAIN) => Ok(()),
                Err(Errno::INTR) => continue,
                Err(errno) => Err(errno.into()),
            };
        }
    }

    /// Sleeps until it is rung or the alarm is readable.
    pub(super) fn wait(&self, alarm: &OwnedFd) -> Result<(), ChannelError> {
        let mut fds = [PollFd::new(&*self.0, PollFlags::IN), PollFd::new(alarm, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        match rustix::io::read(&*self.0, &mut [0_u8; 8]) {
            // Not rung: it was the alarm, or a signal.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}
