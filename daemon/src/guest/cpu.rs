//! The processor time of a guest.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::thread_time::thread_time;

/// Counts the time that processors spend on one guest, on whatever threads: its own code, and what the host does for it.
/// Neither waiting nor the work of others on the machine counts.
#[derive(Debug, Default)]
pub(crate) struct CpuClock {
    used_ns: AtomicU64,
    n_spans: AtomicUsize,
}

thread_local! {
    /// Up to where the time of this thread is counted, while it works for a guest.
    static COUNTED: Cell<Option<Duration>> = const { Cell::new(None) };
}

impl CpuClock {
    /// The time used, without what is not counted yet of work in progress: at most a few milliseconds.
    pub(crate) fn used(&self) -> Duration {
        Duration::from_nanos(self.used_ns.load(Ordering::Relaxed))
    }

    /// The time used, with all that this thread has done, if it works for the guest.
    pub(crate) fn used_now(&self) -> Duration {
        if let Some(counted) = COUNTED.get() {
            self.count(counted);
        }
        self.used()
    }

    /// Whether the guest computes at this moment.
    pub(crate) fn is_running(&self) -> bool {
        self.n_spans.load(Ordering::Relaxed) > 0
    }

    /// Counts what this thread does from here on. A thread works for one guest at a time.
    pub(crate) fn begin(&self) -> Span<'_> {
        self.n_spans.fetch_add(1, Ordering::Relaxed);
        let begun = thread_time();
        COUNTED.set(Some(begun));
        Span { clock: self, begun }
    }

    /// Counts what another process has used for the guest.
    pub(crate) fn add(&self, time: Duration) {
        self.used_ns.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn count(&self, counted: Duration) -> Duration {
        let now = thread_time();
        COUNTED.set(Some(now));
        let n_ns = u64::try_from(now.saturating_sub(counted).as_nanos()).unwrap_or(u64::MAX);
        self.used_ns.fetch_add(n_ns, Ordering::Relaxed);
        now
    }
}

/// Work of one thread for a guest; ends when dropped, by a panic too.
#[derive(Debug)]
pub(crate) struct Span<'a> {
    clock: &'a CpuClock,
    begun: Duration,
}

impl Span<'_> {
    /// Processor time of this work so far.
    pub(crate) fn elapsed(&self) -> Duration {
        COUNTED.get().map_or(Duration::ZERO, |counted| self.clock.count(counted).saturating_sub(self.begun))
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        if let Some(counted) = COUNTED.get() {
            self.clock.count(counted);
        }
        COUNTED.set(None);
        self.clock.n_spans.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn measure(clock: &CpuClock, work: impl FnOnce()) {
        let _span = clock.begin();
        work();
    }

    /// Computes for so long.
    fn compute(time: Duration) {
        let begun = thread_time();
        while thread_time() - begun < time {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn what_is_computed_counts_and_what_is_waited_does_not() {
        let clock = CpuClock::default();
        measure(&clock, || std::thread::sleep(Duration::from_millis(40)));
        assert!(clock.used() < Duration::from_millis(20), "{:?}", clock.used());
        let before = clock.used();
        let span = clock.begin();
        compute(Duration::from_millis(30));
        assert!(clock.is_running() && clock.used() == before);
        assert!(clock.used_now() >= before + Duration::from_millis(30));
        compute(Duration::from_millis(10));
        assert!(span.elapsed() >= Duration::from_millis(40));
        drop(span);
        assert!(!clock.is_running());
        let used = clock.used();
        assert!(used >= before + Duration::from_millis(40));
        compute(Duration::from_millis(10));
        assert_eq!((clock.used_now(), clock.used()), (used, used), "outside a span nothing counts");
    }

    #[test]
    fn the_work_of_others_on_the_machine_does_not_count() {
        let n_threads = 4 * std::thread::available_parallelism().map_or(1, usize::from);
        let (clock, begun) = (CpuClock::default(), Instant::now());
        std::thread::scope(|scope| {
            for _ in 0..n_threads {
                scope.spawn(|| compute(Duration::from_millis(60)));
            }
            measure(&clock, || compute(Duration::from_millis(60)));
        });
        let used = clock.used();
        assert!(used >= Duration::from_millis(60) && used < Duration::from_millis(90), "{used:?}");
        assert!(begun.elapsed() > used);
    }

    #[test]
    fn threads_of_one_guest_are_summed() {
        let clock = CpuClock::default();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| measure(&clock, || compute(Duration::from_millis(20))));
            }
        });
        assert!(clock.used() >= Duration::from_millis(40), "{:?}", clock.used());
        let before = clock.used();
        clock.add(Duration::from_millis(3));
        assert_eq!(clock.used(), before + Duration::from_millis(3));
    }
}
