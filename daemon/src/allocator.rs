//! Where the daemon's memory comes from.
//!
//! mimalloc lays things of one size together. So what a step touches of each context lies with that of the others, and
//! not between lists that are as long as their contexts: the engine's time for 1,024 rows hardly grows with the length of
//! contexts, where with the system's allocator it misses the processor's address caches row by row.

use mimalloc::MiMalloc;

/// What is in the environment of a child whose data the system bounds. The allocator asks the system for each of its segments: of a
/// gibibyte that it takes ahead, what it had taken before the limit was set would be beyond that limit.
pub(crate) const OF_BOUNDED_CHILDREN: [(&str, &str); 2] =
    [("MIMALLOC_ARENA_EAGER_COMMIT", "0"), ("MIMALLOC_EAGER_COMMIT", "0")];

#[cfg(not(feature = "count-allocations"))]
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: alloc_tracker::Allocator<MiMalloc> = alloc_tracker::Allocator::new(MiMalloc);
