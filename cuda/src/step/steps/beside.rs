//! What a step does beside its own stream: a branch of its graph where it is captured.

use crate::{CudaError, Event, Gpu, Stream, Timing};

/// A stream that leaves a step's, which waits for it later.
#[derive(Debug)]
pub(super) struct Beside {
    stream: Stream,
    left: Event,
    done: Event,
}

impl Beside {
    /// # Errors
    /// The driver refused.
    pub(super) fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let mark = || Event::new(gpu, Timing::Off);
        Ok(Self { stream: gpu.stream()?, left: mark()?, done: mark()? })
    }

    /// Launches what `launch` puts into the other stream, behind all that `stream` has so far. What follows there goes on
    /// beside it, until it waits for [`Beside::done`], as it has to within the step.
    ///
    /// # Errors
    /// The driver refused something.
    pub(super) fn run(
        &self,
        stream: &Stream,
        launch: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.left.record(stream)?;
        self.stream.wait_for(&self.left)?;
        launch(&self.stream)?;
        self.done.record(&self.stream)
    }

    /// The mark behind what was launched last.
    pub(super) fn done(&self) -> &Event {
        &self.done
    }
}
