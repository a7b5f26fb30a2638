//! Threads that run guests, kept awake for the end of a step that answers guests.
//!
//! Behind such a step the device stands still until the guests have asked again, and most of that is sleep: a thread takes
//! some tens of microseconds to wake, and a runtime wakes one after the other. A few that are awake when the answers come
//! take all of them at once.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Threads are called so long before a step is expected to end, and for one part in so many of a shorter one, so that they
/// are mostly asleep.
const LEAD: Duration = Duration::from_micros(150);
const LEAD_PARTS: u32 = 8;

/// They stay awake for so long beyond the expected end.
const PATIENCE: Duration = Duration::from_micros(150);

/// So many of them at most, and one in so many.
const N_MAX: usize = 4;
const PARTS: usize = 4;

/// The threads that run guests, as far as the engine knows of them.
pub trait GuestThreads: Debug + Send + Sync {
    /// How many there are.
    fn n(&self) -> usize;

    /// Has one of them keep a vigil as soon as it can.
    fn keep(&self, vigil: Arc<Vigil>);
}

/// A time for which a thread stays awake.
#[derive(Debug)]
pub struct Vigil {
    is_over: AtomicBool,
    until: Instant,
}

impl Vigil {
    /// Stays awake until it is over.
    pub fn keep(&self) {
        while !self.is_over.load(Ordering::Relaxed) && Instant::now() < self.until {
            std::hint::spin_loop();
        }
    }
}

/// When the oldest step under way is expected to end, and how many guests it answers that ask again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpectedEnd {
    pub(super) begun: Instant,
    pub(super) length: Duration,
    pub(super) n_guests: usize,
}

/// Vigils, one for a step at most.
#[derive(Debug)]
pub(super) struct Vigils {
    threads: Option<Arc<dyn GuestThreads>>,
    kept: Option<Arc<Vigil>>,
}

impl Vigils {
    pub(super) fn new(threads: Option<Arc<dyn GuestThreads>>) -> Self {
        Self { threads, kept: None }
    }

    /// When a vigil for that step begins, unless there was one.
    pub(super) fn begin_at(&self, end: Option<ExpectedEnd>) -> Option<Instant> {
        let ExpectedEnd { begun, length, .. } =
            end.filter(|_| self.threads.is_some() && self.kept.is_none())?;
        Some(begun + length - LEAD.min(length / LEAD_PARTS))
    }

    pub(super) fn begin(&mut self, end: ExpectedEnd) {
        let Some(threads) = &self.threads else { return };
        let until = end.begun + end.length + PATIENCE;
        let vigil = Arc::new(Vigil { is_over: AtomicBool::new(false), until });
        for _ in 0..end.n_guests.min(N_MAX).min(threads.n() / PARTS) {
            threads.keep(vigil.clone());
        }
        self.kept = Some(vigil);
    }

    /// The step was taken in, and its guests were woken.
    pub(super) fn end(&mut self) {
        if let Some(vigil) = self.kept.take() {
            vigil.is_over.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Debug)]
    struct Threads {
        n: usize,
        called: Mutex<Vec<Arc<Vigil>>>,
    }

    impl GuestThreads for Threads {
        fn n(&self) -> usize {
            self.n
        }

        fn keep(&self, vigil: Arc<Vigil>) {
            self.called.lock().expect("no panic").push(vigil);
        }
    }

    #[test]
    fn a_few_threads_keep_one_vigil_for_a_step_and_none_is_kept_for_long() {
        for (n_threads, n_guests, n_called) in [(16, 32, 4), (16, 2, 2), (8, 32, 2), (2, 32, 0)] {
            let threads = Arc::new(Threads { n: n_threads, called: Mutex::default() });
            let mut vigils = Vigils::new(Some(threads.clone()));
            let begun = Instant::now();
            let end = ExpectedEnd { begun, length: Duration::from_millis(2), n_guests };
            assert_eq!(vigils.begin_at(Some(end)), Some(begun + Duration::from_micros(1850)));
            let short = ExpectedEnd { length: Duration::from_micros(200), ..end };
            assert_eq!(vigils.begin_at(Some(short)), Some(begun + Duration::from_micros(175)));
            assert_eq!(vigils.begin_at(None), None);
            vigils.begin(end);
            assert_eq!(vigils.begin_at(Some(end)), None);
            let called = std::mem::take(&mut *threads.called.lock().expect("no panic"));
            assert_eq!(called.len(), n_called, "{n_guests} guests on {n_threads} threads");
            assert!(called.iter().all(|vigil| !vigil.is_over.load(Ordering::Relaxed)));
            vigils.end();
            // Also one that is begun when all is over.
            called.iter().for_each(|vigil| vigil.keep());
            assert!(vigils.begin_at(Some(end)).is_some());
        }
    }
}
