//! Launching kernels.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::{CudaError, Stream, check};
use crate::compile::Kernel;
use crate::memory::Slice;

/// What a kernel takes: one structure, passed by value.
///
/// # Safety
/// The type is `repr(C)`, of fields of 4 and 8 bytes without padding between or behind them. The kernels that are
/// found as `Kernel<Self>` declare one parameter: a structure of the same fields in the same order.
pub unsafe trait Params {
    /// Length of the structure; `None` for a list of arguments.
    const N_BYTES: Option<usize>;

    /// Calls `launch` with the place of each parameter.
    fn with_places<R>(&self, launch: impl FnOnce(&mut [*mut c_void]) -> R) -> R;
}

/// Says that a structure is what kernels take. Its length is written out once more, as in the kernels' source.
macro_rules! params {
    ($name:ident, $n_bytes:literal) => {
        const _: () = assert!(size_of::<$name>() == $n_bytes);
        // SAFETY: a test compares the fields with those in the source, where the length is asserted as well.
        unsafe impl $crate::driver::Params for $name {
            const N_BYTES: Option<usize> = Some($n_bytes);

            fn with_places<R>(&self, launch: impl FnOnce(&mut [*mut std::ffi::c_void]) -> R) -> R {
                launch(&mut [std::ptr::from_ref(self).cast_mut().cast()])
            }
        }
    };
}
pub(crate) use params;

/// One of several arguments, in the width that the kernel declares.
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

/// Most arguments of a kernel that takes several.
const N_ARGS_MAX: usize = 24;

// SAFETY: the caller of a launch promises that the arguments are those of the kernel.
unsafe impl Params for [Arg] {
    const N_BYTES: Option<usize> = None;

    fn with_places<R>(&self, launch: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
        let mut places = [std::ptr::null_mut(); N_ARGS_MAX];
        for (place, arg) in places[..self.len()].iter_mut().zip(self) {
            *place = match arg {
                Arg::Pointer(value) | Arg::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            };
        }
        launch(&mut places[..self.len()])
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
    /// Puts the kernel into the stream. Allocates nothing.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Safety
    /// The memory that the parameters point to has the lengths that the kernel assumes, and lives until the stream has
    /// passed the launch; arguments in a list are those that the kernel declares, in order and width.
    pub unsafe fn run<P: Params + ?Sized>(
        self,
        stream: &Stream,
        kernel: &Kernel<P>,
        params: &P,
    ) -> Result<(), CudaError> {
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid.0,
            gridDimY: self.grid.1,
            gridDimZ: self.grid.2,
            blockDimX: self.block.0,
            blockDimY: self.block.1,
            blockDimZ: self.block.2,
            sharedMemBytes: self.shared_bytes,
            hStream: stream.raw(),
            attrs: std::ptr::null_mut(),
            numAttrs: 0,
        };
        check("cuLaunchKernelEx", || {
            params.with_places(|places| {
                // SAFETY: the caller's promise; the driver copies the parameters before it returns.
                unsafe {
                    sys::cuLaunchKernelEx(&config, kernel.raw(), places.as_mut_ptr(), std::ptr::null_mut())
                        .result()
                }
            })
        })
    }
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
