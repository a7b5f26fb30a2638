//! Where the daemon's memory comes from.
//!
//! jemalloc gives back to the system what has not been used for a while, from a thread of its own: a daemon whose threads sleep after
//! a peak keeps nothing of it. It lays things of one size together. So what a step touches of each context lies with that of the
//! others, and not between lists that are as long as their contexts: the engine's time for 1,024 rows hardly grows with the length of
//! contexts, where with the system's allocator it misses the processor's address caches row by row.

use tikv_jemallocator::Jemalloc;

/// What is in the environment of a child whose data the system bounds: what is given back counts there no longer. It makes no threads.
pub(crate) const OF_BOUNDED_CHILDREN: [(&str, &str); 1] =
    [("_RJEM_MALLOC_CONF", "retain:false,background_thread:false")];

#[cfg(not(feature = "count-allocations"))]
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: alloc_tracker::Allocator<Jemalloc> = alloc_tracker::Allocator::new(Jemalloc);
