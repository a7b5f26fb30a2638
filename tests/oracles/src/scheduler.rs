//! Operations on contexts, against a model without pages, batches or run-ahead. The model is that of the scheduler's own tests,
//! with choices that bytes make.

use trellis_engine::fuzzing::run_scheduler;

/// Creates contexts, appends, truncates, evicts, forks, asks, streams, searches and mixes as the bytes say, with few pages.
///
/// # Panics
/// An answer is not the model's, an invariant of the page table does not hold, or something never comes to its end.
pub fn check(input: &[u8]) {
    run_scheduler(input);
}
