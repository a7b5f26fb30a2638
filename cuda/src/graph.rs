//! Launches captured once and run again as a whole.

use cudarc::driver::{result, sys};

use crate::device::{Gpu, Stream, check};
use crate::error::CudaError;

/// A captured sequence of launches, ready to run.
#[derive(Debug)]
pub(crate) struct Graph {
    raw: sys::CUgraphExec,
    gpu: Gpu,
}

// SAFETY: an executable graph may be launched from any thread, one at a time; `&mut` or the owner's order sees to it.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `launch` puts into the stream; nothing of it runs now.
    ///
    /// # Errors
    /// A launch was refused, or cannot be captured.
    pub(crate) fn capture<E: From<CudaError>>(
        stream: &Stream,
        launch: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        // Who gives memory back waits for all streams, which a capture would not survive: until it is over, they wait.
        let _streams = stream.gpu().streams();
        // Other threads may allocate meanwhile; that is no part of this.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream exists and captures nothing else.
        check("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream.raw(), mode) })?;
        let capture = Capture(stream);
        launch()?;
        let captured = capture.end()?;
        let gpu = stream.gpu();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph exists. No flags: the zero of the type is none of its names, so the call is made directly.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, captured.0, 0) }.result();
        made.map_err(|error| call_error(gpu, "cuGraphInstantiate", error))?;
        let graph = Self { raw, gpu: gpu.clone() };
        // SAFETY: both exist. What the device needs of the graph is there before its first launch.
        let uploaded = unsafe { sys::cuGraphUpload(graph.raw, stream.raw()) }.result();
        uploaded.map_err(|error| call_error(gpu, "cuGraphUpload", error))?;
        Ok(graph)
    }

    /// Puts all of it into the stream.
    ///
    /// # Errors
    /// The driver refused.
    pub(crate) fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both exist; what the captured launches point to lives as long as their owner, who holds this graph.
        check("cuGraphLaunch", unsafe { result::graph::launch(self.raw, stream.raw()) })
    }
}

/// A capture under way; ends with its scope, also when a launch fails or panics.
struct Capture<'a>(&'a Stream);

/// A captured graph that is not ready to run yet.
struct Template(sys::CUgraph);

impl Capture<'_> {
    fn end(self) -> Result<Template, CudaError> {
        let stream = self.0;
        std::mem::forget(self);
        // SAFETY: the capture began when `self` was made, and ends here alone.
        let graph = unsafe { result::stream::end_capture(stream.raw()) };
        graph.map(Template).map_err(|error| call_error(stream.gpu(), "cuStreamEndCapture", error))
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // SAFETY: as in `end`, which forgets the value.
        if let Ok(graph) = unsafe { result::stream::end_capture(self.0.raw()) } {
            drop(Template(graph));
        }
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        // SAFETY: captured by us and destroyed once; null when the capture was broken, which the driver refuses.
        if let Err(error) = unsafe { result::graph::destroy(self.0) } {
            tracing::debug!(%error, "cuGraphDestroy");
        }
    }
}

fn call_error(gpu: &Gpu, call: &'static str, error: result::DriverError) -> CudaError {
    if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return CudaError::Call { call, reason: error.to_string() };
    }
    CudaError::OutOfMemory {
        what: "a captured step",
        // The driver does not say how many.
        needed_bytes: 0,
        free_bytes: gpu.free_bytes().unwrap_or(0) as u64,
        total_bytes: gpu.total_bytes() as u64,
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: made by us and destroyed once.
            if let Err(error) = unsafe { result::graph::exec_destroy(self.raw) } {
                tracing::warn!(%error, "cuGraphExecDestroy");
            }
        }
    }
}
