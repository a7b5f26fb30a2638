//! The processor time of one thread.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// What the calling thread has used of a processor since it began; waiting does not count.
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // The clock of a thread is never negative.
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
