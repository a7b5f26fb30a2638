//! What it costs the host that contexts wait for nothing while another stands in line for pages. Times are printed, not
//! asserted: the machine decides them.
//!
//! ```text
//! cargo test --release -p trellis-engine --lib -- --ignored --nocapture memory::costs
//! ```

use super::house::{House, Kind, PLAIN};
use super::pages;

const N_STEPS: u32 = 400;

#[test]
#[ignore = "prints times, which mean something on a quiet machine alone"]
fn of_idle_contexts_while_somebody_stands_in_line() {
    for n_models in [1, 2] {
        for n_idle in [0, 1_000, 4_000, 16_000] {
            let kind =
                Kind { n_granule_pages: 10, n_pages: 130, n_longest: 100, n_host_pages: 20_000, ..PLAIN };
            let mut house = House::new(&vec![kind; n_models], 2);
            for n in 0..n_idle {
                let talk = house.create(n % n_models, 0);
                house.ask(talk, pages(1));
                if n % 10 == 9 {
                    house.settle();
                }
            }
            house.settle();
            house.talks.clear();
            for n in 0..12 {
                let talk = house.create(usize::from(n % 3 == 0) % n_models, n as u32);
                house.run(talk, pages(20), None);
            }
            (0..200).for_each(|_| _ = house.step());
            house.busy = Default::default();
            let begun = house.ledger().n_steps;
            while house.ledger().n_steps < begun + u64::from(N_STEPS) {
                house.step();
            }
            let us = house.busy.as_secs_f64() * 1e6 / f64::from(N_STEPS);
            println!("{n_models} models, {n_idle} idle contexts: {us:.1} µs a step");
        }
    }
}
