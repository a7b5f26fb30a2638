//! Where the daemon's memory comes from.
//!
//! jemalloc gives back to the system what has not been used for a while, from a thread of its own: a daemon whose threads sleep after
//! a peak keeps nothing of it. It lays things of one size together. So what a step touches of each context lies with that of the
//! others, and not between lists that are as long as their contexts: the engine's time for 1,024 rows hardly grows with the length of
//! contexts, where with the system's allocator it misses the processor's address caches row by row.

use tikv_jemallocator::Jemalloc;

/// Where jemalloc looks for its settings before it takes any memory: a pointer to a text that ends with a zero. `_RJEM_MALLOC_CONF`
/// in the environment goes before them.
///
/// Two arenas: each keeps what its threads have had at most, and has gaps of its own, so that a daemon with many has more in memory
/// after every peak for a long time. Threads have caches of their own for what is small.
#[expect(unsafe_code, reason = "jemalloc finds it by its name")]
// SAFETY: nothing else has the name but the weak one in jemalloc that it takes the place of, which is a pointer, too.
#[unsafe(export_name = "_rjem_malloc_conf")]
#[used]
static SETTINGS: &[u8; 10] = b"narenas:2\0";

/// What is in the environment of a child whose data the system bounds: what is given back counts there no longer. It makes no threads.
pub(crate) const OF_BOUNDED_CHILDREN: [(&str, &str); 1] =
    [("_RJEM_MALLOC_CONF", "retain:false,background_thread:false")];

#[cfg(not(feature = "count-allocations"))]
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: alloc_tracker::Allocator<Jemalloc> = alloc_tracker::Allocator::new(Jemalloc);
