//! A daemon that is killed at random moments under honest clients: the next one replaces its socket, what is cached is whole, calls
//! that were under way end with an error that says that they may be made again, and no process and no file stays.
#![cfg(target_os = "linux")]

use trellis::config::{Config, Device, Isolation};
use trellis_tests::attacks::killed;
use trellis_tests::daemons;

use crate::exe;

const N_KILLS: usize = 8;

fn kill(isolation: Isolation, seed: u64) {
    let config = Config { device: Device::Cpu, isolation, ..daemons::config(exe()) };
    let report = killed::run(exe().as_ref(), &config, N_KILLS, seed, &|_| {}).expect("every daemon starts");
    println!("{}", report.lines().join("\n"));
    assert!(report.complaints.is_empty(), "{:#?}", report.complaints);
    assert_eq!(report.n_kills, N_KILLS);
    assert!(report.n_cut.values().sum::<usize>() > 0, "{report:?}");
    assert!(report.n_saved_whole + report.n_reopened > 0, "{report:?}");
    assert!(report.n_calls > 0 && report.n_tokens > 0, "{report:?}");
}

#[test]
fn a_daemon_that_is_killed_leaves_all_whole() {
    kill(Isolation::Thread, 1);
}

#[test]
fn a_daemon_that_is_killed_takes_the_processes_of_its_guests_along() {
    kill(Isolation::Process, 2);
}
