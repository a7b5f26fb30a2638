//! One CUDA device: context, streams, events.

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::error::CudaError;

/// An open device. Cheap to clone; the context is released with the last clone.
#[derive(Clone, Debug)]
pub struct Gpu(Arc<Device>);

#[derive(Debug)]
struct Device {
    ordinal: c_int,
    context: sys::CUcontext,
    name: String,
    compute_capability: (i32, i32),
    n_multiprocessors: usize,
    total_bytes: usize,
}

// SAFETY: a CUcontext may be used from any thread; the driver serialises what needs it.
unsafe impl Send for Device {}
// SAFETY: as above; the struct is never changed after it was made.
unsafe impl Sync for Device {}

/// Turns a driver result into ours.
pub(crate) fn check(call: &'static str, result: Result<(), result::DriverError>) -> Result<(), CudaError> {
    result.map_err(|error| CudaError::Call { call, reason: error.to_string() })
}

impl Gpu {
    /// Opens a device and makes its context current on this thread.
    ///
    /// # Errors
    /// There is no driver or no such device, or it is too old.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        // SAFETY: loads the library and looks for its symbols, nothing else.
        if !unsafe { sys::is_culib_present() } {
            let looked_for = vec!["libcuda.so".to_owned(), "libcuda.so.1".to_owned()];
            return Err(CudaError::NoLibrary { library: "the NVIDIA driver", looked_for });
        }
        let call =
            |call| move |error: result::DriverError| CudaError::Call { call, reason: error.to_string() };
        result::init().map_err(call("cuInit"))?;
        let n_devices = result::device::get_count().map_err(call("cuDeviceGetCount"))? as usize;
        if ordinal >= n_devices {
            return Err(CudaError::NoDevice { ordinal, n_devices });
        }
        let device = result::device::get(ordinal as c_int).map_err(call("cuDeviceGet"))?;
        let name = result::device::get_name(device).map_err(call("cuDeviceGetName"))?;
        let attribute = |attribute| {
            // SAFETY: `device` came from the driver just now.
            unsafe { result::device::get_attribute(device, attribute) }.map_err(call("cuDeviceGetAttribute"))
        };
        use sys::CUdevice_attribute_enum as Attribute;
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::TooOld { device: name, major, minor });
        }
        let n_multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        // SAFETY: as above.
        let total_bytes = unsafe { result::device::total_mem(device) }.map_err(call("cuDeviceTotalMem"))?;
        // SAFETY: as above; released in `Drop`.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(call("cuDevicePrimaryCtxRetain"))?;
        let gpu = Self(Arc::new(Device {
            ordinal: device,
            context,
            name,
            compute_capability: (major, minor),
            n_multiprocessors,
            total_bytes,
        }));
        gpu.make_current()?;
        Ok(gpu)
    }

    /// Makes the device's context current on this thread, as every call of the driver needs it.
    ///
    /// # Errors
    /// The driver refused.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained for as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.0.context) })
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Compute capability, major and minor.
    #[must_use]
    pub fn compute_capability(&self) -> (i32, i32) {
        self.0.compute_capability
    }

    /// Streaming multiprocessors.
    #[must_use]
    pub fn n_multiprocessors(&self) -> usize {
        self.0.n_multiprocessors
    }

    /// Bytes of the device's memory.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.0.total_bytes
    }

    /// Bytes that are free now.
    ///
    /// # Errors
    /// The driver refused.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        let (free, _total) = result::mem_get_info()
            .map_err(|error| CudaError::Call { call: "cuMemGetInfo", reason: error.to_string() })?;
        Ok(free)
    }

    /// A stream of its own, which does not wait for the default stream.
    ///
    /// # Errors
    /// The driver refused.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| CudaError::Call { call: "cuStreamCreate", reason: error.to_string() })?;
        Ok(Stream { raw, gpu: self.clone() })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`.
        if let Err(error) = unsafe { result::primary_ctx::release(self.ordinal) } {
            tracing::warn!(%error, "cuDevicePrimaryCtxRelease");
        }
    }
}

/// Work in order on one device.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    gpu: Gpu,
}

// SAFETY: a CUstream may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// The driver's handle.
    #[must_use]
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// The device.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Waits until all work is done, and reports what went wrong in it.
    ///
    /// # Errors
    /// A kernel or a copy failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by us and destroyed once.
        if let Err(error) = unsafe { result::stream::destroy(self.raw) } {
            tracing::warn!(%error, "cuStreamDestroy");
        }
    }
}
