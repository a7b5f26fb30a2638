//! The host API, called as bytes say: by the scripts that the fuzzer keeps, and by some by chance. What needs no guest is
//! replayed by the tests of `trellis-oracles`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use trellis_oracles::host::Host;
use trellis_oracles::{TARGETS, random_input};
use trellis_tests::pack::root;
use trellis_tests::{daemons, guests, pack};

use crate::exe;

/// Scripts by chance, and the bytes of the longest.
const N_RANDOM: u64 = 60;
const SCRIPT_BYTES_MAX: usize = 512;

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        let exe = PathBuf::from(exe());
        let cache_dir = exe.with_file_name("tests-cache");
        Host::start(exe, cache_dir, guests::hostile())
    })
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    files.sort();
    files
}

#[test]
fn kept_scripts_are_answered_and_leave_nothing() {
    let folder = root().join("tests/fuzz");
    let kept = files(&folder.join("corpus/host"));
    assert!(!kept.is_empty(), "no scripts are kept");
    for path in kept.into_iter().chain(files(&folder.join("regressions/host"))) {
        println!("{}", path.display());
        host().check(&fs::read(&path).expect("it can be read"));
    }
}

#[test]
fn scripts_by_chance_are_answered_and_leave_nothing() {
    for seed in 0..N_RANDOM {
        println!("random_input({seed}, {SCRIPT_BYTES_MAX})");
        host().check(&random_input(seed, SCRIPT_BYTES_MAX));
    }
}

/// Runs the command that fuzzes; none where the tests were packed, without it.
fn command(arguments: &[&str]) -> Option<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fuzz"));
    pack::folder().is_none().then(|| daemons::output(command.args(arguments)))
}

#[test]
fn the_command_knows_its_targets_and_no_others() {
    let Some(listed) = command(&["--list"]) else { return println!("skipped: packed") };
    let text = String::from_utf8(listed.stdout).expect("it is text");
    let names: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, TARGETS.iter().map(|target| target.name).collect::<Vec<_>>());
    let refused = command(&["--minutes", "1", "frame"]).expect("it is there");
    let text = String::from_utf8(refused.stderr).expect("it is text");
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("there is no target \"frame\"; there are frames, recordings"), "{text}");
}
