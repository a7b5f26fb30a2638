//! The pool over a driver that is a number line.

use std::collections::BTreeMap;

use super::*;
use crate::testing::Random;

/// Hands out adjacent blocks, so that ranges of two blocks touch; never the same addresses twice.
#[derive(Debug)]
struct NumberLine {
    limit_bytes: usize,
    next: u64,
    blocks: BTreeMap<u64, usize>,
    n_calls: u64,
}

impl NumberLine {
    fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, next: 1 << 32, blocks: BTreeMap::new(), n_calls: 0 }
    }

    fn taken_bytes(&self) -> usize {
        self.blocks.values().sum()
    }
}

impl Driver for NumberLine {
    fn allocate(&mut self, n_bytes: usize) -> Result<Option<u64>, CudaError> {
        if self.taken_bytes().saturating_add(n_bytes) > self.limit_bytes {
            return Ok(None);
        }
        self.n_calls += 1;
        let address = self.next;
        self.next += n_bytes as u64;
        self.blocks.insert(address, n_bytes);
        Ok(Some(address))
    }

    fn free(&mut self, address: u64) {
        self.blocks.remove(&address).expect("a block that was handed out");
    }
}

fn pool(limit_bytes: usize) -> Pool<NumberLine> {
    Pool::new(NumberLine::new(limit_bytes), Caching::On)
}

fn take(pool: &mut Pool<NumberLine>, n_bytes: usize) -> Slice {
    pool.allocate(n_bytes).expect("no failure").expect("there is enough")
}

/// What is handed out, by address.
type Live = BTreeMap<u64, Slice>;

fn check(pool: &Pool<NumberLine>, live: &Live, peak_bytes: usize, n_allocations: u64) {
    let mut end = 0;
    for slice in live.values() {
        assert!(slice.address >= end, "{slice:?} overlaps the range before, which ends at {end:#x}");
        end = slice.address + slice.n_bytes as u64;
        let (block, n_bytes) = pool.driver.blocks.range(..=slice.address).next_back().expect("a block");
        assert!(end <= block + *n_bytes as u64, "{slice:?} leaves the block at {block:#x}");
    }
    let expected = MemoryStats {
        in_use_bytes: live.values().map(|slice| slice.n_bytes).sum(),
        reserved_bytes: pool.driver.taken_bytes(),
        peak_in_use_bytes: peak_bytes,
        n_driver_allocations: pool.driver.n_calls,
        n_allocations,
    };
    assert_eq!(pool.stats(), expected);
    // Free ranges and those handed out fill the blocks.
    let free: usize = pool.small.by_address.values().sum();
    let idle: usize = pool.large.iter().map(|(n_bytes, _)| n_bytes).sum();
    assert_eq!(expected.in_use_bytes + free + idle, expected.reserved_bytes);
    assert_eq!(pool.small.by_address.len(), pool.small.by_length.len());
}

#[test]
fn the_longest_go_first_and_no_more_than_have_to() {
    const MIB: usize = 1 << 20;
    let mut pool = pool(usize::MAX);
    let taken = [8, 2, 30, 16].map(|n_mib| take(&mut pool, n_mib * MIB));
    let small = take(&mut pool, 1000);
    taken.into_iter().chain([small]).for_each(|slice| pool.release(slice));
    let left = |pool: &Pool<NumberLine>| {
        let mut left: Vec<usize> = pool.driver.blocks.values().map(|n_bytes| n_bytes / MIB).collect();
        left.sort_unstable();
        left
    };
    pool.trim_to(58 * MIB);
    assert_eq!(left(&pool), [2, 2, 8, 16, 30]);
    pool.trim_to(27 * MIB);
    assert_eq!(left(&pool), [2, 2, 8]);
    pool.trim_to(2 * MIB);
    assert_eq!(left(&pool), [2]);
    assert_eq!((pool.idle_bytes(), pool.stats().reserved_bytes), (2 * MIB, 2 * MIB));
}

#[test]
fn random_requests_never_overlap_and_all_comes_back() {
    const MIB: usize = 1 << 20;
    for (seed, limit_bytes) in [(1, usize::MAX), (2, 64 * MIB), (3, 300 * MIB)] {
        let mut random = Random(seed);
        let mut pool = pool(limit_bytes);
        let (mut live, mut peak_bytes, mut n_allocations, mut n_refused) = (Live::new(), 0, 0, 0);
        for step in 0..20_000 {
            // The number of buffers goes up and down.
            let is_growing = (step / 500) % 2 == 0;
            if random.below(10) < if is_growing { 7 } else { 3 } {
                let n_bytes = match random.below(8) {
                    0 => random.below(2),
                    1..5 => random.below(8 << 10),
                    5 => random.below(MIB + 1),
                    6 => MIB + random.below(2),
                    _ => MIB + random.below(20 * MIB),
                };
                match pool.allocate(n_bytes).expect("no failure") {
                    Some(slice) => {
                        assert!(slice.address.is_multiple_of(ALIGNMENT as u64), "{slice:?}");
                        assert!(slice.n_bytes >= n_bytes, "{slice:?} for {n_bytes}");
                        let bound =
                            (n_bytes.max(1) + ALIGNMENT).max(n_bytes.next_multiple_of(GRANULE_BYTES) * 9 / 8);
                        assert!(slice.n_bytes <= bound, "{slice:?} for {n_bytes}");
                        assert!(live.insert(slice.address, slice).is_none(), "{slice:?} twice");
                        n_allocations += 1;
                        let in_use: usize = live.values().map(|slice| slice.n_bytes).sum();
                        peak_bytes = peak_bytes.max(in_use);
                    }
                    None => {
                        n_refused += 1;
                        assert!(limit_bytes < usize::MAX);
                        assert_eq!(pool.idle_bytes(), 0, "the cache was given up first");
                    }
                }
            } else if !live.is_empty() {
                let address = *live.keys().nth(random.below(live.len())).expect("one of them");
                pool.release(live.remove(&address).expect("it is there"));
            }
            if random.below(1000) == 0 {
                let idle_bytes = pool.idle_bytes();
                let before = pool.driver.taken_bytes();
                pool.trim();
                assert_eq!(pool.driver.taken_bytes(), before - idle_bytes);
                assert_eq!(pool.idle_bytes(), 0);
            }
            if step % 64 == 0 {
                check(&pool, &live, peak_bytes, n_allocations);
            }
        }
        assert_eq!(n_refused > 0, limit_bytes < usize::MAX, "{n_refused} refused of {limit_bytes} bytes");
        for slice in std::mem::take(&mut live).into_values() {
            pool.release(slice);
        }
        check(&pool, &live, peak_bytes, n_allocations);
        assert_eq!(pool.idle_bytes(), pool.driver.taken_bytes());
        pool.trim();
        check(&pool, &live, peak_bytes, n_allocations);
        assert!(pool.driver.blocks.is_empty());
    }
}

#[test]
fn a_steady_state_does_not_ask_the_driver() {
    let mut pool = pool(usize::MAX);
    let lengths = [0, 1, 700, 5 << 10, 1 << 20, (1 << 20) + 1, 30 << 20];
    let mut n_calls = 0;
    for round in 0..10 {
        let slices = lengths.map(|n_bytes| take(&mut pool, n_bytes));
        slices.into_iter().rev().for_each(|slice| pool.release(slice));
        if round > 0 {
            assert_eq!(pool.driver.n_calls, n_calls);
        }
        n_calls = pool.driver.n_calls;
    }
    assert_eq!(pool.stats().in_use_bytes, 0);
}

#[test]
fn a_kept_block_is_not_wasted_on_a_shorter_request() {
    let mut pool = pool(usize::MAX);
    let long = take(&mut pool, 160 << 20);
    pool.release(long);
    let short = take(&mut pool, 100 << 20);
    assert_ne!(short.address, long.address);
    // 144 + 144 / 8 = 162 MiB.
    let near = take(&mut pool, 144 << 20);
    assert_eq!(near, long);
}

#[test]
fn the_best_fit_of_kept_blocks_is_taken() {
    let mut pool = pool(usize::MAX);
    let blocks = [110, 102, 106].map(|mib| take(&mut pool, mib << 20));
    blocks.into_iter().for_each(|slice| pool.release(slice));
    assert_eq!(take(&mut pool, 100 << 20), blocks[1]);
    assert_eq!(take(&mut pool, 100 << 20), blocks[2]);
}

#[test]
fn what_is_kept_is_given_up_before_a_request_fails() {
    let mut pool = pool(100 << 20);
    let (first, small) = (take(&mut pool, 60 << 20), take(&mut pool, 1000));
    pool.release(first);
    // 38 MiB are free at the driver, 60 are kept, and 98 are needed.
    let second = take(&mut pool, 98 << 20);
    assert_eq!(pool.driver.taken_bytes(), 100 << 20);
    assert_eq!(pool.allocate(2 << 20).expect("no failure"), None);
    // What is left of the small block still serves.
    let other = take(&mut pool, 1 << 20);
    for slice in [second, small, other] {
        pool.release(slice);
    }
    pool.trim();
    assert_eq!(pool.stats().reserved_bytes, 0);
}

#[test]
fn requests_beyond_all_memory_are_refused() {
    let mut pool = pool(1 << 40);
    for n_bytes in [usize::MAX, usize::MAX - GRANULE_BYTES, 1 << 41] {
        assert_eq!(pool.allocate(n_bytes).expect("no failure"), None);
    }
    assert_eq!(pool.stats(), MemoryStats::default());
}

#[test]
fn without_caching_lengths_are_exact() {
    let mut pool = Pool::new(NumberLine::new(usize::MAX), Caching::Off);
    for n_bytes in [1, 100, 3 << 20] {
        let slice = take(&mut pool, n_bytes);
        assert_eq!(slice.n_bytes, n_bytes);
        pool.release(slice);
        assert!(pool.driver.blocks.is_empty());
    }
    assert_eq!(pool.stats().n_driver_allocations, 3);
}
