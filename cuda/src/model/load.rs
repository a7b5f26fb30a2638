//! Weights from their files to the card: read in parallel into pinned buffers, and copied from there by the device.
//!
//! Nothing is mapped and nothing is held twice in host memory. A page cache hands out about 10 GB/s to one thread
//! and a PCIe 5 link takes 55, so that several threads are needed to keep the link busy. Buffers are small and used over
//! and over: together they stay in the processor's last cache, so that the device reads from there what was just
//! written, and the host's memory is read once.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use trellis_engine::model::{Checkpoint, Dtype, ModelError};

use crate::backend::LoadError;
use crate::{CudaError, Event, Gpu, Slice, Stream};

mod convert;

/// Where a tensor of the checkpoint goes.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Its name.
    pub(crate) tensor: String,
    /// As long as its elements in the wanted type.
    pub(crate) destination: Slice,
}

/// Eight workers ask for about what a link takes. The link idles between two copies, which long ones make rare; together the
/// buffers are 32 MiB: page-locking more takes longer than it saves.
const MOST: Sizes = Sizes { n_workers: 8, n_buffers: 2, buffer_bytes: 2 << 20 };

/// What is used of that while the steps of a model share the link. Their small copies queue behind ours: 4 MiB under way
/// keep the link from idling, and cost a step 80 µs (PCIe 5).
const BESIDE_STEPS: Sizes = Sizes { n_workers: 1, n_buffers: 2, ..MOST };

/// How long a worker that is too many beside steps waits before it looks again.
const PAUSE: Duration = Duration::from_millis(1);

/// A worker, with stream and buffers, costs about as much time as this takes to be copied.
const WORKER_BYTES_MIN: usize = 16 << 20;

/// How long a worker looks whether a buffer was copied before it sleeps, and how long it does nothing between two looks:
/// a look keeps the driver from other threads.
const LOOKS_MAX: Duration = Duration::from_micros(300);
const N_HINTS: usize = 100;

/// How often, at most, `progress` is called: twice for each percent.
const N_REPORTS: u64 = 200;

/// Fills the destinations with the tensors of a checkpoint, as elements of `dtype`; slower while `is_shared` says that steps
/// share the link. `progress` hears, on this thread, how many bytes are on the card, and how many there will be.
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
    is_shared: &(dyn Fn() -> bool + Sync),
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), LoadError> {
    load_with(gpu, checkpoint, dtype, parts, MOST, is_shared, progress)
}

/// As [`load`], with at most these sizes.
fn load_with(
    gpu: &Gpu,
    checkpoint: &Checkpoint,
    dtype: Dtype,
    parts: &[Part],
    most: Sizes,
    is_shared: &(dyn Fn() -> bool + Sync),
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), LoadError> {
    let n_bytes: usize = parts.iter().map(|part| part.destination.n_bytes).sum();
    let longest = parts.iter().map(|part| part.destination.n_bytes).max().unwrap_or(0);
    let n_cores = thread::available_parallelism().map_or(1, usize::from);
    let sizes = Sizes {
        n_workers: n_bytes.div_ceil(WORKER_BYTES_MIN).min(n_cores).min(most.n_workers),
        // A multiple of every element's length, and of a line of the cache.
        buffer_bytes: longest.clamp(1, most.buffer_bytes).next_multiple_of(64),
        ..most
    };
    // One piece of memory: the driver stops others for each that it takes and gives back.
    let mut staging = gpu.pinned_unset(sizes.n_workers * sizes.n_buffers * sizes.buffer_bytes)?;
    let free = Mutex::new(staging.chunks_exact_mut(sizes.buffer_bytes).collect::<Vec<_>>());
    let open = || {
        let stream = Rc::new(gpu.stream()?);
        let own = {
            let mut free = free.lock().unwrap_or_else(PoisonError::into_inner);
            let n_others = free.len() - sizes.n_buffers;
            free.split_off(n_others)
        };
        own.into_iter().map(|buffer| PinnedLane::new(&stream, buffer)).collect()
    };
    copy(checkpoint, dtype, parts, sizes, open, is_shared, progress)
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    n_workers: usize,
    /// Of each worker.
    n_buffers: usize,
    buffer_bytes: usize,
}

/// A buffer, and a way from there to the card.
trait Lane {
    /// Waits until the copy is done, and gives the buffer to be filled.
    fn ready(&mut self) -> Result<&mut [u8], CudaError>;

    /// Starts to copy the start of the buffer.
    fn send(&mut self, destination: Slice) -> Result<(), CudaError>;
}

/// A pinned buffer, and the stream of its worker.
struct PinnedLane<'a> {
    stream: Rc<Stream>,
    /// Behind the copy of the buffer.
    copied: Event,
    buffer: &'a mut [u8],
}

impl<'a> PinnedLane<'a> {
    fn new(stream: &Rc<Stream>, buffer: &'a mut [u8]) -> Result<Self, CudaError> {
        Ok(Self { stream: stream.clone(), copied: Event::for_sleepers(stream.gpu())?, buffer })
    }
}

impl Lane for PinnedLane<'_> {
    fn ready(&mut self) -> Result<&mut [u8], CudaError> {
        // Sleeping and waking takes longer than a copy.
        let begun = Instant::now();
        while !self.copied.is_done()? {
            if begun.elapsed() > LOOKS_MAX {
                self.copied.synchronize()?;
                break;
            }
            (0..N_HINTS).for_each(|_| std::hint::spin_loop());
        }
        Ok(self.buffer)
    }

    fn send(&mut self, destination: Slice) -> Result<(), CudaError> {
        destination.upload(&self.stream, &self.buffer[..destination.n_bytes])?;
        self.copied.record(&self.stream)
    }
}

impl Drop for PinnedLane<'_> {
    fn drop(&mut self) {
        // The copy reads the buffer, also when something else has failed since.
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "a copy of weights");
        }
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
    is_shared: &'a (dyn Fn() -> bool + Sync),
    ranges: Vec<Range>,
    next: AtomicUsize,
    is_stopped: AtomicBool,
}

fn copy<L: Lane>(
    checkpoint: &Checkpoint,
    dtype: Dtype,
    parts: &[Part],
    sizes: Sizes,
    open: impl Fn() -> Result<Vec<L>, CudaError> + Sync,
    is_shared: &(dyn Fn() -> bool + Sync),
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), LoadError> {
    let ranges = cut(checkpoint, dtype, parts, sizes.buffer_bytes)?;
    let (next, is_stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let job = Job { checkpoint, dtype, parts, is_shared, ranges, next, is_stopped };
    let total: u64 = parts.iter().map(|part| part.destination.n_bytes as u64).sum();
    progress(0, total);
    thread::scope(|scope| {
        let (report, reports) = mpsc::sync_channel(2 * sizes.n_workers);
        let workers: Vec<_> = (0..sizes.n_workers)
            .map(|worker_idx| {
                let (job, open, report) = (&job, &open, report.clone());
                scope.spawn(move || {
                    let outcome = job.work(worker_idx, open, &report);
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
    /// Fills one buffer while the others are copied, until no range is left. Sends how many bytes have arrived.
    fn work<L: Lane>(
        &self,
        worker_idx: usize,
        open: impl Fn() -> Result<Vec<L>, CudaError>,
        report: &SyncSender<u64>,
    ) -> Result<(), LoadError> {
        let mut lanes: Vec<(L, u64)> = open()?.into_iter().map(|lane| (lane, 0)).collect();
        let n_lanes = lanes.len();
        let mut scratch = convert::Scratch::default();
        for round in 0.. {
            let mut n_used = n_lanes;
            if (self.is_shared)() {
                n_used = n_lanes.min(BESIDE_STEPS.n_buffers);
                while worker_idx >= BESIDE_STEPS.n_workers && self.is_left() && (self.is_shared)() {
                    thread::sleep(PAUSE);
                }
            }
            let (lane, sent_bytes) = &mut lanes[round % n_used];
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

impl Job<'_> {
    /// Whether there is something to do that no worker has begun.
    fn is_left(&self) -> bool {
        !self.is_stopped.load(Ordering::Relaxed) && self.next.load(Ordering::Relaxed) < self.ranges.len()
    }
}

/// Whether the thread that reports still listens; it does not when `progress` has panicked.
fn report_arrival(report: &SyncSender<u64>, n_bytes: u64) -> bool {
    n_bytes == 0 || report.send(n_bytes).is_ok()
}

#[cfg(test)]
mod speed_tests;
#[cfg(test)]
mod tests;
