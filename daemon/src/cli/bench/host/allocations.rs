//! Calls of the allocator by the engine's thread, in a build with the feature `count-allocations`.
//!
//! Counting takes an allocator around the daemon's, which other builds do without.

#[cfg(feature = "count-allocations")]
mod counted {
    use std::cell::RefCell;
    use std::sync::LazyLock;

    use alloc_tracker::{Operation, Session, ThreadSpan};

    /// The name under which they are counted.
    const ENGINE: &str = "engine";

    static SESSION: LazyLock<Session> = LazyLock::new(|| Session::new().no_stdout().no_file());
    static OPERATION: LazyLock<Operation> = LazyLock::new(|| SESSION.operation(ENGINE));

    thread_local! {
        static SPAN: RefCell<Option<ThreadSpan>> = const { RefCell::new(None) };
    }

    pub(crate) fn start() {
        let span = OPERATION.measure_thread().iterations(1);
        SPAN.with_borrow_mut(|running| *running = Some(span));
    }

    pub(crate) fn stop() {
        drop(SPAN.take());
    }

    pub(crate) fn total() -> Option<u64> {
        let report = SESSION.to_report();
        let counted = report.operations().find(|(name, _)| *name == ENGINE);
        Some(counted.map_or(0, |(_, operation)| operation.total_allocations_count()))
    }
}

#[cfg(not(feature = "count-allocations"))]
mod counted {
    pub(crate) fn start() {}

    pub(crate) fn stop() {}

    pub(crate) fn total() -> Option<u64> {
        None
    }
}

/// From here on calls of the allocator by this thread are counted.
pub(super) use counted::start;
/// Up to here.
pub(super) use counted::stop;
/// Those that were counted so far; `None` in a build that does not count.
pub(super) use counted::total;
