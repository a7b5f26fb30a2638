//! Recordings: what a guest asked of its host, in order, with what it was answered.
//!
//! A recording is a file of frames. It begins with a line, [`MAGIC`], then comes a frame with the [`Head`] that the
//! client writes, then the frames that the daemon sends, each one [`Entry`]. A frame is
//!
//! ```text
//! length    4 bytes, little-endian, of the payload
//! payload   MessagePack: structs as maps, enums by the names of their variants
//! seal      8 bytes: the beginning of the BLAKE3 hash of the seal before and the payload
//! ```
//!
//! Head and entries are two chains of seals, each of which begins after eight bytes of 0. So a frame that was changed,
//! left out or put elsewhere is found where it stands; and a file without an [`Entry::End`] was cut short.
//!
//! What the engine decoded ahead, and when anything happened, is not in it. Prompts and answers are.

mod entry;
mod frames;
mod value;

pub(crate) use entry::{Answer, Begin, Call, End, Entry, Head, Sent};
pub(crate) use frames::{Broken, FrameWriter, Reader, write_head};
pub(crate) use value::{Mismatch, Value};

/// The first line of a recording; its number changes when what is recorded has another shape.
pub(crate) const MAGIC: &[u8] = b"trellis recording 2\n";
