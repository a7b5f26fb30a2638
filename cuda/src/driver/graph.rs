//! Launches captured once and run again as a whole.

use cudarc::driver::{result, sys};

use super::{CudaError, Gpu, Stream, check};

/// A captured sequence of launches, ready to run.
#[derive(Debug)]
pub(crate) struct Graph {
    raw: sys::CUgraphExec,
    gpu: Gpu,
    n_bytes: u64,
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
        // A thread that gives memory back waits for all streams, which would end a capture with an error: the lock keeps
        // such threads waiting until it is over.
        let _streams = stream.gpu().streams();
        // Other threads may allocate meanwhile; that is no part of this.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream exists and captures nothing else.
        check("cuStreamBeginCapture", || unsafe { result::stream::begin_capture(stream.raw(), mode) })?;
        let capture = Capture(stream);
        launch()?;
        let captured = capture.end()?;
        let gpu = stream.gpu();
        // The driver does not say what a graph takes, only what is free; while the pool is locked, this process neither
        // takes nor gives back.
        let _pool = gpu.pool();
        let free_before = free_bytes();
        let mut raw = std::ptr::null_mut();
        check("cuGraphInstantiate", || {
            // SAFETY: the graph exists. No flags: the zero of the type is none of its names, so the call is made
            // directly.
            unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, captured.0, 0) }.result()
        })?;
        let mut graph = Self { raw, gpu: gpu.clone(), n_bytes: 0 };
        // SAFETY: both exist. What the device needs of the graph is there before its first launch.
        check("cuGraphUpload", || unsafe { sys::cuGraphUpload(graph.raw, stream.raw()) }.result())?;
        graph.n_bytes = free_before.saturating_sub(free_bytes());
        Ok(graph)
    }

    /// Device memory that it took when it was made; nothing where the driver had some left from others.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Puts all of it into the stream.
    ///
    /// # Errors
    /// The driver refused.
    pub(crate) fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both exist; what the captured launches point to lives as long as the owner of this graph.
        check("cuGraphLaunch", || unsafe { result::graph::launch(self.raw, stream.raw()) })
    }
}

/// A capture under way; ends with its scope, also when a launch fails or panics.
struct Capture<'a>(&'a Stream);

/// A captured graph that is not ready to run yet.
struct Template(sys::CUgraph);

impl Capture<'_> {
    fn end(self) -> Result<Template, CudaError> {
        let graph = check("cuStreamEndCapture", || {
            // SAFETY: the capture began when `self` was made, and ends here or, if this was not tried, with `self`.
            let graph = unsafe { result::stream::end_capture(self.0.raw()) };
            std::mem::forget(self);
            graph
        });
        graph.map(Template)
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

/// Free bytes of the device of this thread's context; none where the driver does not say: a graph is worth more than
/// its size.
fn free_bytes() -> u64 {
    check("cuMemGetInfo", result::mem_get_info).map_or(0, |(free, _total)| free as u64)
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
