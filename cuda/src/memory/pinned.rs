//! Page-locked host memory, which the device reads and writes by itself.

use std::ops::{Deref, DerefMut};

use cudarc::driver::{result, sys};

use super::Plain;
use crate::driver::{CudaError, Gpu, check};

impl Gpu {
    /// Takes page-locked host memory of zeros, cached by the processor.
    ///
    /// # Errors
    /// The driver refused.
    pub fn pinned<T: Plain>(&self, n: usize) -> Result<Pinned<T>, CudaError> {
        let pinned = self.pinned_unset(n)?;
        // SAFETY: it has room for n values, and zeros are a valid `Plain`.
        unsafe { std::ptr::write_bytes(pinned.pointer, 0, n) };
        Ok(pinned)
    }

    /// As [`Self::pinned`], but with what the driver left there: for callers for which a pass over it is too much.
    ///
    /// # Errors
    /// The driver refused.
    pub fn pinned_unset<T: Plain>(&self, n: usize) -> Result<Pinned<T>, CudaError> {
        self.make_current()?;
        let n_bytes = (n * size_of::<T>()).max(1);
        // SAFETY: freed in `Drop`. No write-combining: it is slow to read back.
        let pointer = check("cuMemHostAlloc", || unsafe {
            result::malloc_host(n_bytes, sys::CU_MEMHOSTALLOC_PORTABLE)
        })?;
        Ok(Pinned { pointer: pointer.cast(), n, gpu: self.clone() })
    }
}

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
        // SAFETY: n values; what the driver maps is initialised bytes, and any are a valid `Plain`.
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
