//! The host API, called as bytes say, by a guest that reads them and by guests that are made of them: what the fuzzer keeps, some by
//! chance, and some that nobody has tried yet. What needs no daemon is replayed by the tests of `trellis-oracles`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use trellis_oracles::components::{Components, Outcome};
use trellis_oracles::host::Host;
use trellis_oracles::{TARGETS, fresh_seed, mutated_input, random_input};
use trellis_tests::fuzz::on_device::{self, DeviceError, DevicePlan};
use trellis_tests::pack::root;
use trellis_tests::{daemons, guests, pack};

use crate::exe;

/// Scripts by chance, and components, which are many times as fast; the same each time.
const N_SCRIPTS: u64 = 60;
const N_COMPONENTS: u64 = 300;

/// How long each is given inputs that nobody has tried yet.
const FRESH_TIME: Duration = Duration::from_secs(3);

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    files.sort();
    files
}

/// A folder for compiled code, beside the tests.
fn cache(name: &str) -> PathBuf {
    PathBuf::from(exe()).with_file_name(name)
}

/// Checks what is kept of a target, so many inputs by chance, and fresh ones.
fn replay(name: &str, n_random: u64, mut check: impl FnMut(&[u8])) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("it is a target");
    let folder = root().join("tests/fuzz");
    let kept = files(&folder.join("corpus").join(name));
    assert!(!kept.is_empty(), "nothing is kept of {name}");
    let mut inputs = Vec::new();
    for path in kept.into_iter().chain(files(&folder.join("regressions").join(name))) {
        println!("{}", path.display());
        inputs.push(fs::read(&path).expect("it can be read"));
        check(inputs.last().expect("it was just put there"));
    }
    for seed in 0..n_random {
        println!("random_input({seed}, {})", target.input_bytes_max);
        check(&random_input(seed, target.input_bytes_max));
    }
    let (begun, mut seed) = (Instant::now(), fresh_seed());
    while begun.elapsed() < FRESH_TIME {
        // With the same inputs kept, the variable makes the same one again.
        println!("TRELLIS_FUZZ_SEED={seed}");
        check(&mutated_input(&inputs, seed, target.input_bytes_max));
        seed = seed.wrapping_add(1);
    }
}

#[test]
fn scripts_are_answered_and_leave_nothing() {
    let host = Host::start(PathBuf::from(exe()), cache("tests-cache"), guests::hostile());
    replay("host", N_SCRIPTS, |input| host.check(input));
}

#[test]
fn components_of_bytes_end_by_what_they_did_and_leave_nothing() {
    let components = Components::start(PathBuf::from(exe()), cache("tests-cache-of-components"));
    let mut n_of: BTreeMap<Outcome, usize> = BTreeMap::new();
    replay("components", N_COMPONENTS, |input| *n_of.entry(components.check(input)).or_default() += 1);
    println!("{n_of:?}");
    // They come to all kinds of ends, to their own too.
    let ended = |code: &str| Outcome::Ended(code.to_owned());
    for outcome in [Outcome::Refused, Outcome::Finished, ended("guest_failed"), ended("guest_trapped")] {
        assert!(n_of.contains_key(&outcome), "none is {outcome:?}: {n_of:?}");
    }
}

/// On the first CUDA device, whatever the other tests run on; where there is none, it says so.
#[test]
fn kept_programs_come_to_the_same_on_a_device() {
    let plan = DevicePlan { corpora: Vec::new(), time: FRESH_TIME, seed: fresh_seed() };
    match on_device::run(&plan) {
        Ok((counts, difference)) => {
            println!("{counts}");
            assert!(difference.is_none(), "{difference:?}");
            assert!(counts.n_compared > 0, "{counts}");
        }
        Err(error @ DeviceError::NoDevice(_)) => {
            let is_required = std::env::var_os("TRELLIS_REQUIRE_CUDA").is_some_and(|value| value == "1");
            assert!(!is_required, "TRELLIS_REQUIRE_CUDA=1, but: {error}");
            println!("left out: {error}");
        }
        Err(error) => panic!("{error}"),
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
    for (arguments, said) in [
        (&["--minutes", "1", "frame"][..], "there is no target \"frame\"; there are frames, recordings"),
        (&["--device", "frames"], "\"frames\" does not run on a device; programs does"),
    ] {
        let refused = command(arguments).expect("it is there");
        let text = String::from_utf8(refused.stderr).expect("it is text");
        assert_eq!(refused.status.code(), Some(2), "{text}");
        assert!(text.contains(said), "{text}");
    }
}
