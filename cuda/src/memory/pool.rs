//! Which device memory is taken, which is kept for reuse: bookkeeping alone, over whatever gives and takes blocks.
//!
//! Two pools, as in PyTorch's `CUDACachingAllocator`: small ranges are carved out of blocks that they share, a large
//! one is a block of its own. Neither knows of streams: a range comes back only after the work on it is done.

use std::collections::{BTreeMap, BTreeSet};

use super::Slice;
use crate::driver::CudaError;

/// Every range starts at a multiple of this, and is a multiple of this long. The driver aligns to 256; kernels ask
/// for 16, and cuBLASLt has more to choose from the higher it is.
pub(crate) const ALIGNMENT: usize = 512;

/// Where the pools meet.
const SMALL_BYTES_MAX: usize = 1 << 20;

/// What the driver is asked for at a time: it maps memory in pages of 2 MiB, so that less costs as much.
const GRANULE_BYTES: usize = 2 << 20;

/// A kept block is handed out again when at most one part in so many of the request is wasted. What is large is
/// weights and KV pages, of which a card holds a few pieces: what is wasted of one is lost to the next model, while
/// a miss costs one call of the driver (about a millisecond) next to a load of seconds.
const WASTE_DIVISOR: usize = 8;

/// Gives and takes blocks.
pub(crate) trait Driver {
    /// The address of a new block; `None` when there is not enough memory.
    fn allocate(&mut self, n_bytes: usize) -> Result<Option<u64>, CudaError>;

    /// Takes back a block.
    fn free(&mut self, address: u64);
}

/// What a driver gave; `None` where it has not enough memory.
pub(super) fn unless_out_of_memory<T>(taken: Result<T, CudaError>) -> Result<Option<T>, CudaError> {
    match taken {
        Ok(taken) => Ok(Some(taken)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

/// What the allocator of a device has done and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in buffers, each with what it was rounded up by.
    pub in_use_bytes: usize,
    /// Bytes taken from the driver: those in buffers and those kept for the next.
    pub reserved_bytes: usize,
    /// The most bytes that were in buffers at a time.
    pub peak_in_use_bytes: usize,
    /// Blocks taken from the driver since the device was opened.
    pub n_driver_allocations: u64,
    /// Buffers handed out since the device was opened.
    pub n_allocations: u64,
}

/// What becomes of memory that is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caching {
    /// It is kept.
    On,
    /// Every range is a block of its own, as long as was asked for: a memory checker then sees each access beyond
    /// a buffer's end.
    #[cfg(test)]
    Off,
}

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct Pool<D: Driver> {
    driver: D,
    caching: Caching,
    small: Small,
    large: BTreeSet<(usize, u64)>, // idle blocks: length, address
    stats: MemoryStats,
}

impl<D: Driver> Pool<D> {
    pub(crate) fn new(driver: D, caching: Caching) -> Self {
        Self {
            driver,
            caching,
            small: Small::default(),
            large: BTreeSet::new(),
            stats: MemoryStats::default(),
        }
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.stats
    }

    /// A range of at least `n_bytes`; `None` when there is not enough memory, even after a [`trim`](Self::trim).
    pub(crate) fn allocate(&mut self, n_bytes: usize) -> Result<Option<Slice>, CudaError> {
        let found = match self.kind(n_bytes) {
            Kind::Small(n_bytes) => match self.small.take(n_bytes) {
                Some(address) => Some(Slice { address, n_bytes }),
                None => self.grow(GRANULE_BYTES)?.map(|block| {
                    self.small.add_block(block);
                    let address = self.small.take(n_bytes).expect("a whole block is free");
                    Slice { address, n_bytes }
                }),
            },
            Kind::Large(n_bytes) => match self.take_large(n_bytes) {
                Some(slice) => Some(slice),
                None => self.grow(n_bytes)?.map(|address| Slice { address, n_bytes }),
            },
            #[cfg(test)]
            Kind::Own(n_bytes) => self.grow(n_bytes)?.map(|address| Slice { address, n_bytes }),
            Kind::Endless => None,
        };
        if let Some(slice) = found {
            self.stats.n_allocations += 1;
            self.stats.in_use_bytes += slice.n_bytes;
            self.stats.peak_in_use_bytes = self.stats.peak_in_use_bytes.max(self.stats.in_use_bytes);
        }
        Ok(found)
    }

    /// Takes back a range that was allocated here, whole. No work on it may be left.
    pub(crate) fn release(&mut self, slice: Slice) {
        self.stats.in_use_bytes -= slice.n_bytes;
        match self.kind(slice.n_bytes) {
            Kind::Small(n_bytes) => self.small.give(slice.address, n_bytes),
            Kind::Large(n_bytes) => {
                let is_new = self.large.insert((n_bytes, slice.address));
                assert!(is_new, "a block comes back once");
            }
            #[cfg(test)]
            Kind::Own(n_bytes) => self.shrink(slice.address, n_bytes),
            Kind::Endless => unreachable!("it was never handed out"),
        }
    }

    /// Gives all blocks back to the driver of which no part is in use.
    pub(crate) fn trim(&mut self) {
        self.trim_to(0);
    }

    /// As [`trim`](Self::trim), the longest first, until no more than so many bytes are idle.
    pub(crate) fn trim_to(&mut self, idle_bytes_max: usize) {
        let mut idle_bytes = self.idle_bytes();
        while idle_bytes > idle_bytes_max
            && let Some((n_bytes, address)) = self.large.pop_last()
        {
            self.shrink(address, n_bytes);
            idle_bytes -= n_bytes;
        }
        while idle_bytes > idle_bytes_max
            && let Some(address) = self.small.take_idle_block()
        {
            self.shrink(address, GRANULE_BYTES);
            idle_bytes -= GRANULE_BYTES;
        }
    }

    /// What the driver is asked for when nothing is kept that serves.
    pub(crate) fn block_bytes(n_bytes: usize) -> usize {
        n_bytes.max(1).next_multiple_of(GRANULE_BYTES)
    }

    /// What [`trim`](Self::trim) would give back.
    pub(crate) fn idle_bytes(&self) -> usize {
        let large: usize = self.large.iter().map(|(n_bytes, _)| n_bytes).sum();
        large + self.small.n_idle_blocks() * GRANULE_BYTES
    }

    /// Into which pool a request goes, and how long it becomes. The length of what was handed out leads back to the
    /// same pool and length.
    fn kind(&self, n_bytes: usize) -> Kind {
        match self.caching {
            Caching::On if n_bytes <= SMALL_BYTES_MAX => {
                Kind::Small(n_bytes.max(1).next_multiple_of(ALIGNMENT))
            }
            Caching::On => n_bytes.checked_next_multiple_of(GRANULE_BYTES).map_or(Kind::Endless, Kind::Large),
            #[cfg(test)]
            Caching::Off => Kind::Own(n_bytes.max(1)),
        }
    }

    /// The shortest idle block that is long enough and not much too long.
    fn take_large(&mut self, n_bytes: usize) -> Option<Slice> {
        let longest = n_bytes.saturating_add(n_bytes / WASTE_DIVISOR);
        let (n_bytes, address) = *self.large.range((n_bytes, 0)..=(longest, u64::MAX)).next()?;
        self.large.remove(&(n_bytes, address));
        Some(Slice { address, n_bytes })
    }

    fn grow(&mut self, n_bytes: usize) -> Result<Option<u64>, CudaError> {
        let mut address = self.driver.allocate(n_bytes)?;
        if address.is_none() && self.idle_bytes() > 0 {
            self.trim();
            address = self.driver.allocate(n_bytes)?;
        }
        if let Some(address) = address {
            assert!(self.caching != Caching::On || address.is_multiple_of(ALIGNMENT as u64), "{address:#x}");
            self.stats.n_driver_allocations += 1;
            self.stats.reserved_bytes += n_bytes;
        }
        Ok(address)
    }

    fn shrink(&mut self, address: u64, n_bytes: usize) {
        self.driver.free(address);
        self.stats.reserved_bytes -= n_bytes;
    }
}

enum Kind {
    Small(usize),
    Large(usize),
    #[cfg(test)]
    Own(usize),
    /// Longer than an address space.
    Endless,
}

/// Free ranges in blocks of [`GRANULE_BYTES`].
#[derive(Debug, Default)]
struct Small {
    blocks: BTreeSet<u64>,
    by_address: BTreeMap<u64, usize>,
    by_length: BTreeSet<(usize, u64)>,
}

impl Small {
    fn add_block(&mut self, address: u64) {
        self.blocks.insert(address);
        self.insert(address, GRANULE_BYTES);
    }

    /// The start of the shortest free range that is long enough.
    fn take(&mut self, n_bytes: usize) -> Option<u64> {
        let (found_bytes, address) = *self.by_length.range((n_bytes, 0)..).next()?;
        self.remove(address, found_bytes);
        if found_bytes > n_bytes {
            self.insert(address + n_bytes as u64, found_bytes - n_bytes);
        }
        Some(address)
    }

    /// Takes back a range and joins it with its free neighbours in the same block.
    fn give(&mut self, address: u64, n_bytes: usize) {
        let (mut start, mut end) = (address, address + n_bytes as u64);
        if let Some((&before, &before_bytes)) = self.by_address.range(..start).next_back() {
            let before_end = before + before_bytes as u64;
            assert!(before_end <= start, "a range comes back once");
            if before_end == start && !self.blocks.contains(&start) {
                self.remove(before, before_bytes);
                start = before;
            }
        }
        if let Some((&after, &after_bytes)) = self.by_address.range(address..).next() {
            assert!(after >= end, "a range comes back once");
            if after == end && !self.blocks.contains(&after) {
                self.remove(after, after_bytes);
                end += after_bytes as u64;
            }
        }
        self.insert(start, (end - start) as usize);
    }

    fn n_idle_blocks(&self) -> usize {
        self.by_length.range((GRANULE_BYTES, 0)..).count()
    }

    fn take_idle_block(&mut self) -> Option<u64> {
        let &(_, address) = self.by_length.range((GRANULE_BYTES, 0)..).next()?;
        self.remove(address, GRANULE_BYTES);
        self.blocks.remove(&address);
        Some(address)
    }

    fn insert(&mut self, address: u64, n_bytes: usize) {
        self.by_address.insert(address, n_bytes);
        self.by_length.insert((n_bytes, address));
    }

    fn remove(&mut self, address: u64, n_bytes: usize) {
        self.by_address.remove(&address);
        self.by_length.remove(&(n_bytes, address));
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
