//! A channel of frames between two processes that do not trust each other, over memory that both have mapped.
//!
//! - Comes in: frames, bytes of any meaning up to a length that is agreed on. A frame that is longer than a ring goes through it
//!   in pieces.
//! - Goes out: the same frames in the same order, in the other process; [`ChannelFds`], by which that process gets at its end.
//! - On the way: `memory` is the mapping, `ring` what lies where in it; `end` knows where the two ends of a ring are and makes
//!   them wait for each other, for a while by looking (`patience`), then asleep on a `bell`; `closer` ends it all. A system call is made only
//!   to sleep and to wake who sleeps. Two threads of a process may take turns at receiving, each asleep in a place of its own
//!   (`sleeper`): who receives says which of the two is woken next.
//! - Must not happen: trust in a word that the other process may write: what it says of its position is held against where it
//!   was and can be, what it says of a length against the bound, and each is read once. A panic, an access beyond the memory or
//!   a wait that [`Closer`] does not end, whatever stands in the memory.

mod bell;
mod closer;
mod end;
mod error;
mod memory;
mod patience;
mod receiver;
mod ring;
mod sender;
mod sleeper;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use closer::Closer;
pub use error::ChannelError;
pub use receiver::Receiver;
pub use sender::Sender;
pub use sleeper::{Place, Sleeper};

use bell::Bell;
use closer::State;
use end::{Bells, End};
use ring::{Layout, Ring, Role, Side};

/// Bytes of a ring, unless another size is asked for.
pub const RING_BYTES: usize = 1 << 20;

/// Descriptors of a channel, number of.
pub const N_CHANNEL_FDS: usize = 1 + N_BELLS;

/// Three for each side: for its reader in its two places, and for its writer.
const N_BELLS: usize = 6;

/// What the other process gets its end of a channel from.
#[derive(Debug)]
pub struct ChannelFds {
    memory: OwnedFd,
    /// For the reader and the writer at the maker's side, then for those at the taker's.
    bells: [OwnedFd; N_BELLS],
}

impl ChannelFds {
    /// In the order in which [`from_array`](Self::from_array) takes them.
    #[must_use]
    pub fn into_array(self) -> [OwnedFd; N_CHANNEL_FDS] {
        let [a, b, c, d, e, f] = self.bells;
        [self.memory, a, b, c, d, e, f]
    }

    /// As they came from [`into_array`](Self::into_array).
    #[must_use]
    pub fn from_array([memory, bells @ ..]: [OwnedFd; N_CHANNEL_FDS]) -> Self {
        Self { memory, bells }
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
        let (mut bells, mut fds) = (Vec::new(), Vec::new());
        for _ in 0..N_BELLS {
            let bell = Bell::new()?;
            fds.push(bell.0.try_clone()?);
            bells.push(bell);
        }
        let fds = ChannelFds { memory, bells: fds.try_into().expect("as many as bells") };
        let bells = bells.try_into().expect("as many as were made");
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
        [first, second, writes, peer_first, peer_second, peer_writes]: [Bell; N_BELLS],
        frame_bytes_max: usize,
    ) -> Result<Self, ChannelError> {
        let layout = Arc::new(layout);
        let (maker, taker) = ([first, second, writes], [peer_first, peer_second, peer_writes]);
        let ([first, second, writes], peer) = match side {
            Side::Maker => (maker, taker),
            Side::Taker => (taker, maker),
        };
        let state = Arc::new(State::new(Arc::clone(&layout), side, peer.clone())?);
        let [peer_first, peer_second, peer_writes] = peer;
        let ring = |writer| Ring::new(Arc::clone(&layout), writer);
        let writer = Bells { own: [writes.clone(), writes], peer: [peer_first, peer_second] };
        let writer = End::new(ring(side), Role::Writer, Arc::clone(&state), writer);
        let reader = Bells { own: [first, second], peer: [peer_writes.clone(), peer_writes] };
        let reader = End::new(ring(side.other()), Role::Reader, state, reader);
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
