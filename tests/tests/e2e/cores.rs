//! A daemon that dies leaves no core dump, whatever its user's limits are.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use trellis_tests::daemons::{self, PATIENCE, output, wait};

use crate::exe;

/// The lowest and the highest limit of a process's core files, in bytes.
fn limits(pid: u32) -> Vec<String> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).expect("Linux has it");
    line.split_whitespace().take(2).map(str::to_owned).collect()
}

fn memory_in_dumps(pid: u32) -> u64 {
    let filter = fs::read_to_string(format!("/proc/{pid}/coredump_filter")).expect("it runs");
    u64::from_str_radix(filter.trim(), 16).expect("bits")
}

#[test]
fn a_daemon_that_is_aborted_leaves_no_core_dump() {
    const SCRIPT: &str = "ulimit -S -c \"$(ulimit -H -c)\"; exec \"$0\" \"$@\"";
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let text = toml::to_string(&daemons::config(exe())).expect("settings can be written down");
    fs::write(at("trellis.toml"), text).expect("written");
    let mut command = daemons::trellis("sh");
    command.args(["-c", SCRIPT, exe(), "serve", "--socket"]).arg(at("t.sock"));
    command.arg("--config").arg(at("trellis.toml")).stderr(fs::File::create(at("log")).expect("made"));
    let mut daemon = command.current_dir(folder.path()).spawn().expect("it starts");
    let info = || {
        let mut info = daemons::trellis(exe());
        info.args(["info", "--socket"]).arg(at("t.sock"));
        output(&mut info).status.success()
    };
    let begun = Instant::now();
    while !info() {
        assert!(begun.elapsed() < PATIENCE, "it does not serve");
        std::thread::sleep(Duration::from_millis(20));
    }
    for limit in limits(daemon.id()) {
        assert!(["0", "1"].contains(&limit.as_str()), "{limit}");
    }
    assert_eq!(memory_in_dumps(daemon.id()), 0, "a program of core_pattern is given no memory");
    let pid = Pid::from_raw(i32::try_from(daemon.id()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::ABORT).expect("it runs");
    let status = wait(&mut daemon);
    assert_eq!((status.signal(), status.core_dumped()), (Some(Signal::ABORT.as_raw()), false), "{status:?}");
    let left: Vec<_> =
        fs::read_dir(folder.path()).expect("it is there").flatten().map(|e| e.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("core")), "{left:?}");
}
