//! Memory of the device, and memory of the host that the device reaches.
//!
//! - Comes in: lengths; for a step's tensors also their first and last use.
//! - Goes out: buffers out of a caching allocator, addresses whose memory comes and goes, places in one buffer by
//!   lifetime, pinned buffers, pages in host memory.
//! - Must not happen: an allocation of the device in a steady state; memory in two hands, so a buffer waits for all
//!   streams before it gives its own back; memory of the host that goes while a copy reads or writes it; an access beyond a
//!   slice.

mod arena;
mod buffer;
mod locked;
mod pinned;
mod pool;
mod reserved;
mod slabs;
mod swap;

pub(crate) use arena::{Tensor, TensorLayout};
pub(crate) use buffer::Driver;
pub use buffer::{Buffer, Plain, Pointer, Slice};
pub(crate) use pinned::HostDriver;
pub use pinned::Pinned;
pub use pool::MemoryStats;
pub(crate) use pool::{Caching, Pool};
pub(crate) use reserved::{Reserved, granule_bytes, map_unit_bytes};
#[cfg(test)]
pub(crate) use slabs::SLAB_BYTES;
pub(crate) use swap::{HostPages, move_pages, read_page};
