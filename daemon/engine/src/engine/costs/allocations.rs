//! Calls of the allocator, for tests.

use alloc_tracker::{Allocator, Session};

#[global_allocator]
static ALLOCATOR: Allocator<std::alloc::System> = Allocator::system();

/// How often this thread asks the allocator for memory, new or more, while it does something. Giving memory back is not
/// counted.
pub(super) fn count(act: impl FnOnce()) -> u64 {
    let session = Session::new().no_stdout().no_file();
    let operation = session.operation("counted");
    let span = operation.measure_thread().iterations(1);
    act();
    drop(span);
    session.to_report().operations().map(|(_, counted)| counted.total_allocations_count()).sum()
}

#[test]
fn every_call_is_counted() {
    let mut list = Vec::new();
    assert_eq!(count(|| ()), 0);
    assert_eq!(count(|| list.push(1)), 1);
    assert_eq!(count(|| list.reserve_exact(100)), 1, "more memory counts as well");
    assert_eq!(count(|| list.push(2)), 0);
    assert_eq!(count(|| list = Vec::new()), 0);
    assert!(list.is_empty());
}
