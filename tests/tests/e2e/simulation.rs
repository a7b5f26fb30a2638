//! Daemon, scheduler, sessions and clients in virtual time, with faults: scenes by their seeds.

use std::process::Command;

use trellis_tests::sim::{self, Fault, Mutation};

/// Seeds whose scenes once broke something that must hold, in Trellis or in the simulation.
const REGRESSIONS: [u64; 8] = [0, 24, 245, 1609, 1970, 5043, 14741, 34735];

/// Seeds in which each mistake of the simulated parts is noticed at the latest.
const N_SEEDS_TO_NOTICE: u64 = 1_000;

#[test]
fn ten_thousand_scenes_keep_to_what_must_hold() {
    let summary = sim::run_all(0..10_000, 2, 5, None, |_| {});
    assert_eq!(summary.failures, [], "`simulate --seed SEED --trace` shows what happens");
    assert_eq!(summary.n_seeds, 10_000);
    for (fault, n) in Fault::ALL.iter().map(|fault| (fault, summary.tally[*fault as usize])) {
        assert!(n > 50, "{n} {} are too few to show anything", fault.name());
    }
}

#[test]
fn scenes_that_broke_something_do_not() {
    for seed in REGRESSIONS {
        assert_eq!(sim::run(seed, None, false).violation, None, "seed {seed}");
    }
}

#[test]
fn a_seed_is_one_trace_in_every_process() {
    let summary = sim::run_all(0..500, 1, 1, None, |_| {});
    let again = sim::run_all(0..500, 2, 1, None, |_| {});
    assert_eq!((summary.digest, summary.n_events), (again.digest, again.n_events));
    let mut other = Command::new(env!("CARGO_BIN_EXE_simulate"));
    let output = other.args(["--seeds", "500", "--jobs", "2"]).output().expect("the program runs");
    let text = String::from_utf8(output.stdout).expect("it prints UTF-8");
    let digest = format!("{} events, digest {:016x}", summary.n_events, summary.digest);
    assert!(output.status.success() && text.contains(&digest), "{digest} is not in\n{text}");
    let lines = sim::run(7, None, true).lines;
    assert!(lines.len() > 50 && lines == sim::run(7, None, true).lines);
}

#[test]
fn mistakes_of_the_simulated_parts_are_noticed() {
    for mutation in Mutation::ALL {
        let summary = sim::run_all(0..N_SEEDS_TO_NOTICE, 2, 1, Some(*mutation), |_| {});
        assert!(!summary.failures.is_empty(), "{} in none of {N_SEEDS_TO_NOTICE} scenes", mutation.name());
    }
}
