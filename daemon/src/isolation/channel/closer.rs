//! How a channel ends.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::bell::Bell;
use super::error::ChannelError;
use super::ring::{Layout, Side};

const OPEN: u8 = 0;
const PEER_IS_GONE: u8 = 1;
const CLOSED: u8 = 2;

/// How far the end of a channel has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It has not begun.
    Open,
    /// The other side will send nothing more. What it has sent is still to be read.
    NoPeer,
    /// This side has closed it.
    Closed,
}

#[derive(Debug)]
pub(super) struct State {
    /// What this process knows of it by itself, out of the other side's reach.
    ended: AtomicU8,
    /// Readable from when `ended` is no longer `OPEN`. It is this process's own: the other side could empty a doorbell that
    /// both have, and so keep a waiting thread from hearing of its end.
    alarm: OwnedFd,
    layout: Arc<Layout>,
    side: Side,
    /// What wakes the other side.
    peer_bells: [Bell; 3],
}

impl State {
    pub(super) fn new(layout: Arc<Layout>, side: Side, peer_bells: [Bell; 3]) -> Result<Self, ChannelError> {
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { ended: AtomicU8::new(OPEN), alarm, layout, side, peer_bells })
    }

    pub(super) fn ending(&self) -> Ending {
        match self.ended.load(Ordering::Acquire) {
            CLOSED => Ending::Closed,
            // Acquire: who sees that the other side has closed sees all that it had sent before.
            OPEN if self.layout.closed(self.side.other()).load(Ordering::Acquire) == 0 => Ending::Open,
            _ => Ending::NoPeer,
        }
    }

    pub(super) fn alarm(&self) -> &OwnedFd {
        &self.alarm
    }

    fn end(&self, how: u8) {
        if self.ended.fetch_max(how, Ordering::AcqRel) < how {
            // Its counter cannot be full: it is written to at most twice.
            rustix::io::write(&self.alarm, &1_u64.to_ne_bytes())
                .expect("a counter of this process takes a 1");
        }
    }

    fn close(&self) {
        self.end(CLOSED);
        self.layout.closed(self.side).store(1, Ordering::Release);
        for bell in &self.peer_bells {
            // A doorbell that cannot be rung belongs to a process that is beyond hearing it.
            let _ = bell.ring();
        }
    }
}

/// Ends a channel, from any thread.
#[derive(Clone, Debug)]
pub struct Closer(pub(super) Arc<State>);

impl Closer {
    /// Closes the channel: calls on this side, also those that wait, return [`ChannelError::Closed`] at once. So do those of
    /// the other side, if it lives, once it has read what was sent.
    pub fn close(&self) {
        self.0.close();
    }

    /// Says that the other process has ended: what it has sent can still be received, then calls return
    /// [`ChannelError::Closed`].
    pub fn peer_is_gone(&self) {
        self.0.end(PEER_IS_GONE);
    }
}
