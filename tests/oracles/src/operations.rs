//! Operations of a process of guests that runs other code, past customs, beside honest guests: as the bytes say, made up, sent
//! again in the names of other contexts, or with some of their own bytes changed.

use trellis_engine::fuzzing::run_operations;

/// Sends operations to a scheduler with few pages, on which honest guests are too.
///
/// # Panics
/// The scheduler panics, an answer to an honest guest is not what it would be alone, an invariant of the page table does not
/// hold, something never comes to its end, or something is left of the process.
pub fn check(input: &[u8]) {
    run_operations(input);
}
