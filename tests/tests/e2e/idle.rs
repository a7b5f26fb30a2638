//! A daemon that nobody asks anything does nothing. `tests/idle.sh` looks at the times and the memory of a release build.

use std::fs;
use std::time::Duration;

use trellis::config::{Config, Device};
use trellis_tests::daemons::{Served, config};

use crate::exe;

/// In which it is looked at, several times: what a start leaves to be done comes to its end meanwhile.
const WINDOW: Duration = Duration::from_secs(5);

/// Times at which any thread of a process waited for something, since it began.
fn n_waits(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let n_of = |thread: fs::DirEntry| -> Option<u64> {
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse().ok()
    };
    threads.flatten().filter_map(n_of).sum()
}

#[test]
fn a_daemon_that_nobody_asks_wakes_for_nothing() {
    let config = Config { models: vec!["tiny".to_owned()], device: Device::Cpu, ..config(exe()) };
    // Whether the machine's memory is short is none of what is looked at.
    let served = Served::start_with(exe(), &config, &[("MEMORY_PRESSURE_WATCH", "/dev/null")]);
    let least = (0..4).map(|_| {
        let before = n_waits(served.pid());
        std::thread::sleep(WINDOW);
        n_waits(served.pid()).saturating_sub(before)
    });
    let least = least.min().expect("there are several");
    assert!(least <= 2, "{least} in {WINDOW:?}");
}
