//! Device memory and pinned host memory.

use std::ops::{Deref, DerefMut};

use cudarc::driver::{result, sys};

use crate::device::{Gpu, Stream, check};
use crate::error::CudaError;

/// Bytes on the device, freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    address: u64,
    n_bytes: usize,
    gpu: Gpu,
}

/// A part of device memory: address and length, without a claim on it. Who launches work on it sees to it that
/// the buffer lives until the work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Device address.
    pub address: u64,
    /// Length.
    pub n_bytes: usize,
}

impl Gpu {
    /// Takes device memory.
    ///
    /// # Errors
    /// There is not enough; the numbers are in the error.
    pub fn allocate(&self, what: &'static str, n_bytes: usize) -> Result<Buffer, CudaError> {
        self.make_current()?;
        // SAFETY: a plain allocation; an empty one is rounded up to what the driver accepts.
        match unsafe { result::malloc_sync(n_bytes.max(1)) } {
            Ok(address) => Ok(Buffer { address, n_bytes, gpu: self.clone() }),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(CudaError::OutOfMemory {
                what,
                needed_bytes: n_bytes as u64,
                free_bytes: self.free_bytes().unwrap_or(0) as u64,
                total_bytes: self.total_bytes() as u64,
            }),
            Err(error) => Err(CudaError::Call { call: "cuMemAlloc", reason: error.to_string() }),
        }
    }

    /// Takes page-locked host memory of zeros, cached by the processor.
    ///
    /// # Errors
    /// The driver refused.
    pub fn pinned<T: Plain>(&self, n: usize) -> Result<Pinned<T>, CudaError> {
        self.make_current()?;
        let n_bytes = (n * size_of::<T>()).max(1);
        // SAFETY: freed in `Drop`. No write-combining: it is slow to read back.
        let pointer = unsafe { result::malloc_host(n_bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(|error| CudaError::Call { call: "cuMemHostAlloc", reason: error.to_string() })?;
        // SAFETY: the allocation has n_bytes bytes, and zeros are a valid `Plain`.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, n_bytes) };
        Ok(Pinned { pointer: pointer.cast(), n, gpu: self.clone() })
    }
}

impl Buffer {
    /// All of it.
    #[must_use]
    pub fn slice(&self) -> Slice {
        Slice { address: self.address, n_bytes: self.n_bytes }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: allocated by us and freed once; the driver waits for work that uses it.
            if let Err(error) = unsafe { result::free_sync(self.address) } {
                tracing::warn!(%error, "cuMemFree");
            }
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
        check("cuMemcpyHtoDAsync", unsafe { result::memcpy_htod_async(self.address, source, stream.raw()) })
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
        check("cuMemcpyDtoHAsync", unsafe {
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
        check("cuMemsetD8Async", unsafe {
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

/// Page-locked host memory.
#[derive(Debug)]
pub struct Pinned<T: Plain> {
    pointer: *mut T,
    n: usize,
    gpu: Gpu,
}

// SAFETY: the memory belongs to this value alone, like that of a Vec.
unsafe impl<T: Plain + Send> Send for Pinned<T> {}

impl<T: Plain> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: n values, initialised when it was made.
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
        if self.gpu.make_current().is_ok() {
            // SAFETY: allocated by us and freed once.
            if let Err(error) = unsafe { result::free_host(self.pointer.cast()) } {
                tracing::warn!(%error, "cuMemFreeHost");
            }
        }
    }
}
