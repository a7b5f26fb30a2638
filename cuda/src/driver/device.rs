//! One CUDA device: context, streams, events.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};

use super::{CudaError, check};
use crate::memory::{Caching, Driver, HostDriver, Pool, map_unit_bytes};

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
    map_unit_bytes: Option<usize>,
    pool: Mutex<Pool<Driver>>,
    pinned: Mutex<Pool<HostDriver>>,
    streams: Mutex<Vec<sys::CUstream>>,
}

// SAFETY: a CUcontext and a CUstream may be used from any thread; the driver serialises what needs it.
unsafe impl Send for Device {}
// SAFETY: as above; what is changed after it was made is behind a lock.
unsafe impl Sync for Device {}

impl Gpu {
    /// Opens a device and makes its context current on this thread.
    ///
    /// # Errors
    /// There is no driver or no such device, or it is too old.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        Self::open_with(ordinal, Caching::On)
    }

    /// Opens a device for tests of kernels: each buffer is as long as was asked for and has its own place, so that
    /// `compute-sanitizer` sees what goes beyond it.
    #[cfg(test)]
    pub(crate) fn open_without_cache(ordinal: usize) -> Result<Self, CudaError> {
        Self::open_with(ordinal, Caching::Off)
    }

    fn open_with(ordinal: usize, caching: Caching) -> Result<Self, CudaError> {
        // SAFETY: loads the library and looks for its symbols, nothing else.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_driver());
        }
        check("cuInit", result::init)?;
        let n_devices = check("cuDeviceGetCount", result::device::get_count)? as usize;
        if ordinal >= n_devices {
            return Err(CudaError::NoDevice { ordinal, n_devices });
        }
        let device = check("cuDeviceGet", || result::device::get(ordinal as c_int))?;
        let name = check("cuDeviceGetName", || result::device::get_name(device))?;
        let attribute = |attribute| {
            // SAFETY: `device` came from the driver just now.
            check("cuDeviceGetAttribute", || unsafe { result::device::get_attribute(device, attribute) })
        };
        use sys::CUdevice_attribute_enum as Attribute;
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::TooOld { device: name, major, minor });
        }
        let n_multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        // SAFETY: as above.
        let total_bytes = check("cuDeviceTotalMem", || unsafe { result::device::total_mem(device) })?;
        // SAFETY: as above; released in `Drop`.
        let context = check("cuDevicePrimaryCtxRetain", || unsafe { result::primary_ctx::retain(device) })?;
        let mut opened = Device {
            ordinal: device,
            context,
            name,
            compute_capability: (major, minor),
            n_multiprocessors,
            total_bytes,
            map_unit_bytes: None,
            pool: Mutex::new(Pool::new(Driver, caching)),
            pinned: Mutex::new(Pool::new(HostDriver, caching)),
            streams: Mutex::new(Vec::new()),
        };
        opened.make_current()?;
        opened.map_unit_bytes = map_unit_bytes(device)?;
        Ok(Self(Arc::new(opened)))
    }

    /// Makes the device's context current on this thread, as every call of the driver needs it.
    ///
    /// # Errors
    /// The driver refused.
    pub fn make_current(&self) -> Result<(), CudaError> {
        self.0.make_current()
    }

    /// The driver's handle.
    pub(crate) fn device(&self) -> sys::CUdevice {
        self.0.ordinal
    }

    /// What memory is mapped by; `None` when the device cannot map.
    pub(crate) fn map_unit_bytes(&self) -> Option<usize> {
        self.0.map_unit_bytes
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

    /// Bytes that can be taken now: those free at the driver, and those kept for reuse.
    ///
    /// # Errors
    /// The driver refused.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.make_current()?;
        let (free, _total) = check("cuMemGetInfo", result::mem_get_info)?;
        Ok(free + self.pool().idle_bytes())
    }

    /// The allocator. Its blocks belong to this device's context, which has to be current.
    pub(crate) fn pool(&self) -> MutexGuard<'_, Pool<Driver>> {
        // A panic under the lock is our bug; giving memory back while unwinding must not make it an abort.
        self.0.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The allocator of page-locked host memory, which needs the context current as well.
    pub(crate) fn pinned_pool(&self) -> MutexGuard<'_, Pool<HostDriver>> {
        // As above.
        self.0.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all work in all streams of this device.
    ///
    /// Not for the context: the libraries and other code in this process share it, and it must not be waited for while
    /// any stream in it is captured. And only for what is in the streams now: others go on putting work there.
    pub(crate) fn wait_for_streams(&self) -> Result<(), CudaError> {
        use sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as NONE;
        self.make_current()?;
        let mut passed = Vec::new();
        for &raw in self.streams().iter() {
            // SAFETY: streams leave the list before they are destroyed, and the list is locked.
            let status = check("cuStreamIsCapturing", || unsafe { result::stream::is_capturing(raw) })?;
            if status != NONE {
                // Waiting would spoil the capture.
                let reason = "a stream is being captured".to_owned();
                return Err(CudaError::Call { call: "cuStreamSynchronize", code: None, reason });
            }
            let mark = Event::new(self, Timing::Off)?;
            // SAFETY: as above.
            check("cuEventRecord", || unsafe { result::event::record(mark.raw, raw) })?;
            passed.push(mark);
        }
        // The list is free again: a step that is to be captured needs it.
        passed.iter().try_for_each(Event::synchronize)
    }

    /// The streams. While the lock is held, no thread begins to wait for all of them.
    pub(crate) fn streams(&self) -> MutexGuard<'_, Vec<sys::CUstream>> {
        self.0.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stream of its own, which does not wait for the default stream.
    ///
    /// # Errors
    /// The driver refused.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        self.make_current()?;
        let raw =
            check("cuStreamCreate", || result::stream::create(result::stream::StreamKind::NonBlocking))?;
        self.streams().push(raw);
        Ok(Stream { raw, gpu: self.clone() })
    }
}

/// Destroys what is left of a device's context, so that one that was lost may be opened again. For a process that has
/// let go of everything on the device; what others in it have there, they lose.
///
/// # Errors
/// There is no driver, or it does not give the device back to this process.
pub fn reset(ordinal: usize) -> Result<(), CudaError> {
    // SAFETY: loads the library and looks for its symbols, nothing else.
    if !unsafe { sys::is_culib_present() } {
        return Err(no_driver());
    }
    let device = check("cuDeviceGet", || result::device::get(ordinal as c_int))?;
    // SAFETY: `device` came from the driver just now, and nothing of ours is on it.
    check("cuDevicePrimaryCtxReset", || unsafe { sys::cuDevicePrimaryCtxReset_v2(device) }.result())
}

fn no_driver() -> CudaError {
    let looked_for = vec!["libcuda.so".to_owned(), "libcuda.so.1".to_owned()];
    CudaError::NoLibrary { library: "the NVIDIA driver", looked_for }
}

impl Device {
    fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained for as long as `self` lives.
        check("cuCtxSetCurrent", || unsafe { result::ctx::set_current(self.context) })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the context is retained until below.
        match unsafe { result::ctx::set_current(self.context) } {
            // Every buffer holds the device, so that all memory was given back.
            Ok(()) => {
                self.pool.get_mut().unwrap_or_else(PoisonError::into_inner).trim();
                self.pinned.get_mut().unwrap_or_else(PoisonError::into_inner).trim();
            }
            Err(error) => tracing::warn!(%error, "cuCtxSetCurrent"),
        }
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
        check("cuStreamSynchronize", || unsafe { result::stream::synchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // What is left in it would go on after it was destroyed, unseen by a thread that waits for all streams.
        let waited = self.gpu.make_current().and_then(|()| self.synchronize());
        if let Err(error) = waited {
            tracing::warn!(%error, "a stream was dropped");
        }
        self.gpu.streams().retain(|&raw| raw != self.raw);
        // SAFETY: created by us and destroyed once.
        if let Err(error) = unsafe { result::stream::destroy(self.raw) } {
            tracing::warn!(%error, "cuStreamDestroy");
        }
    }
}

/// Whether an event notes the time at which the stream passes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// It does.
    On,
    /// It only orders work, which costs the device less.
    Off,
}

/// A mark in a stream.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    gpu: Gpu,
}

// SAFETY: a CUevent may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// A mark that is nowhere yet.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(gpu: &Gpu, timing: Timing) -> Result<Self, CudaError> {
        gpu.make_current()?;
        let flags = match timing {
            Timing::On => sys::CUevent_flags::CU_EVENT_DEFAULT,
            Timing::Off => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let raw = check("cuEventCreate", || result::event::create(flags))?;
        Ok(Self { raw, gpu: gpu.clone() })
    }

    /// A mark that takes no time, and whose waiters sleep instead of looking again and again: for threads that have to leave
    /// their core to others.
    ///
    /// # Errors
    /// The driver refused.
    pub fn for_sleepers(gpu: &Gpu) -> Result<Self, CudaError> {
        use sys::CUevent_flags_enum::{CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING};
        gpu.make_current()?;
        let flags = CU_EVENT_BLOCKING_SYNC as u32 | CU_EVENT_DISABLE_TIMING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is valid for the call.
        check("cuEventCreate", || unsafe { sys::cuEventCreate(&mut raw, flags) }.result())?;
        Ok(Self { raw, gpu: gpu.clone() })
    }

    /// The driver's handle.
    #[must_use]
    pub fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Sets the mark behind all work that is in the stream now.
    ///
    /// # Errors
    /// The driver refused.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both exist.
        check("cuEventRecord", || unsafe { result::event::record(self.raw, stream.raw()) })
    }

    /// Waits until the stream has passed the mark; at once when it was never set.
    ///
    /// # Errors
    /// Work before the mark failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event exists.
        check("cuEventSynchronize", || unsafe { result::event::synchronize(self.raw) })
    }

    /// Whether the stream has passed the mark.
    ///
    /// # Errors
    /// Work before the mark failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event exists.
        check("cuEventQuery", || match unsafe { result::event::query(self.raw) } {
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            queried => queried.map(|()| true),
        })
    }

    /// Milliseconds from this mark to a later one, to half a microsecond. Both have to be passed and to take the
    /// time.
    ///
    /// # Errors
    /// One was not passed, or takes no time.
    pub fn elapsed_ms(&self, later: &Self) -> Result<f32, CudaError> {
        // SAFETY: both exist.
        check("cuEventElapsedTime", || unsafe { result::event::elapsed(self.raw, later.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: created by us and destroyed once.
            if let Err(error) = unsafe { result::event::destroy(self.raw) } {
                tracing::warn!(%error, "cuEventDestroy");
            }
        }
    }
}

impl Stream {
    /// Lets what comes into this stream from now on wait for a mark in another.
    ///
    /// # Errors
    /// The driver refused.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both exist.
        check("cuStreamWaitEvent", || unsafe {
            result::stream::wait_event(self.raw, event.raw, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        })
    }
}
