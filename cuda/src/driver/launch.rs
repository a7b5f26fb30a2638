//! Launching kernels.

use cudarc::driver::sys;

use super::{CudaError, Stream, check};
use crate::compile::Kernel;

/// What a kernel takes: one structure, passed by value.
///
/// # Safety
/// The type is `repr(C)`, of fields of 4 and 8 bytes without padding between or behind them. The kernels that are
/// found as `Kernel<Self>` declare one parameter: a structure of the same fields in the same order.
pub unsafe trait Params {
    /// Length of the structure.
    const N_BYTES: usize;
}

/// Says that a structure is what kernels take. Its length is written out once more, as in the kernels' source.
macro_rules! params {
    ($name:ident, $n_bytes:literal) => {
        const _: () = assert!(size_of::<$name>() == $n_bytes);
        // SAFETY: a test compares the fields with those in the source, where the length is asserted as well.
        unsafe impl $crate::driver::Params for $name {
            const N_BYTES: usize = $n_bytes;
        }
    };
}
pub(crate) use params;

/// Blocks of the largest cluster that every device with clusters takes.
pub(crate) const N_CLUSTER_BLOCKS: usize = 8;

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
    /// passed the launch.
    pub unsafe fn run<P: Params>(
        self,
        stream: &Stream,
        kernel: &Kernel<P>,
        params: &P,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.run_with(stream, kernel, params, &mut []) }
    }

    /// As [`Launch::run`], in clusters of `n_blocks` blocks that follow each other in the grid, which reach each other's
    /// shared memory. Devices before 9.0 have no clusters, and none has to take more than 8 blocks.
    ///
    /// # Errors
    /// As for [`Launch::run`].
    ///
    /// # Safety
    /// As for [`Launch::run`].
    pub unsafe fn run_in_clusters<P: Params>(
        self,
        n_blocks: u32,
        stream: &Stream,
        kernel: &Kernel<P>,
        params: &P,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.run_with(stream, kernel, params, &mut [in_clusters(n_blocks)]) }
    }

    /// # Safety
    /// As for [`Launch::run`].
    unsafe fn run_with<P: Params>(
        self,
        stream: &Stream,
        kernel: &Kernel<P>,
        params: &P,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> Result<(), CudaError> {
        let config = self.config(stream.raw(), attributes);
        let mut places = [std::ptr::from_ref(params).cast_mut().cast()];
        check("cuLaunchKernelEx", || {
            // SAFETY: the caller's promise; the driver copies the parameters before it returns.
            unsafe {
                sys::cuLaunchKernelEx(&config, kernel.raw(), places.as_mut_ptr(), std::ptr::null_mut())
                    .result()
            }
        })
    }

    /// Clusters of `n_blocks` blocks of this launch that the whole device has room for at once.
    ///
    /// # Errors
    /// The driver refused.
    pub fn n_resident_clusters<P>(self, kernel: &Kernel<P>, n_blocks: u32) -> Result<usize, CudaError> {
        let mut attributes = [in_clusters(n_blocks)];
        let config = self.config(std::ptr::null_mut(), &mut attributes);
        let mut n_clusters = 0;
        check("cuOccupancyMaxActiveClusters", || {
            // SAFETY: the function belongs to a loaded module, and the pointers are valid for the call.
            unsafe { sys::cuOccupancyMaxActiveClusters(&mut n_clusters, kernel.raw(), &config) }.result()
        })?;
        Ok(n_clusters.max(0) as usize)
    }

    fn config(self, stream: sys::CUstream, attributes: &mut [sys::CUlaunchAttribute]) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.grid.0,
            gridDimY: self.grid.1,
            gridDimZ: self.grid.2,
            blockDimX: self.block.0,
            blockDimY: self.block.1,
            blockDimZ: self.block.2,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }
}

fn in_clusters(n_blocks: u32) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue {
            clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: n_blocks, y: 1, z: 1 },
        },
    }
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
