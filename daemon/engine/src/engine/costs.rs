//! What the host costs, over a device that computes nothing: a whole step of the engine's thread, and a fork on both
//! sides. Times are printed, not asserted: the machine decides them.
//!
//! ```text
//! cargo test --release -p trellis-engine --lib -- --ignored --nocapture engine::costs
//! ```
//!
//! Engine and guests take turns on one thread. What is measured of a step is all that the engine's thread does in it: the
//! commands that guests have sent, taking in the outputs of the step before, giving them to the guests' lines, waking
//! them, the plan of the next step, and what the device is told. What the wakers do is not in it, since they only note
//! that they were called; nor what the device does, nor the guests.

mod allocations;
pub(super) mod device;
mod house;
mod threads;

use std::time::{Duration, Instant};

use self::house::{Ends, House};

const N_STEPS: usize = 400;
const N_FORKS: usize = 101;

fn median(mut of: Vec<Duration>) -> f64 {
    of.sort_unstable();
    of[of.len() / 2].as_secs_f64() * 1e6
}

#[test]
#[ignore = "prints times, which mean something on a quiet machine alone"]
fn of_steps() {
    for n_under_way in [1, 2] {
        for (n_rows, n_tokens) in
            [(1, 1_000), (32, 1_000), (256, 1_000), (1024, 1_000), (32, 100_000), (256, 100_000)]
        {
            let mut house = House::new(n_rows, n_rows * (n_tokens + 1_000), n_under_way);
            for idx in 0..n_rows {
                let context = house.context(idx, n_tokens + idx % 16);
                house.pull(context, None);
            }
            house.warm_up(40);
            let times: Vec<Duration> = (0..N_STEPS).map(|_| house.step().time).collect();
            println!("{n_under_way} under way, {n_rows} rows of {n_tokens}: {:.1} µs a step", median(times));
        }
    }
}

/// In the measured region is all that [`House::step`] times: commands, taking in, giving back, waking, plan, submission.
/// Not in it are the guests, what the device's own calls allocate (its lists of outputs are laid out before), and what
/// lets go of memory. A first round of all runs goes before, in which lists grow to what they need.
#[test]
fn a_steady_state_asks_for_no_memory() {
    const N_ROWS: usize = 48;
    for n_under_way in [1, 2] {
        let mut house = House::new(N_ROWS, N_ROWS * 4_000, n_under_way);
        for idx in 0..N_ROWS {
            let context = house.context(idx, 500 + 20 * idx);
            // In each step some runs end, some begin, some contexts cross into a new page and some go back to where they
            // were.
            let ends = Ends { n_tokens: 24, n_runs: 4, n_first: 1 + idx % 24 };
            house.pull(context, Some(ends));
        }
        house.warm_up(300);
        let n_allocations: Vec<u64> = (0..1_000).map(|_| house.step().n_allocations).collect();
        assert!(n_allocations.iter().all(|&n| n == 0), "{n_under_way} under way: {n_allocations:?}");
    }
}

/// As above, of contexts that grow all the time: there is memory for the tokens of all pages, and lists have room for 4,096
/// tokens. A longer context asks for memory when it has become twice as long.
#[test]
fn contexts_that_grow_ask_for_no_memory() {
    const N_ROWS: usize = 48;
    let mut house = House::new(N_ROWS, N_ROWS * 4_000, 1);
    for idx in 0..N_ROWS {
        let context = house.context(idx, 1_000 + idx);
        house.pull(context, None);
    }
    house.warm_up(100);
    let n_allocations: Vec<u64> = (0..1_000).map(|_| house.step().n_allocations).collect();
    assert!(n_allocations.iter().all(|&n| n == 0), "{n_allocations:?}");
}

/// Walks over more memory than the caches next to a core hold, as others on a machine do.
fn chill(memory: &mut [u8]) {
    memory.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
}

#[test]
#[ignore = "prints times, which mean something on a quiet machine alone"]
fn of_forks() {
    let mut memory = vec![0; 8 << 20];
    for is_cold in [false, true] {
        for n_tokens in [1_000, 16_384, 131_072 - 64] {
            let mut house = House::new(2, 3 * 131_072, 1);
            let mut parent = house.context(0, n_tokens);
            let (mut of_guest, mut of_engine, mut of_release) = (Vec::new(), Vec::new(), Vec::new());
            let mut chill = || {
                if is_cold {
                    chill(&mut memory)
                }
            };
            let mut timed = |act: &mut dyn FnMut()| {
                chill();
                let begun = Instant::now();
                act();
                begun.elapsed()
            };
            for _ in 0..N_FORKS {
                let mut child = None;
                of_guest.push(timed(&mut || child = Some(house::now(parent.fork()))));
                of_engine.push(timed(&mut || house.idle_turn()));
                drop(child);
                of_release.push(timed(&mut || house.idle_turn()));
            }
            println!(
                "fork of {n_tokens} tokens, {}: guest {:.1} µs, engine {:.1} µs (the first {:.1} µs), release {:.1} µs",
                if is_cold { "caches cold" } else { "caches warm" },
                median(of_guest),
                median(of_engine.clone()),
                of_engine[0].as_secs_f64() * 1e6,
                median(of_release),
            );
        }
    }
}
