//! What reading a thread's clock costs.

use std::time::Duration;

use crate::thread_time::thread_time;

/// What one reading of the clock costs.
pub(super) fn reading_time() -> Duration {
    const N_READINGS: u32 = 1000;
    let begun = thread_time();
    (0..N_READINGS).for_each(|_| {
        std::hint::black_box(thread_time());
    });
    (thread_time() - begun) / N_READINGS
}
