//! The processor time of one thread, and of all.

use std::time::Duration;

use nix::time::ClockId as AnyClock;
use rustix::thread::gettid;
use rustix::time::{ClockId, clock_gettime};

/// What the calling thread has used of a processor since it began; waiting does not count.
pub(crate) fn thread_time() -> Duration {
    used(ClockId::ThreadCPUTime)
}

/// What all threads of this process have used.
pub(crate) fn process_time() -> Duration {
    used(ClockId::ProcessCPUTime)
}

fn used(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    // Such a clock is never negative.
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The processor time of a thread, for others to look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadClock(AnyClock);

/// As `CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED` of the kernel, which has the number of a thread, inverted, before these bits.
const OF_THREAD: i32 = 0b110;

impl ThreadClock {
    /// That of the calling thread.
    pub(crate) fn own() -> Self {
        Self(AnyClock::from_raw((!gettid().as_raw_nonzero().get() << 3) | OF_THREAD))
    }

    /// As [`thread_time`], of that thread; `None` when it has ended.
    pub(crate) fn used(self) -> Option<Duration> {
        self.0.now().ok().map(Duration::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_see_what_a_thread_has_used() {
        let (tell, told) = std::sync::mpsc::channel();
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            while thread_time() < Duration::from_millis(20) {
                std::hint::spin_loop();
            }
            tell.send((ThreadClock::own(), thread_time())).expect("it is waited for");
            gone.recv().expect("it is told");
        });
        let (clock, used) = told.recv().expect("it computes");
        let seen = clock.used().expect("it lives");
        assert!(seen >= used && seen < used + Duration::from_millis(15), "{seen:?} of {used:?}");
        go.send(()).expect("it waits");
        thread.join().expect("it ends");
        // The system may still be about to forget it.
        let begun = std::time::Instant::now();
        while clock.used().is_some() && begun.elapsed() < Duration::from_secs(10) {
            std::thread::yield_now();
        }
        assert_eq!(clock.used(), None);
    }
}
