//! Memory that two processes share, as words that either may change at any moment.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use memmap2::MmapRaw;
use rustix::fs::{MemfdFlags, SealFlags};

use super::error::ChannelError;

/// With these seals nobody can make the memory shorter or longer, so that no access to the mapping can fault.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapping of memory of a fixed size.
#[derive(Debug)]
pub(super) struct SharedMemory {
    map: MmapRaw,
}

impl SharedMemory {
    /// New memory of zeros, and the descriptor by which another process maps it.
    pub(super) fn create(n_words: usize) -> Result<(Self, OwnedFd), ChannelError> {
        let fd = rustix::fs::memfd_create("guest-channel", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, (n_words * size_of::<AtomicU64>()) as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Ok((Self::map(&fd)?, fd))
    }

    /// Maps memory that was created elsewhere.
    pub(super) fn map(fd: &OwnedFd) -> Result<Self, ChannelError> {
        let n_bytes = rustix::fs::fstat(fd)?.st_size.unsigned_abs();
        let is_sealed = rustix::fs::fcntl_get_seals(fd.as_fd()).is_ok_and(|seals| seals.contains(SEALS));
        if !is_sealed || n_bytes == 0 {
            return Err(ChannelError::Memory { n_bytes, is_sealed });
        }
        Ok(Self { map: MmapRaw::map_raw(fd)? })
    }

    /// All of it.
    #[expect(unsafe_code, reason = "memory that another process writes to has no safe type before this one")]
    pub(super) fn words(&self) -> &[AtomicU64] {
        let n_words = self.map.len() / size_of::<AtomicU64>();
        // SAFETY: the mapping begins at a page, so that it is aligned, holds `n_words` words, is readable and writable, and
        // lives as long as `self`, which the slice borrows. Its file cannot shrink, which `map` has checked, so that every
        // page of it is there. All bits are valid words. This is the only way to the memory in this process, so that it is
        // accessed by atomic operations alone, and what another process does to it is no data race.
        unsafe { std::slice::from_raw_parts(self.map.as_mut_ptr().cast::<AtomicU64>(), n_words) }
    }
}
