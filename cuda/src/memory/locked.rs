//! Host memory that is page-locked slab by slab, as it comes to be used, and goes back to the system where memory is short and
//! nothing is in there.
//!
//! Locking takes some milliseconds for each slab, and a start should not wait for it, nor memory be locked that nothing is ever
//! put into: a thread locks some slabs ahead of what is used, and a copy that needs one that it has not come to waits for that slab.
//! When some had to go, it locks none ahead for a minute.
//! Where the system does not lock as much, the rest is ordinary memory: copies of it work, but the host waits for them.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use memmap2::{MmapMut, UncheckedAdvice};
use trellis_engine::batch::HostPageId;

use super::slabs::{Book, Kind, Layout, REST};
use crate::driver::{CudaError, Gpu, check};

/// Pages of the host; where they are larger, this divides them.
const HOST_PAGE_BYTES: usize = 4096;

/// Locks memory of the host, so that a device copies it by itself.
pub(super) trait PageLock: Send + Sync + 'static {
    /// Locks memory that begins with a page of the host and is not locked.
    fn lock(&self, start: *mut u8, n_bytes: usize) -> Result<(), CudaError>;

    /// Undoes it. No copy is left.
    fn unlock(&self, start: *mut u8) -> Result<(), CudaError>;

    /// Waits for all copies that there may be.
    fn wait(&self) -> Result<(), CudaError>;

    /// Gives memory that is not locked, and in which nothing is that is wanted, back to the system. The addresses stay: others may
    /// not be to be had where memory is short.
    fn discard(&self, memory: &mut MmapMut) -> io::Result<()> {
        discard(memory)
    }
}

fn discard(memory: &mut MmapMut) -> io::Result<()> {
    // SAFETY: nobody else has a reference to what is in there, and pages that are touched later are zeroes.
    unsafe { memory.unchecked_advise(UncheckedAdvice::DontNeed) }
}

impl PageLock for Gpu {
    fn lock(&self, start: *mut u8, n_bytes: usize) -> Result<(), CudaError> {
        self.make_current()?;
        // SAFETY: a mapping of whole pages, which `Memory` unlocks before it goes.
        check("cuMemHostRegister", || unsafe {
            sys::cuMemHostRegister_v2(start.cast(), n_bytes, sys::CU_MEMHOSTREGISTER_PORTABLE).result()
        })
    }

    fn unlock(&self, start: *mut u8) -> Result<(), CudaError> {
        self.make_current()?;
        // SAFETY: locked by us at this place, undone once, and no copy is left.
        check("cuMemHostUnregister", || unsafe { sys::cuMemHostUnregister(start.cast()).result() })
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.wait_for_streams()
    }
}

/// Pages of host memory, of which slabs have memory and are locked.
#[derive(Debug)]
pub(super) struct Locked<L: PageLock = Gpu> {
    memory: Arc<Memory<L>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Memory<L> {
    locks: L,
    layout: Layout,
    /// How long none is locked ahead after some had to go.
    rest: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    book: Book,
    slabs: Vec<MmapMut>, // [n_slabs], each of its pages
    /// Nothing more is locked.
    is_over: bool,
    /// It was said that the system does not lock as much.
    has_warned: bool,
    /// A copy had to wait for its slab.
    has_waited: bool,
    /// A slab stayed when it was to go back last.
    keeps: bool,
}

impl State {
    fn start(&mut self, slab: usize) -> *mut u8 {
        self.slabs[slab].as_mut_ptr()
    }
}

impl<L: PageLock> Memory<L> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks what is to be locked, until the owner ends it.
    fn serve(&self) {
        let mut state = self.state();
        while !state.is_over {
            let now = Instant::now();
            let Some(slab) = state.book.next(now) else {
                state = match state.book.rests_until() {
                    Some(until) => self.wait_at_most(state, until.saturating_duration_since(now)),
                    None => self.wait(state),
                };
                continue;
            };
            let (start, n_bytes) = (state.start(slab), self.layout.slab_bytes(slab));
            drop(state);
            let begun = Instant::now();
            let locked = touch_and_lock(&self.locks, start, n_bytes);
            state = self.state();
            if let Err(error) = &locked
                && !std::mem::replace(&mut state.has_warned, true)
            {
                tracing::warn!(%error, n_bytes, "host memory for pages is not all page-locked");
            }
            state.book.note_came(slab, if locked.is_ok() { Kind::Locked } else { Kind::Ordinary });
            self.changed.notify_all();
            // The driver's locks, and the memory's bandwidth, are for others as long again.
            state = self.pause(state, begun.elapsed());
        }
    }

    fn wait_at_most<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    fn pause<'a>(&self, state: MutexGuard<'a, State>, at_most: Duration) -> MutexGuard<'a, State> {
        let goes_on = |state: &mut State| !state.is_over && !state.book.is_wanted();
        let waited = self.changed.wait_timeout_while(state, at_most, goes_on);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A page, as a run of one.
pub(super) fn one(page: HostPageId) -> Range<usize> {
    page.0 as usize..page.0 as usize + 1
}

/// What is touched here does not have to be made while the driver holds its locks.
fn touch_and_lock(locks: &impl PageLock, start: *mut u8, n_bytes: usize) -> Result<(), CudaError> {
    for offset in (0..n_bytes).step_by(HOST_PAGE_BYTES) {
        // SAFETY: inside of the slab, which nobody else uses or takes away while it comes.
        unsafe { start.add(offset).write_volatile(0) };
    }
    locks.lock(start, n_bytes)
}

/// Addresses only: the system gives memory to pages that are touched, and gets it back when this is dropped.
fn map(n_bytes: usize) -> Result<MmapMut, CudaError> {
    MmapMut::map_anon(n_bytes).map_err(|error| CudaError::Call {
        call: "taking host memory",
        code: None,
        reason: format!("{n_bytes} bytes: {error}"),
    })
}

impl<L: PageLock> Locked<L> {
    /// Takes addresses for so many pages, and begins to lock the first. What is in them is undefined.
    ///
    /// # Errors
    /// There are no addresses for so much, or the machine has less memory.
    pub(super) fn new(locks: L, n_pages: usize, page_bytes: usize) -> Result<Self, CudaError> {
        Ok(Self::without_thread(locks, n_pages, page_bytes, REST)?.begin())
    }

    fn without_thread(
        locks: L,
        n_pages: usize,
        page_bytes: usize,
        rest: Duration,
    ) -> Result<Self, CudaError> {
        let layout = Layout::new(n_pages, page_bytes);
        // Slab by slab the system would grant more than the machine has.
        drop(map(n_pages.saturating_mul(page_bytes))?);
        let slabs =
            (0..layout.n_slabs()).map(|slab| map(layout.slab_bytes(slab))).collect::<Result<_, _>>()?;
        let state = State {
            book: Book::new(layout),
            slabs,
            is_over: false,
            has_warned: false,
            has_waited: false,
            keeps: false,
        };
        let memory =
            Arc::new(Memory { locks, layout, rest, state: Mutex::new(state), changed: Condvar::new() });
        Ok(Self { memory, thread: None })
    }

    /// Begins to lock. Where there is no thread for it, all is ordinary memory.
    fn begin(mut self) -> Self {
        if self.memory.layout.n_slabs() > 0 {
            let memory = self.memory.clone();
            let spawned = thread::Builder::new().name("page-lock".to_owned()).spawn(move || memory.serve());
            self.thread = spawned
                .inspect_err(|error| tracing::warn!(%error, "host memory for pages is not page-locked"))
                .ok();
        }
        self
    }

    /// Where these pages begin, which lie in one slab, once that has its memory: what the caller lets be read and written
    /// there, it puts in order itself.
    ///
    /// # Panics
    /// They are not there, or not in one slab.
    pub(super) fn at(&self, pages: &Range<usize>) -> *mut u8 {
        let memory = &*self.memory;
        let (slab, offset) = memory.layout.place(pages);
        let mut state = memory.state();
        while !state.book.ask(slab) {
            if self.thread.is_none() {
                state.book.note_came(slab, Kind::Ordinary);
                continue;
            }
            state.has_waited = true;
            memory.changed.notify_all();
            state = memory.wait(state);
        }
        // One less is there in which nothing is.
        memory.changed.notify_all();
        // SAFETY: inside of the slab.
        unsafe { state.start(slab).add(offset) }
    }

    /// Whether a copy had to wait for its slab since this was asked last.
    pub(super) fn take_waited(&self) -> bool {
        std::mem::take(&mut self.memory.state().has_waited)
    }

    /// Cuts a run of pages where slabs end.
    pub(super) fn cut(&self, pages: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<L> {
        self.memory.layout.cut(pages)
    }

    /// Moves what is in pages that are not free to some that are, so that more slabs can go back, of so many bytes, of the last perhaps
    /// more. Returns from where to where. No copy is under way: the caller has waited for them.
    pub(super) fn gather(&mut self, free: &[HostPageId], at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        let Memory { layout, state, .. } = &*self.memory;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let moves = state.book.gather(free, at_most);
        for &(from, to) in &moves {
            let [from, to] = [from, to].map(|page| layout.place(&one(page)));
            let slabs = state.slabs.get_disjoint_mut([from.0, to.0]);
            let [source, target] = slabs.expect("pages move to other slabs");
            let page = |start: usize| start..start + layout.page_bytes();
            target[page(to.1)].copy_from_slice(&source[page(from.1)]);
        }
        moves
    }

    /// Whether a slab that could have gone back stayed when some were to go last.
    pub(super) fn keeps(&self) -> bool {
        self.memory.state().keeps
    }

    /// Gives the memory of slabs of which all pages are among those that are free back to the system, until that are so many bytes,
    /// of the last slab perhaps more. Returns how many. No copy of pages that are free is under way: the caller has waited for them.
    pub(super) fn release(&mut self, free: impl IntoIterator<Item = usize>, at_most: u64) -> u64 {
        let Memory { locks, layout, rest, .. } = &*self.memory;
        let mut state = self.memory.state();
        state.keeps = false;
        let mut n_freed = 0;
        for (slab, kind) in state.book.releasable(free, at_most, Instant::now() + *rest) {
            if kind == Kind::Locked
                && let Err(error) = locks.unlock(state.start(slab))
            {
                tracing::warn!(%error, "page-locked host memory is not given back");
                state.keeps = true;
                continue;
            }
            if let Err(error) = locks.discard(&mut state.slabs[slab]) {
                tracing::warn!(%error, "host memory is not given back");
                state.keeps = true;
                state.book.note_unlocked(slab);
                continue;
            }
            state.book.note_went(slab);
            n_freed += layout.slab_bytes(slab) as u64;
        }
        // The thread that locks ahead may wait for nothing else: from now on it looks at the clock.
        self.memory.changed.notify_all();
        n_freed
    }
}

impl<L: PageLock> Drop for Locked<L> {
    fn drop(&mut self) {
        self.memory.state().is_over = true;
        self.memory.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It holds no lock that it could leave broken, and there is nothing to do about a panic here.
            let _ended = thread.join();
        }
        if let Err(error) = self.memory.locks.wait() {
            tracing::warn!(%error, "host memory is not given back");
            // A copy may still be under way.
            std::mem::forget(self.memory.clone());
            return;
        }
        let mut state = self.memory.state();
        let locked: Vec<usize> = state.book.locked().collect();
        for slab in locked {
            if let Err(error) = self.memory.locks.unlock(state.start(slab)) {
                tracing::warn!(%error, "page-locked host memory is not given back");
            }
        }
    }
}

#[cfg(test)]
#[path = "locked_tests.rs"]
mod tests;
