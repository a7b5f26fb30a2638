//! Page-locked host memory, which the device reads and writes by itself.
//!
//! What is given back is kept for the next that asks, as PyTorch's `CachingHostAllocator` does: for each piece that the
//! driver takes or gives back it holds up every other call for milliseconds, those of the engine's thread too, while
//! models come and go beside streams.

use std::ops::{Deref, DerefMut};

use cudarc::driver::{result, sys};

use super::pool::{Driver, unless_out_of_memory};
use super::{Plain, Slice};
use crate::driver::{CudaError, Gpu, check};

/// What is kept for the next at most: the buffers of a load, and those of the steps of some models.
const IDLE_BYTES_MAX: usize = 64 << 20;

impl Gpu {
    /// Takes page-locked host memory of zeros, cached by the processor. Who drops it has waited for the copies to and
    /// from it: it is the next one's at once.
    ///
    /// # Errors
    /// The driver refused.
    pub fn pinned<T: Plain>(&self, n: usize) -> Result<Pinned<T>, CudaError> {
        let pinned = self.pinned_unset(n)?;
        // SAFETY: it has room for n values, and zeros are a valid `Plain`.
        unsafe { std::ptr::write_bytes(pinned.pointer, 0, n) };
        Ok(pinned)
    }

    /// As [`Self::pinned`], but with what the last owner left there: for callers for which a pass over it is too much.
    ///
    /// # Errors
    /// The driver refused.
    pub fn pinned_unset<T: Plain>(&self, n: usize) -> Result<Pinned<T>, CudaError> {
        self.make_current()?;
        let n_bytes = n * size_of::<T>();
        let place = self.pinned_pool().allocate(n_bytes)?;
        let place = place.ok_or_else(|| CudaError::Call {
            call: "cuMemHostAlloc",
            code: None,
            reason: format!("there is no host memory for {n_bytes} bytes"),
        })?;
        Ok(Pinned {
            pointer: std::ptr::with_exposed_provenance_mut(place.address as usize),
            n,
            place: Some(place),
            gpu: self.clone(),
        })
    }
}

/// The host memory of the current context's driver.
#[derive(Debug)]
pub(crate) struct HostDriver;

impl Driver for HostDriver {
    fn allocate(&mut self, n_bytes: usize) -> Result<Option<u64>, CudaError> {
        // SAFETY: freed below. No write-combining: it is slow to read back.
        let taken = check("cuMemHostAlloc", || unsafe {
            result::malloc_host(n_bytes, sys::CU_MEMHOSTALLOC_PORTABLE)
        });
        unless_out_of_memory(taken.map(|pointer| pointer.expose_provenance() as u64))
    }

    fn free(&mut self, address: u64) {
        let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the pool frees what it allocated once, and only what was given back, of which no copy is left.
        if let Err(error) = unsafe { result::free_host(pointer) } {
            tracing::warn!(%error, "cuMemFreeHost");
        }
    }
}

/// Page-locked host memory.
#[derive(Debug)]
pub struct Pinned<T: Plain> {
    pointer: *mut T,
    n: usize,
    /// Where the pool has it, unless it is lost.
    place: Option<Slice>,
    gpu: Gpu,
}

impl<T: Plain> Pinned<T> {
    /// Never gives it back, for a caller that cannot wait for its copies: lost, and counted as in use, is better than in two
    /// hands.
    pub(crate) fn lose(&mut self) {
        self.place = None;
    }
}

// SAFETY: the memory belongs to this value alone, like that of a Vec.
unsafe impl<T: Plain + Send> Send for Pinned<T> {}

impl<T: Plain> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: n values; what the driver maps and owners write is initialised bytes, and any are a valid `Plain`.
        unsafe { std::slice::from_raw_parts(self.pointer, self.n) }
    }
}

impl<T: Plain> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.n) }
    }
}

impl<T: Plain> Drop for Pinned<T> {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        if let Err(error) = self.gpu.make_current() {
            tracing::warn!(%error, n_bytes = place.n_bytes, "page-locked memory is not given back");
            return;
        }
        let mut pool = self.gpu.pinned_pool();
        pool.release(place);
        pool.trim_to(IDLE_BYTES_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::gpu;

    #[test]
    fn what_is_given_back_is_handed_out_again_and_little_is_kept() {
        let Some(test) = gpu() else { return };
        let gpu = Gpu::open(test.gpu.device() as usize).expect("the device");
        let n_taken = || gpu.pinned_pool().stats().n_driver_allocations;
        let sizes = [1000, 70_000, 3 << 20];
        for _ in 0..3 {
            let mut held: Vec<_> =
                sizes.iter().map(|&n| gpu.pinned::<u32>(n).expect("host memory")).collect();
            for (pinned, n) in held.iter_mut().zip(sizes) {
                assert!(pinned.len() == n && pinned.iter().all(|&word| word == 0));
                pinned.fill(7);
            }
        }
        // Two small ones share a block.
        assert_eq!(n_taken(), 2);
        // The longest goes.
        drop(gpu.pinned_unset::<u8>(IDLE_BYTES_MAX + 1).expect("host memory"));
        assert_eq!(gpu.pinned_pool().stats().reserved_bytes, (2 + 12) << 20);
    }
}
