//! Device memory: buffers out of a caching allocator, and copies to and from them.

use cudarc::driver::result;

use super::pool::{self, MemoryStats};
use crate::driver::{CudaError, Gpu, Stream, check};

/// Bytes on the device, given back when dropped.
///
/// Another buffer may get the same memory at once. Dropping therefore waits for all streams of the device: work that
/// was launched before cannot touch what is no longer its own. Buffers are dropped when a model is, not in a
/// steady state, and never while a stream is captured into a graph: a graph that was captured with a buffer's address
/// is gone before the buffer.
#[derive(Debug)]
pub struct Buffer {
    reserved: Slice,
    n_bytes: usize,
    gpu: Gpu,
}

/// A part of device memory: address and length, without a claim on it. A caller that launches work on it keeps
/// the buffer until the work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Device address.
    pub address: u64,
    /// Length.
    pub n_bytes: usize,
}

/// An address on the device as a kernel takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Pointer(u64);

impl Pointer {
    /// Of what is not there.
    pub const NULL: Self = Self(0);
}

impl From<Slice> for Pointer {
    fn from(slice: Slice) -> Self {
        Self(slice.address)
    }
}

impl From<Option<Slice>> for Pointer {
    fn from(slice: Option<Slice>) -> Self {
        slice.map_or(Self::NULL, Self::from)
    }
}

impl Gpu {
    /// Takes device memory; where it starts is a multiple of 512. What was given back before is used first, and what
    /// of that does not serve goes back to the driver before a request fails.
    ///
    /// # Errors
    /// There is not enough; the numbers are in the error.
    pub fn allocate(&self, what: &'static str, n_bytes: usize) -> Result<Buffer, CudaError> {
        self.make_current()?;
        let reserved = self.pool().allocate(n_bytes)?;
        let Some(reserved) = reserved else {
            return Err(CudaError::OutOfMemory {
                what,
                needed_bytes: n_bytes as u64,
                free_bytes: self.free_bytes().unwrap_or(0) as u64,
                total_bytes: self.total_bytes() as u64,
            });
        };
        Ok(Buffer { reserved, n_bytes, gpu: self.clone() })
    }

    /// What the allocator holds and has done.
    #[must_use]
    pub fn memory_stats(&self) -> MemoryStats {
        self.pool().stats()
    }

    /// Gives memory that is kept for reuse back to the driver, where other processes find it.
    ///
    /// # Errors
    /// The driver refused.
    pub fn trim(&self) -> Result<(), CudaError> {
        self.make_current()?;
        self.pool().trim();
        Ok(())
    }
}

impl Buffer {
    /// All of it.
    #[must_use]
    pub fn slice(&self) -> Slice {
        Slice { address: self.reserved.address, n_bytes: self.n_bytes }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.gpu.wait_for_streams() {
            Ok(()) => self.gpu.pool().release(self.reserved),
            // Lost, and counted as in use: better than in two hands.
            Err(error) => tracing::warn!(%error, n_bytes = self.n_bytes, "device memory is not given back"),
        }
    }
}

/// The driver of the current context.
#[derive(Debug)]
pub(crate) struct Driver;

impl pool::Driver for Driver {
    fn allocate(&mut self, n_bytes: usize) -> Result<Option<u64>, CudaError> {
        // SAFETY: a plain allocation, never of length 0.
        pool::unless_out_of_memory(check("cuMemAlloc", || unsafe { result::malloc_sync(n_bytes) }))
    }

    fn free(&mut self, address: u64) {
        // SAFETY: the pool frees what it allocated once, and only what was given back, of which no work is left.
        if let Err(error) = unsafe { result::free_sync(address) } {
            tracing::warn!(%error, "cuMemFree");
        }
    }
}

impl Slice {
    /// The bytes `start..start + n_bytes`.
    ///
    /// # Panics
    /// They are not inside.
    #[must_use]
    pub fn part(self, start: usize, n_bytes: usize) -> Self {
        assert!(start.checked_add(n_bytes).is_some_and(|end| end <= self.n_bytes), "a part lies inside");
        Self { address: self.address + start as u64, n_bytes }
    }

    /// Copies from the host; returns once the source may be changed, which for pinned memory is after the
    /// stream has reached the copy.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// The source is longer.
    pub fn upload<T: Plain>(self, stream: &Stream, source: &[T]) -> Result<(), CudaError> {
        assert!(size_of_val(source) <= self.n_bytes, "{} bytes into {}", size_of_val(source), self.n_bytes);
        // SAFETY: the destination has room; pageable memory is staged by the driver before it returns.
        check("cuMemcpyHtoDAsync", || unsafe {
            result::memcpy_htod_async(self.address, source, stream.raw())
        })
    }

    /// Copies to the host and waits for it.
    ///
    /// # Errors
    /// The driver refused, or work before the copy failed.
    ///
    /// # Panics
    /// The destination is longer.
    pub fn download<T: Plain>(self, stream: &Stream, destination: &mut [T]) -> Result<(), CudaError> {
        assert!(size_of_val(destination) <= self.n_bytes, "the source is long enough");
        // SAFETY: the source is long enough, and the stream is waited for before the borrow ends.
        check("cuMemcpyDtoHAsync", || unsafe {
            result::memcpy_dtoh_async(destination, self.address, stream.raw())
        })?;
        stream.synchronize()
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// The driver refused.
    pub fn fill(self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        // SAFETY: the range is this slice's.
        check("cuMemsetD8Async", || unsafe {
            result::memset_d8_async(self.address, byte, self.n_bytes, stream.raw())
        })
    }
}

/// Types without padding and without invalid bit patterns.
///
/// # Safety
/// Every sequence of bytes has to be a valid value, and every value has to be initialised bytes throughout.
pub unsafe trait Plain: Copy {}

// SAFETY: plain numbers.
unsafe impl Plain for u8 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for i32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u64 {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}
// SAFETY: a transparent u16.
unsafe impl Plain for half::bf16 {}
// SAFETY: a transparent u16.
unsafe impl Plain for half::f16 {}

#[cfg(test)]
#[path = "buffer_tests.rs"]
mod tests;
