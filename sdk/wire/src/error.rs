use std::io;

/// What can go wrong between bytes and messages.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The peer does not speak this protocol.
    #[error("the peer does not speak the Trellis protocol: it began with {found:02x?}")]
    Magic {
        /// The first bytes that came.
        found: [u8; 8],
    },
    /// The peer's version range is empty.
    #[error("the peer's oldest version {min} is above its newest {max}")]
    VersionRange {
        /// Its oldest version.
        min: u16,
        /// Its newest version.
        max: u16,
    },
    /// There is no version that both sides speak.
    #[error(
        "no common protocol version: this side speaks {}..={}, the peer ({build}) speaks {}..={}",
        ours.0, ours.1, theirs.0, theirs.1
    )]
    Version {
        /// Oldest and newest version of this side.
        ours: (u16, u16),
        /// Oldest and newest version of the peer.
        theirs: (u16, u16),
        /// The peer's build.
        build: String,
    },
    /// The peer reads only frames that are too small for the protocol.
    #[error("the peer reads frames of at most {value} bytes, the protocol needs {limit}")]
    FrameLimit {
        /// Bytes that the peer reads.
        value: u32,
        /// Bytes that it would have to read.
        limit: u32,
    },
    /// A frame is larger than the reader allows.
    #[error("a frame of {n_bytes} bytes is over the limit of {limit}")]
    FrameTooLarge {
        /// Bytes of the frame.
        n_bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// Nobody pays for the memory that a buffer would need.
    #[error("{reason}")]
    Unpaid {
        /// Why not.
        reason: String,
    },
    /// The connection ended inside a frame.
    #[error("the connection ended after {n_bytes} bytes of {expected}")]
    Truncated {
        /// Bytes that came.
        n_bytes: usize,
        /// Bytes that should have come.
        expected: usize,
    },
    /// Arrays and maps lie too deep inside each other.
    #[error("values nested deeper than the limit of {limit} at byte {at}")]
    TooDeep {
        /// Byte of the frame.
        at: usize,
        /// Levels allowed.
        limit: usize,
    },
    /// A frame has too many values.
    #[error("more than the limit of {limit} values at byte {at}")]
    TooManyValues {
        /// Byte of the frame.
        at: usize,
        /// Values allowed.
        limit: u32,
    },
    /// A value is longer than what is left of its frame.
    #[error("a value of at least {n_bytes} bytes at byte {at} with {left} bytes left in the frame")]
    Length {
        /// Byte of the frame.
        at: usize,
        /// Bytes that the value needs.
        n_bytes: usize,
        /// Bytes left.
        left: usize,
    },
    /// Bytes after the message.
    #[error("{n_bytes} bytes left over after the message")]
    Trailing {
        /// How many.
        n_bytes: usize,
    },
    /// A type of value that the protocol does not use.
    #[error("MessagePack marker {marker:#04x} at byte {at} is not part of the protocol")]
    Marker {
        /// The marker byte.
        marker: u8,
        /// Byte of the frame.
        at: usize,
    },
    /// A string that is not UTF-8.
    #[error("the string at byte {at} is not UTF-8")]
    Utf8 {
        /// Byte of the frame.
        at: usize,
    },
    /// Valid MessagePack that is not a message.
    #[error("not a message of the protocol: {0}")]
    Decode(#[from] rmp_serde::decode::Error),
    /// A message that cannot be written.
    #[error("the message cannot be written: {0}")]
    Encode(#[from] rmp_serde::encode::Error),
}
