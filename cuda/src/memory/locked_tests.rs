use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cudarc::driver::sys::CUresult;

use super::*;
use crate::memory::slabs::{N_AHEAD, SLAB_BYTES};
use crate::testing::gpu;

/// Four of them are a slab.
const PAGE_BYTES: usize = SLAB_BYTES / 4;

/// What is locked, by a driver that is none: each piece once, and no more pieces than so many.
#[derive(Clone)]
struct Ledger {
    locked: Arc<Mutex<BTreeMap<usize, usize>>>,
    n_most: Arc<AtomicUsize>,
    n_unlocked: Arc<AtomicUsize>,
    /// The system takes no memory back.
    keeps: Arc<AtomicBool>,
}

impl Ledger {
    fn new(n_most: usize) -> Self {
        let n_most = Arc::new(AtomicUsize::new(n_most));
        Self { locked: Arc::default(), n_most, n_unlocked: Arc::default(), keeps: Arc::default() }
    }

    fn n(&self) -> usize {
        self.locked.lock().expect("nobody panicked").len()
    }

    fn is_locked(&self, at: *mut u8) -> bool {
        let locked = self.locked.lock().expect("nobody panicked");
        locked.range(..=at.addr()).next_back().is_some_and(|(start, n_bytes)| at.addr() < start + n_bytes)
    }
}

impl PageLock for Ledger {
    fn lock(&self, start: *mut u8, n_bytes: usize) -> Result<(), CudaError> {
        let mut locked = self.locked.lock().expect("nobody panicked");
        if locked.len() >= self.n_most.load(Ordering::Relaxed) {
            let code = Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            return Err(CudaError::Call { call: "a lock", code, reason: "there is no more".to_owned() });
        }
        assert_eq!(locked.insert(start.addr(), n_bytes), None, "it is locked already");
        Ok(())
    }

    fn unlock(&self, start: *mut u8) -> Result<(), CudaError> {
        let mut locked = self.locked.lock().expect("nobody panicked");
        locked.remove(&start.addr()).expect("it is locked");
        self.n_unlocked.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn wait(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn discard(&self, memory: &mut MmapMut) -> io::Result<()> {
        if self.keeps.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        discard(memory)
    }
}

/// Waits for the thread, which has no more to do until this holds.
fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn put(locked: &Locked<impl PageLock>, page: usize) {
    let value = page as u8 + 1;
    // SAFETY: a page is so long, and nothing else writes there.
    unsafe { std::ptr::write_bytes(locked.at(&(page..page + 1)), value, PAGE_BYTES) };
}

fn has(locked: &Locked<impl PageLock>, page: usize, value: u8) -> bool {
    let start = locked.at(&(page..page + 1)).cast_const();
    // SAFETY: a page is so long, and nothing writes there meanwhile.
    unsafe { std::slice::from_raw_parts(start, PAGE_BYTES) }.iter().all(|&byte| byte == value)
}

#[test]
fn a_start_locks_no_more_than_a_little_and_the_rest_comes_as_it_is_used() {
    let ledger = Ledger::new(usize::MAX);
    let locked = Locked::new(ledger.clone(), 80, PAGE_BYTES).expect("addresses");
    until("some are locked ahead", || ledger.n() == N_AHEAD);
    let far = locked.at(&(72..76));
    assert!(ledger.is_locked(far), "who needs a slab has it at once");
    assert_eq!(ledger.n(), N_AHEAD + 1);
    put(&locked, 0);
    until("one more is locked ahead", || ledger.n() == N_AHEAD + 2);
    drop(locked);
    assert_eq!((ledger.n(), ledger.n_unlocked.load(Ordering::Relaxed)), (0, N_AHEAD + 2));
    // One that is dropped at once ends its thread.
    drop(Locked::new(ledger.clone(), 80, PAGE_BYTES).expect("addresses"));
    assert_eq!(ledger.n(), 0);
}

#[test]
fn slabs_of_which_all_pages_are_free_go_unlocked_and_come_back_when_something_moves_there() {
    let ledger = Ledger::new(usize::MAX);
    let mut locked = Locked::new(ledger.clone(), 22, PAGE_BYTES).expect("addresses");
    for page in 0..22 {
        put(&locked, page);
    }
    assert_eq!(ledger.n(), 6);
    let free = |used: &[usize]| (0..22).filter(|page| !used.contains(page)).collect::<Vec<_>>();
    assert_eq!(locked.release(free(&[5, 21]), 1), SLAB_BYTES as u64, "a slab more or less");
    assert_eq!(locked.release(free(&[5, 21]), u64::MAX), 3 * SLAB_BYTES as u64);
    assert_eq!(locked.release(free(&[5, 21]), u64::MAX), 0, "it is gone");
    assert_eq!(ledger.n(), 2, "what is in use stays locked");
    assert!(has(&locked, 5, 6) && has(&locked, 21, 22));
    assert_eq!(locked.release(free(&[5]), u64::MAX), 2 * PAGE_BYTES as u64, "the last slab is shorter");
    assert_eq!(ledger.n(), 1, "and nothing is locked ahead while memory is short");
    assert!(has(&locked, 9, 0), "it is new memory");
    assert_eq!(ledger.n(), 2);
    put(&locked, 9);
    assert!(has(&locked, 9, 10) && has(&locked, 5, 6));
}

#[test]
fn slabs_are_locked_ahead_again_when_memory_was_not_short_for_some_time() {
    let ledger = Ledger::new(usize::MAX);
    let rest = Duration::from_millis(200);
    let mut locked = Locked::without_thread(ledger.clone(), 80, PAGE_BYTES, rest).expect("addresses").begin();
    until("some are locked ahead", || locked.memory.state().book.locked().count() == N_AHEAD);
    assert!(!locked.take_waited());
    // Long enough for the thread to wait for something to change.
    std::thread::sleep(rest);
    let begun = Instant::now();
    assert_eq!(locked.release(0..80, u64::MAX), (N_AHEAD * SLAB_BYTES) as u64);
    until("they are locked again, though nothing moves", || ledger.n() == N_AHEAD);
    assert!(begun.elapsed() >= rest);
    assert!(!locked.take_waited(), "nobody did");
    put(&locked, 79);
    assert!(locked.take_waited() && !locked.take_waited());
}

#[test]
fn a_slab_goes_where_it_is_and_one_that_does_not_go_is_ordinary_memory() {
    let ledger = Ledger::new(usize::MAX);
    let mut locked = Locked::new(ledger.clone(), 12, PAGE_BYTES).expect("addresses");
    (0..12).for_each(|page| put(&locked, page));
    let start = locked.at(&(0..1));
    assert_eq!(locked.release(0..4, u64::MAX), SLAB_BYTES as u64);
    assert!(!locked.keeps() && has(&locked, 0, 0));
    assert_eq!(locked.at(&(0..1)), start, "no other addresses are taken for it");
    ledger.keeps.store(true, Ordering::Relaxed);
    assert_eq!(locked.release(4..12, u64::MAX), 0);
    assert!(locked.keeps() && !ledger.is_locked(locked.at(&(4..5))));
    put(&locked, 4);
    assert!(has(&locked, 4, 5));
    assert_eq!(locked.release(0..0, u64::MAX), 0);
    assert!(!locked.keeps(), "nothing was to go");
    ledger.keeps.store(false, Ordering::Relaxed);
    assert_eq!(locked.release(4..12, u64::MAX), 2 * SLAB_BYTES as u64);
    assert!(!locked.keeps());
}

#[test]
fn what_lies_apart_is_moved_together_byte_for_byte_and_its_slabs_go() {
    let ledger = Ledger::new(usize::MAX);
    let mut locked = Locked::new(ledger.clone(), 16, PAGE_BYTES).expect("addresses");
    (0..16).for_each(|page| put(&locked, page));
    let used = [2, 5, 11];
    let free = |used: &[u32]| {
        (0..16).filter(|page| !used.contains(page)).map(HostPageId).collect::<Vec<HostPageId>>()
    };
    let moves = locked.gather(&free(&used), u64::MAX);
    assert_eq!(moves.len(), 2);
    let now = used.map(|page| moves.iter().find(|(from, _)| from.0 == page).map_or(page, |(_, to)| to.0));
    let released = locked.release(free(&now).into_iter().map(|page| page.0 as usize), u64::MAX);
    assert_eq!((released, ledger.n()), (3 * SLAB_BYTES as u64, 1));
    for (was, now) in used.into_iter().zip(now) {
        assert!(has(&locked, now as usize, was as u8 + 1), "what was in page {was} is in {now}");
    }
}

#[test]
fn what_the_system_does_not_lock_is_ordinary_memory_and_goes_as_well() {
    let ledger = Ledger::new(1);
    let mut locked = Locked::new(ledger.clone(), 16, PAGE_BYTES).expect("addresses");
    (0..16).for_each(|page| put(&locked, page));
    assert!((0..16).all(|page| has(&locked, page, page as u8 + 1)));
    assert_eq!(ledger.n(), 1);
    assert_eq!(locked.release(4..16, u64::MAX), 3 * SLAB_BYTES as u64);
    assert!(has(&locked, 0, 1) && has(&locked, 8, 0));
    // There is more by now.
    ledger.n_most.store(2, Ordering::Relaxed);
    assert!(ledger.is_locked(locked.at(&(12..13))));
}

#[test]
fn without_a_thread_all_is_ordinary_memory() {
    let ledger = Ledger::new(usize::MAX);
    let mut locked = Locked::without_thread(ledger.clone(), 16, PAGE_BYTES, REST).expect("addresses");
    for round in 0..2 {
        (0..8).for_each(|page| put(&locked, page));
        assert!((0..8).all(|page| has(&locked, page, page as u8 + 1)), "round {round}");
        assert_eq!(locked.release(0..16, u64::MAX), 2 * SLAB_BYTES as u64, "what was used, and no more");
    }
    assert!(!locked.take_waited() && ledger.n() == 0);
}

#[test]
fn more_than_the_machine_has_is_refused() {
    let refused = Locked::new(Ledger::new(usize::MAX), usize::MAX / PAGE_BYTES, PAGE_BYTES);
    let error = refused.err().expect("no machine has so much").to_string();
    assert!(error.contains("taking host memory"), "{error}");
}

#[test]
fn the_driver_locks_slabs_and_gives_them_back() {
    let Some(test) = gpu() else { return };
    let mut locked = Locked::new(test.gpu.clone(), 24, PAGE_BYTES).expect("addresses");
    let is_known = |at: *mut u8| {
        let mut flags = 0;
        // SAFETY: asks what the driver knows of an address, and writes one number.
        unsafe { sys::cuMemHostGetFlags(&mut flags, at.cast()) }.result().is_ok()
    };
    test.gpu.make_current().expect("the device");
    for round in 0..3 {
        (0..24).for_each(|page| put(&locked, page));
        let starts: Vec<*mut u8> = (0..24).map(|page| locked.at(&(page..page + 1))).collect();
        assert!(starts.iter().all(|&start| is_known(start)), "round {round}");
        assert_eq!(locked.release(4..20, u64::MAX), 4 * SLAB_BYTES as u64);
        for (page, &start) in starts.iter().enumerate() {
            assert_eq!(is_known(start), !(4..20).contains(&page), "page {page} of round {round}");
        }
        assert!(has(&locked, 3, 4) && has(&locked, 20, 21));
    }
}
