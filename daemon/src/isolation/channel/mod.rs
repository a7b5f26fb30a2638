//! A channel of frames between two processes that do not trust each other, over memory that both have mapped.
//!
//! - Comes in: frames, bytes of any meaning up to a length that is agreed on. A frame that is longer than a ring goes through it
//!   in pieces.
//! - Goes out: the same frames in the same order, in the other process; [`ChannelFds`], by which that process gets at its end.
//! - On the way: `memory` is the mapping, `ring` what lies where in it; `end` knows where the two ends of a ring are and makes
//!   them wait for each other, for a while by looking, then asleep on a `bell`; `closer` ends it all. A system call is made only
//!   to sleep and to wake who sleeps.
//! - Must not happen: trust in a word that the other process may write: what it says of its position is held against where it
//!   was and can be, what it says of a length against the bound, and each is read once. A panic, an access beyond the memory or
//!   a wait that [`Closer`] does not end, whatever stands in the memory.

mod bell;
mod closer;
mod end;
mod error;
mod memory;
mod receiver;
mod ring;
mod sender;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use closer::Closer;
pub use error::ChannelError;
pub use receiver::Receiver;
pub use sender::Sender;

use bell::Bell;
use closer::State;
use end::End;
use ring::{Layout, Ring, Role, Side};

/// Bytes of a ring, unless another size is asked for.
pub const RING_BYTES: usize = 1 << 20;

/// Descriptors of a channel, number of.
pub const N_CHANNEL_FDS: usize = 5;

/// What the other process gets its end of a channel from.
#[derive(Debug)]
pub struct ChannelFds {
    memory: OwnedFd,
    /// For the reader and the writer at the maker's side, then for those at the taker's.
    bells: [OwnedFd; 4],
}

impl ChannelFds {
    /// In the order in which [`from_array`](Self::from_array) takes them.
    #[must_use]
    pub fn into_array(self) -> [OwnedFd; N_CHANNEL_FDS] {
        let [a, b, c, d] = self.bells;
        [self.memory, a, b, c, d]
    }

    /// As they came from [`into_array`](Self::into_array).
    #[must_use]
    pub fn from_array([memory, a, b, c, d]: [OwnedFd; N_CHANNEL_FDS]) -> Self {
        Self { memory, bells: [a, b, c, d] }
    }
}

/// One side of a channel.
#[derive(Debug)]
pub struct Channel {
    sender: Sender,
    receiver: Receiver,
}

impl Channel {
    /// A channel with a ring of `ring_bytes` bytes, a power of two, in each direction, whose frames have at most
    /// `frame_bytes_max` bytes: one side, and what the other is made from.
    ///
    /// # Errors
    /// The size is not one, or the system gives no memory or descriptors.
    pub fn pair(ring_bytes: usize, frame_bytes_max: usize) -> Result<(Self, ChannelFds), ChannelError> {
        let (layout, memory) = Layout::create(ring_bytes)?;
        let bells = [Bell::new()?, Bell::new()?, Bell::new()?, Bell::new()?];
        let mut fds = Vec::new();
        for bell in &bells {
            fds.push(bell.0.try_clone()?);
        }
        let fds = ChannelFds { memory, bells: fds.try_into().expect("as many as bells") };
        Ok((Self::new(layout, Side::Maker, bells, frame_bytes_max)?, fds))
    }

    /// The other side.
    ///
    /// # Errors
    /// The descriptors are not those of a channel, or the system refuses.
    pub fn from_fds(fds: ChannelFds, frame_bytes_max: usize) -> Result<Self, ChannelError> {
        let layout = Layout::map(&fds.memory)?;
        let bells = fds.bells.map(|fd| Bell(Arc::new(fd)));
        Self::new(layout, Side::Taker, bells, frame_bytes_max)
    }

    fn new(
        layout: Layout,
        side: Side,
        [maker_reads, maker_writes, taker_reads, taker_writes]: [Bell; 4],
        frame_bytes_max: usize,
    ) -> Result<Self, ChannelError> {
        let layout = Arc::new(layout);
        let (reads, writes, peer_reads, peer_writes) = match side {
            Side::Maker => (maker_reads, maker_writes, taker_reads, taker_writes),
            Side::Taker => (taker_reads, taker_writes, maker_reads, maker_writes),
        };
        let peer_bells = [peer_reads.clone(), peer_writes.clone()];
        let state = Arc::new(State::new(Arc::clone(&layout), side, peer_bells)?);
        let ring = |writer| Ring::new(Arc::clone(&layout), writer);
        let writer = End::new(ring(side), Role::Writer, Arc::clone(&state), writes, peer_reads);
        let reader = End::new(ring(side.other()), Role::Reader, state, reads, peer_writes);
        Ok(Self {
            sender: Sender::new(writer, frame_bytes_max),
            receiver: Receiver::new(reader, frame_bytes_max),
        })
    }

    /// The two directions, each for a thread of its own. Dropping one closes both.
    #[must_use]
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// What ends the channel from any thread.
    #[must_use]
    pub fn closer(&self) -> Closer {
        self.sender.closer()
    }
}
