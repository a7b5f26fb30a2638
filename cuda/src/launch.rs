//! Launching kernels.

use std::ffi::c_void;

use cudarc::driver::result;

use crate::device::{Stream, check};
use crate::error::CudaError;
use crate::memory::Slice;
use crate::module::Kernel;

/// One kernel argument, in the width that the kernel declares.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// A pointer to device memory.
    Pointer(u64),
    /// `int`
    I32(i32),
    /// `unsigned`
    U32(u32),
    /// `float`
    F32(f32),
    /// `unsigned long long`
    U64(u64),
}

impl From<Slice> for Arg {
    fn from(slice: Slice) -> Self {
        Self::Pointer(slice.address)
    }
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: (u32, u32, u32),
    /// Threads of a block.
    pub block: (u32, u32, u32),
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

impl Launch {
    /// Puts the kernel into the stream.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Safety
    /// The arguments are those that the kernel declares, in order and width, and the memory they point to has
    /// the lengths that the kernel assumes and lives until the stream has passed the launch.
    pub unsafe fn run(self, stream: &Stream, kernel: &Kernel, args: &[Arg]) -> Result<(), CudaError> {
        let mut pointers: Vec<*mut c_void> = args
            .iter()
            .map(|arg| match arg {
                Arg::Pointer(value) | Arg::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            })
            .collect();
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        check("cuLaunchKernel", unsafe {
            result::launch_kernel(
                kernel.raw(),
                self.grid,
                self.block,
                self.shared_bytes,
                stream.raw(),
                &mut pointers,
            )
        })
    }
}
