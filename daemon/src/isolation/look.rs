//! What a process has of the machine, as the system tells it.

use std::thread::available_parallelism;

/// What the system keeps of a thread for itself, at least.
const THREAD_BYTES: u64 = 16 << 10;

/// Threads that a process of guests may have, and so many more for each processor: the machine has numbers for all processes'
/// together.
const N_THREADS: u64 = 512;
const N_THREADS_PER_PROCESSOR: u64 = 16;

/// What a process has at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Memory that it has to itself, in memory or swapped out, with the tables of its pages and what the system keeps of its threads.
    pub(super) used_bytes: u64,
    pub(super) n_threads: u64,
}

impl Look {
    /// Nothing where the system does not tell, as of one that has ended.
    pub(super) fn at(pid: u32) -> Option<Self> {
        Self::of_status(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
    }

    fn of_status(status: &str) -> Option<Self> {
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        // A process that is about to be gone has threads, and no memory.
        let (n_threads, anonymous_kib) = (number("Threads")?, number("RssAnon")?);
        let others_kib = ["VmPTE", "VmSwap"].map(|name| number(name).unwrap_or(0));
        let n_kib = others_kib.into_iter().fold(anonymous_kib, u64::saturating_add);
        let used_bytes = n_kib.saturating_mul(1 << 10).saturating_add(n_threads.saturating_mul(THREAD_BYTES));
        Some(Self { used_bytes, n_threads })
    }
}

/// Threads that a process of guests may have.
pub(super) fn n_threads_max() -> u64 {
    let n_processors = available_parallelism().map_or(1, |n| n.get() as u64);
    N_THREADS + N_THREADS_PER_PROCESSOR * n_processors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_a_process_has_to_itself_is_counted() {
        let status = "Name:\ta VmPTE: 9 kB\nVmRSS:\t  900 kB\nRssAnon:\t     100 kB\nVmPTE:\t      8 kB\nVmSwap:\t       4 kB\nThreads:\t2\n";
        let used_bytes = (100 + 8 + 4) * 1024 + 2 * THREAD_BYTES;
        assert_eq!(Look::of_status(status), Some(Look { used_bytes, n_threads: 2 }));
        assert_eq!(Look::of_status("Name:\ta\nThreads:\t1\n"), None);
        let own = Look::at(std::process::id()).expect("it runs");
        assert!(own.n_threads >= 1 && own.used_bytes > 1 << 20, "{own:?}");
        assert_eq!(Look::at(u32::MAX), None);
    }
}
