//! Weights from their files to the card: read in parallel into pinned buffers, and copied from there by the device.
//!
//! Nothing is mapped and nothing is held twice in host memory. A page cache hands out about 10 GB/s to one thread
//! and a PCIe 5 link takes 55, so that several threads are needed to keep the link busy.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::thread;

use trellis_engine::model::{Checkpoint, Dtype, ModelError};

use crate::backend::LoadError;
use crate::{CudaError, Gpu, Pinned, Slice, Stream};

mod convert;

/// Where a tensor of the checkpoint goes.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Its name.
    pub(crate) tensor: String,
    /// As long as its elements in the wanted type.
    pub(crate) destination: Slice,
}

/// From here on more threads only share the bandwidth of the host's memory.
const N_WORKERS_MAX: usize = 16;

/// Length of a pinned buffer. The link moves it in 75 µs (PCIe 5) to 150 µs (PCIe 4), next to which the few
/// microseconds to start a copy are little; two for each of sixteen workers are 128 MiB of locked memory.
const BUFFER_BYTES: usize = 4 << 20;

/// How often, at most, `progress` is called: twice for each percent.
const N_REPORTS: u64 = 200;

/// Fills the destinations with the tensors of a checkpoint, as elements of `dtype`. `progress` hears, on this
/// thread, how many bytes are on the card, and how many there will be.
///
/// # Errors
/// A tensor is missing or cannot be read, or the device failed. What was copied until then is unspecified.
///
/// # Panics
/// A destination has another length than its tensor.
pub(crate) fn load(
    gpu: &Gpu,
    checkpoint: &Checkpoint,
    dtype: Dtype,
    parts: &[Part],
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), LoadError> {
    let n_bytes: usize = parts.iter().map(|part| part.destination.n_bytes).sum();
    let longest = parts.iter().map(|part| part.destination.n_bytes).max().unwrap_or(0);
    let n_cores = thread::available_parallelism().map_or(1, usize::from);
    let sizes = Sizes {
        n_workers: n_bytes.div_ceil(BUFFER_BYTES).min(n_cores).min(N_WORKERS_MAX),
        buffer_bytes: longest.min(BUFFER_BYTES),
    };
    copy(checkpoint, dtype, parts, sizes, || PinnedLane::new(gpu, sizes.buffer_bytes), progress)
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    n_workers: usize,
    buffer_bytes: usize,
}

/// A buffer, and a way from there to the card.
trait Lane {
    /// Waits until the copy is done, and gives the buffer to be filled.
    fn ready(&mut self) -> Result<&mut [u8], CudaError>;

    /// Starts to copy the start of the buffer.
    fn send(&mut self, destination: Slice) -> Result<(), CudaError>;
}

/// A pinned buffer with a stream of its own, so that waiting for one does not wait for the other's copy.
struct PinnedLane {
    // Dropped first, which waits for the copy.
    stream: Stream,
    buffer: Pinned<u8>,
}

impl PinnedLane {
    fn new(gpu: &Gpu, n_bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { stream: gpu.stream()?, buffer: gpu.pinned(n_bytes)? })
    }
}

impl Lane for PinnedLane {
    fn ready(&mut self) -> Result<&mut [u8], CudaError> {
        self.stream.synchronize()?;
        Ok(&mut self.buffer)
    }

    fn send(&mut self, destination: Slice) -> Result<(), CudaError> {
        destination.upload(&self.stream, &self.buffer[..destination.n_bytes])
    }
}

/// Elements of one part that go through a buffer together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    part_idx: usize,
    start: usize,
    n_elements: usize,
}

/// Cuts parts into ranges of at most `buffer_bytes`, in the order of the files: workers that take one after the
/// other then read each file once from front to back, which is what read-ahead and disks are made for. Ranges are
/// short, so that workers end together in any order.
fn cut(
    checkpoint: &Checkpoint,
    dtype: Dtype,
    parts: &[Part],
    buffer_bytes: usize,
) -> Result<Vec<Range>, ModelError> {
    let mut found = Vec::with_capacity(parts.len());
    for (part_idx, part) in parts.iter().enumerate() {
        let info = checkpoint.tensor(&part.tensor).ok_or_else(|| ModelError::UnknownTensor {
            file: checkpoint.name().to_owned(),
            tensor: part.tensor.clone(),
        })?;
        let n_bytes = info.n_elements() * dtype.n_bytes();
        assert_eq!(part.destination.n_bytes, n_bytes, "destination of {}", part.tensor);
        found.push((info.place(), part_idx, info.n_elements()));
    }
    found.sort_unstable();
    let n_most = buffer_bytes / dtype.n_bytes();
    let ranges = found.into_iter().flat_map(|(_, part_idx, n)| {
        (0..n).step_by(n_most.max(1)).map(move |start| {
            let n_elements = n_most.min(n - start);
            Range { part_idx, start, n_elements }
        })
    });
    Ok(ranges.collect())
}

/// What the workers share.
struct Job<'a> {
    checkpoint: &'a Checkpoint,
    dtype: Dtype,
    parts: &'a [Part],
    ranges: Vec<Range>,
    next: AtomicUsize,
    is_stopped: AtomicBool,
}

fn copy<L: Lane>(
    checkpoint: &Checkpoint,
    dtype: Dtype,
    parts: &[Part],
    sizes: Sizes,
    open: impl Fn() -> Result<L, CudaError> + Sync,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), LoadError> {
    let ranges = cut(checkpoint, dtype, parts, sizes.buffer_bytes)?;
    let (next, is_stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let job = Job { checkpoint, dtype, parts, ranges, next, is_stopped };
    let total: u64 = parts.iter().map(|part| part.destination.n_bytes as u64).sum();
    progress(0, total);
    thread::scope(|scope| {
        let (report, reports) = mpsc::sync_channel(2 * sizes.n_workers);
        let workers: Vec<_> = (0..sizes.n_workers)
            .map(|_| {
                let (job, open, report) = (&job, &open, report.clone());
                scope.spawn(move || {
                    let outcome = job.work(open, &report);
                    if outcome.is_err() {
                        job.is_stopped.store(true, Ordering::Relaxed);
                    }
                    outcome
                })
            })
            .collect();
        drop(report);
        let (mut done, mut n_told) = (0, 0);
        for n_bytes in reports {
            done += n_bytes;
            let n_due = u128::from(done) * u128::from(N_REPORTS) / u128::from(total);
            if n_due > n_told {
                n_told = n_due;
                progress(done, total);
            }
        }
        let outcomes = workers.into_iter().map(|worker| worker.join());
        outcomes
            .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .fold(Ok(()), Result::and)
    })
}

impl Job<'_> {
    /// Fills one buffer while the other is copied, until no range is left. Sends how many bytes have arrived.
    fn work<L: Lane>(
        &self,
        open: impl Fn() -> Result<L, CudaError>,
        report: &SyncSender<u64>,
    ) -> Result<(), LoadError> {
        let mut lanes = [(open()?, 0), (open()?, 0)];
        let mut scratch = convert::Scratch::default();
        for round in 0.. {
            let (lane, sent_bytes) = &mut lanes[round % 2];
            let buffer = lane.ready()?;
            let is_heard = report_arrival(report, std::mem::take(sent_bytes));
            if !is_heard || self.is_stopped.load(Ordering::Relaxed) {
                break;
            }
            let Some(range) = self.ranges.get(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            let part = &self.parts[range.part_idx];
            let element_bytes = self.dtype.n_bytes();
            let n_bytes = range.n_elements * element_bytes;
            let out = &mut buffer[..n_bytes];
            convert::read(self.checkpoint, &part.tensor, range.start, self.dtype, out, &mut scratch)?;
            lane.send(part.destination.part(range.start * element_bytes, n_bytes))?;
            *sent_bytes = n_bytes as u64;
        }
        for (lane, sent_bytes) in &mut lanes {
            lane.ready()?;
            report_arrival(report, *sent_bytes);
        }
        Ok(())
    }
}

/// Whether the thread that reports still listens; it does not when `progress` has panicked.
fn report_arrival(report: &SyncSender<u64>, n_bytes: u64) -> bool {
    n_bytes == 0 || report.send(n_bytes).is_ok()
}

#[cfg(test)]
mod tests;
