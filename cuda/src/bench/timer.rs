//! How long launches take on the device.

use crate::driver::Graph;
use crate::{CudaError, Event, Gpu, Stream, Timing};

/// Replays of which the median counts.
const N_REPLAYS: usize = 7;

/// Times launches in a stream.
#[derive(Debug)]
pub(crate) struct Timer<'a> {
    stream: &'a Stream,
    begin: Event,
    end: Event,
}

impl<'a> Timer<'a> {
    pub(crate) fn new(gpu: &Gpu, stream: &'a Stream) -> Result<Self, CudaError> {
        Ok(Self { stream, begin: Event::new(gpu, Timing::On)?, end: Event::new(gpu, Timing::On)? })
    }

    /// Seconds of one of `n_launches` launches that follow each other, the median over several rounds. `launch` is
    /// called with 0 and then with `0..n_launches`: a caller that wants cold caches works on other memory each time. The
    /// rounds are replays of a graph, so that the host's part of a launch does not count.
    pub(crate) fn seconds(
        &self,
        n_launches: usize,
        mut launch: impl FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        // The first launch loads the kernel, which cannot be captured.
        launch(0)?;
        self.stream.synchronize()?;
        let graph = Graph::capture(self.stream, || (0..n_launches).try_for_each(&mut launch))?;
        graph.launch(self.stream)?;
        let mut rounds_ms = [0f32; N_REPLAYS];
        for round_ms in &mut rounds_ms {
            self.begin.record(self.stream)?;
            graph.launch(self.stream)?;
            self.end.record(self.stream)?;
            self.end.synchronize()?;
            *round_ms = self.begin.elapsed_ms(&self.end)?;
        }
        rounds_ms.sort_unstable_by(f32::total_cmp);
        Ok(f64::from(rounds_ms[N_REPLAYS / 2]) / 1e3 / n_launches as f64)
    }
}
