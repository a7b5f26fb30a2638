//! Host memory that is page-locked piece by piece while it is already in use.
//!
//! Locking takes the better part of a second for a few GiB, and a start should not wait for it: a thread does it
//! from the first byte on, and a copy that needs a piece waits for that piece. Where the system does not lock as much, the
//! rest stays ordinary memory: copies of it work, but the host waits for them.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use crate::driver::{CudaError, Gpu, check};

/// What is locked at a time: some milliseconds, for which calls of the driver may have to wait.
pub(super) const PIECE_BYTES: usize = 32 << 20;

/// Pages of the host; where they are larger, this divides them.
const HOST_PAGE_BYTES: usize = 4096;

/// Pieces begin at multiples of this, so that no page of the host lies in two of them.
const ALIGNMENT: usize = 2 << 20;

/// Host memory, locked from the start as far as it has come.
#[derive(Debug)]
pub(super) struct Locked {
    memory: Arc<HostMemory>,
    thread: Option<JoinHandle<()>>,
    gpu: Gpu,
}

#[derive(Debug)]
struct HostMemory {
    start: *mut u8,
    n_bytes: usize,
    piece_bytes: usize,
    state: Mutex<LockState>,
    changed: Condvar,
    /// Where `start` points to.
    _allocation: Vec<u8>,
}

// SAFETY: `start` leads into an allocation that belongs to the value; what is written there is ordered as `Locked` says.
unsafe impl Send for HostMemory {}
// SAFETY: as above; everything else is behind a lock or never changes.
unsafe impl Sync for HostMemory {}

#[derive(Debug, Default)]
struct LockState {
    /// Pieces from the start that are locked.
    n_locked: usize,
    /// No more will be.
    is_over: bool,
    n_waiting: usize,
}

/// What became of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Locked,
    /// The owner does not need it any more.
    Ended,
}

impl HostMemory {
    fn new(n_bytes: usize, piece_bytes: usize) -> Result<Self, CudaError> {
        assert!(piece_bytes.is_multiple_of(ALIGNMENT), "{piece_bytes}");
        let mut allocation = Vec::new();
        // Addresses only: the system gives memory to pages that are touched.
        allocation.try_reserve_exact(n_bytes + ALIGNMENT).map_err(|error| CudaError::Call {
            call: "taking host memory",
            code: None,
            reason: format!("{n_bytes} bytes: {error}"),
        })?;
        let start: *mut u8 = allocation.as_mut_ptr();
        let to_alignment = start.align_offset(ALIGNMENT);
        Ok(Self {
            // SAFETY: less than ALIGNMENT further on, in an allocation that is as much longer.
            start: unsafe { start.add(to_alignment) },
            n_bytes,
            piece_bytes,
            state: Mutex::default(),
            changed: Condvar::new(),
            _allocation: allocation,
        })
    }

    fn state(&self) -> MutexGuard<'_, LockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn n_pieces(&self) -> usize {
        self.n_bytes.div_ceil(self.piece_bytes)
    }

    fn piece(&self, idx: usize) -> Range<usize> {
        idx * self.piece_bytes..self.n_bytes.min((idx + 1) * self.piece_bytes)
    }

    /// Locks piece after piece, until all are, one cannot be, or the owner ends it.
    fn lock(&self, gpu: &Gpu) {
        for idx in 0..self.n_pieces() {
            let begun = Instant::now();
            let locked = gpu.make_current().and_then(|()| self.lock_piece(idx));
            let mut state = self.state();
            match locked {
                Ok(Outcome::Locked) => state.n_locked += 1,
                Ok(Outcome::Ended) => break,
                Err(error) => {
                    let (locked_bytes, n_bytes) = (self.piece(idx).start, self.n_bytes);
                    tracing::warn!(%error, locked_bytes, n_bytes, "host memory for pages is not all page-locked");
                    break;
                }
            }
            self.changed.notify_all();
            // The driver's locks, and the memory's bandwidth, are for others as long again.
            let pause = begun.elapsed();
            drop(self.wait_while(state, pause, |state| !state.is_over && state.n_waiting == 0));
            if self.state().is_over {
                break;
            }
        }
        self.end();
    }

    fn wait_while<'a>(
        &self,
        state: MutexGuard<'a, LockState>,
        at_most: Duration,
        mut goes_on: impl FnMut(&LockState) -> bool,
    ) -> MutexGuard<'a, LockState> {
        let waited = self.changed.wait_timeout_while(state, at_most, |state| goes_on(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock_piece(&self, idx: usize) -> Result<Outcome, CudaError> {
        let Range { start, end } = self.piece(idx);
        for offset in (start..end).step_by(HOST_PAGE_BYTES) {
            if offset.is_multiple_of(ALIGNMENT) && self.state().is_over {
                return Ok(Outcome::Ended);
            }
            // SAFETY: inside of the allocation, and of a piece that was not given out yet. What is touched here does
            // not have to be made while the driver holds its locks.
            unsafe { self.start.add(offset).write_volatile(0) };
        }
        check("cuMemHostRegister", || {
            // SAFETY: the range is inside of the allocation, begins with a page of the host and is not locked yet;
            // `Locked` undoes it before the allocation goes.
            unsafe {
                sys::cuMemHostRegister_v2(
                    self.start.add(start).cast(),
                    end - start,
                    sys::CU_MEMHOSTREGISTER_PORTABLE,
                )
            }
            .result()
        })?;
        Ok(Outcome::Locked)
    }

    fn end(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }
}

impl Locked {
    /// Takes memory and begins to lock it. What is in it is undefined.
    ///
    /// # Errors
    /// There are no addresses for so much.
    pub(super) fn new(gpu: &Gpu, n_bytes: usize) -> Result<Self, CudaError> {
        let mut locked = Self::unlocked(gpu, n_bytes, PIECE_BYTES)?;
        if n_bytes == 0 {
            locked.memory.end();
            return Ok(locked);
        }
        let (memory, gpu) = (locked.memory.clone(), gpu.clone());
        let spawned =
            std::thread::Builder::new().name("page-lock".to_owned()).spawn(move || memory.lock(&gpu));
        match spawned {
            Ok(thread) => locked.thread = Some(thread),
            Err(error) => {
                tracing::warn!(%error, n_bytes, "no thread page-locks host memory");
                locked.memory.end();
            }
        }
        Ok(locked)
    }

    fn unlocked(gpu: &Gpu, n_bytes: usize, piece_bytes: usize) -> Result<Self, CudaError> {
        let memory = Arc::new(HostMemory::new(n_bytes, piece_bytes)?);
        Ok(Self { memory, thread: None, gpu: gpu.clone() })
    }

    /// Where the range begins, once each piece of it is locked or will never be: what the caller lets be read and written
    /// there, it puts in order itself.
    ///
    /// # Panics
    /// The range is not inside.
    pub(super) fn at(&self, range: &Range<usize>) -> *mut u8 {
        let memory = &*self.memory;
        assert!(range.start <= range.end && range.end <= memory.n_bytes, "{range:?} of {}", memory.n_bytes);
        let n_needed = range.end.div_ceil(memory.piece_bytes);
        let mut state = memory.state();
        if state.n_locked < n_needed && !state.is_over {
            state.n_waiting += 1;
            memory.changed.notify_all();
            let is_missing = |state: &mut LockState| state.n_locked < n_needed && !state.is_over;
            state = memory.changed.wait_while(state, is_missing).unwrap_or_else(PoisonError::into_inner);
            state.n_waiting -= 1;
        }
        drop(state);
        // SAFETY: inside of the allocation.
        unsafe { memory.start.add(range.start) }
    }

    /// Cuts a range where pieces end: the driver takes no range of which parts were locked one by one.
    pub(super) fn cut(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        cut(range, self.memory.piece_bytes)
    }
}

/// The parts of a range that lie in one piece each.
fn cut(range: Range<usize>, piece_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let n = if range.is_empty() { 0 } else { range.end.div_ceil(piece_bytes) };
    (range.start / piece_bytes..n)
        .map(move |idx| range.start.max(idx * piece_bytes)..range.end.min((idx + 1) * piece_bytes))
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.memory.end();
        if let Some(thread) = self.thread.take() {
            // It holds no lock that it could leave broken, and there is nothing to do about a panic here.
            let _ended = thread.join();
        }
        if let Err(error) = self.gpu.wait_for_streams() {
            tracing::warn!(%error, n_bytes = self.memory.n_bytes, "host memory is not given back");
            // A copy may still be under way.
            std::mem::forget(self.memory.clone());
            return;
        }
        for idx in 0..self.memory.state().n_locked {
            // SAFETY: locked by us at this place, undone once, and no copy is left.
            let undone = unsafe {
                sys::cuMemHostUnregister(self.memory.start.add(self.memory.piece(idx).start).cast())
            };
            if let Err(error) = undone.result() {
                tracing::warn!(%error, "cuMemHostUnregister");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;
    use crate::driver::faults::{self, Lasts};
    use crate::testing::gpu;

    #[test]
    fn ranges_are_cut_where_pieces_end() {
        let parts = |range| cut(range, 10).map(|part| (part.start, part.end)).collect::<Vec<_>>();
        assert_eq!(parts(3..9), [(3, 9)]);
        assert_eq!(parts(3..10), [(3, 10)]);
        assert_eq!(parts(10..20), [(10, 20)]);
        assert_eq!(parts(3..31), [(3, 10), (10, 20), (20, 30), (30, 31)]);
        assert_eq!(parts(7..7), []);
    }

    #[test]
    fn pieces_begin_with_a_page_and_cover_all() {
        let memory = HostMemory::new(5 * ALIGNMENT + 100, 2 * ALIGNMENT).expect("addresses");
        assert!(memory.start.addr().is_multiple_of(ALIGNMENT));
        let pieces: Vec<_> = (0..memory.n_pieces()).map(|idx| memory.piece(idx)).collect();
        assert_eq!(
            pieces,
            [0..2 * ALIGNMENT, 2 * ALIGNMENT..4 * ALIGNMENT, 4 * ALIGNMENT..5 * ALIGNMENT + 100]
        );
        assert_eq!(HostMemory::new(0, ALIGNMENT).expect("nothing").n_pieces(), 0);
    }

    #[test]
    fn who_needs_a_piece_waits_for_that_piece_alone() {
        let Some(test) = gpu() else { return };
        let locked = Locked::new(&test.gpu, 5 * PIECE_BYTES).expect("addresses");
        for idx in [0, 4, 2] {
            let range = locked.memory.piece(idx);
            locked.at(&range);
            assert!(locked.memory.state().n_locked > idx, "piece {idx}");
        }
        // One that is dropped at once ends its thread.
        drop(Locked::new(&test.gpu, 64 * PIECE_BYTES).expect("addresses"));
    }

    #[test]
    fn what_cannot_be_locked_is_ordinary_memory() {
        let Some(test) = gpu() else { return };
        let piece_bytes = ALIGNMENT;
        let locked = Locked::unlocked(&test.gpu, 4 * piece_bytes, piece_bytes).expect("addresses");
        // Two pieces, each with the context made current before it.
        faults::inject(5, CUresult::CUDA_ERROR_OUT_OF_MEMORY, Lasts::Once);
        locked.memory.lock(&test.gpu);
        faults::clear();
        let (n_locked, is_over) = {
            let state = locked.memory.state();
            (state.n_locked, state.is_over)
        };
        assert_eq!((n_locked, is_over), (2, true));
        locked.at(&(0..4 * piece_bytes));
    }
}
