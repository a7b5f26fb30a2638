//! Why a channel cannot carry what it should.

use std::io;

/// Why a channel was not made, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// One of the two ends has closed it, or the other process is gone.
    #[error("the channel is closed")]
    Closed,
    /// A ring of this size cannot be made.
    #[error("a ring of {bytes} bytes is not a power of two from {least} to {most}")]
    RingSize {
        /// What was asked for.
        bytes: usize,
        /// The smallest ring.
        least: usize,
        /// The largest ring.
        most: usize,
    },
    /// A frame is longer than this end takes or can send; announced by the other end, it ends the channel.
    #[error("a frame of {bytes} bytes is longer than the limit of {limit} bytes")]
    FrameTooLong {
        /// Length of the frame.
        bytes: u64,
        /// Length of the longest one.
        limit: u64,
    },
    /// The other end's position is none that it can have come to.
    #[error("the other end says that it is at word {said}, where only {lowest} to {highest} are possible")]
    Position {
        /// What stands in the shared memory.
        said: u64,
        /// Where it was before.
        lowest: u64,
        /// How far it can be.
        highest: u64,
    },
    /// What should be the length of a frame is none.
    #[error("{word:#018x} is not the header of a frame")]
    Header {
        /// What stands there.
        word: u64,
    },
    /// The memory that was handed over cannot be shared safely.
    #[error("{n_bytes} bytes of shared memory, sealed: {is_sealed}, do not make two rings")]
    Memory {
        /// Its size.
        n_bytes: u64,
        /// Whether its size is fixed.
        is_sealed: bool,
    },
    /// The system refuses.
    #[error("the channel's memory or its doorbells cannot be used")]
    System(#[from] io::Error),
}

impl From<rustix::io::Errno> for ChannelError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::System(errno.into())
    }
}
