//! The protocol between the Trellis daemon and its clients.
//!
//! A connection starts with one [`Hello`] from each side, whose bytes never change. After that both sides send
//! frames: a `u32` length, little endian, and that many bytes of MessagePack, one [`ClientMessage`] or
//! [`ServerMessage`] each. Structs are maps and enums carry a `type` field, so that either side may add fields and
//! variants: what a reader does not know, it skips.
//!
//! Requests are multiplexed by an id that the client picks, each greater than all before it on the connection.
//! Every request ends with exactly one [`ServerMessage::End`]. Output of a guest flows under credit, counted by
//! [`Event::credit_bytes`]. The bytes of an upload follow once the daemon has sent [`Event::Wanted`] for it.
//!
//! A guest that is started detached has its events kept by the daemon, numbered from 0, until a client has acknowledged
//! them. A client that comes again attaches from the number that it has not seen.
//!
//! A change that a peer could not skip, such as another way to count credit, is a new version.

mod error;
mod fault;
mod frame;
mod hello;
mod info;
mod limit;
mod logs;
mod message;
mod open_enum;
mod outbox;
mod payer;
mod validate;

pub use error::WireError;
pub use fault::{ErrorBody, ErrorCode};
pub use frame::{FrameBuffer, FrameReader, decode};
pub use hello::{BUILD, Hello, negotiate};
pub use info::{
    Causes, ClassInfo, Computed, DaemonInfo, DeviceInfo, FailureInfo, FitInfo, GuestInfo, GuestUsage,
    LoadingInfo, ModelInfo, ReloadInfo, SettingChange, UpgradeInfo,
};
pub use limit::{GuestAmounts, LimitInfo};
pub use logs::{LogLines, LogsAsked};
pub use message::{
    Attach, Call, ClientMessage, ComponentHash, Event, LogLevel, Outcome, Program, ServerMessage, Stage,
    Start, Value,
};
pub use outbox::{Outbox, Room};
pub use payer::Payer;
pub use validate::{Shape, validate, validate_within};

/// The oldest version of the protocol that this crate speaks.
pub const VERSION_MIN: u16 = 2;
/// The newest version of the protocol that this crate speaks.
pub const VERSION_MAX: u16 = 3;
/// The version from which on a start may name its model, and the answers to a load and an unload say what came of it. An
/// older daemon would run the guest on another model without a word.
pub const VERSION_OF_MODELS: u16 = 3;

/// Bytes of the largest frame that this crate reads, its length field not counted.
pub const FRAME_BYTES_MAX: u32 = 1024 * 1024;
/// Bytes that each side has to be able to read in one frame.
pub const FRAME_BYTES_MIN: u32 = 512 * 1024;
/// Arrays and maps that may lie inside each other in one frame.
pub const DEPTH_MAX: usize = 32;
/// Values in one frame, keys included: bounds what decoding a frame can allocate.
pub const N_VALUES_MAX: u32 = 128 * 1024;
/// Bytes of a component in one [`ClientMessage::Chunk`].
pub const CHUNK_BYTES_MAX: usize = 256 * 1024;
/// Bytes of the largest single output of a guest.
pub const OUTPUT_BYTES_MAX: usize = 256 * 1024;
/// Credit that each output of a guest takes beside its bytes: what it costs either side to hold an entry of a queue.
pub const OUTPUT_OVERHEAD_BYTES: usize = 64;
/// A client that reads a detached guest acknowledges at the latest when it has taken care of so much more, as credit counts
/// it. A daemon keeps more than this and the largest output together, so that the guest never waits for what is on its way.
pub const ACKNOWLEDGED_BYTES: usize = 16 * 1024;
/// Of what people call a program, so many bytes are shown.
pub const LABEL_BYTES_MAX: usize = 64;
/// Credit that the largest single output of a guest takes. An output waits until credit covers the whole of it, so a
/// client that leaves less than this open may wait for ever.
pub const OUTPUT_CREDIT_BYTES_MAX: usize = OUTPUT_BYTES_MAX + OUTPUT_OVERHEAD_BYTES;
