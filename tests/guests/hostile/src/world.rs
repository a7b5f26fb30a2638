//! What there is outside of the guest: nothing.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::Read as _;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use trellis_guest::emit_json;

use crate::Outcome;

#[derive(Serialize)]
struct Seen {
    n_arguments: usize,
    n_variables: usize,
    n_stdin_bytes: usize,
    files: Vec<String>,
    random: u64,
    wall_ns_below_10ms: u128,
    monotonic_steps_ns: Vec<u128>,
}

pub(crate) fn look_around() -> Outcome {
    let mut stdin = Vec::new();
    // An error is as good as nothing.
    let _ = std::io::stdin().read_to_end(&mut stdin);
    let tries = [
        std::fs::read("/etc/passwd").map(|_| "read /etc/passwd"),
        std::fs::read(".").map(|_| "read ."),
        std::fs::read_dir("/").map(|_| "list /"),
        std::fs::read_dir(".").map(|_| "list ."),
        std::fs::write("/tmp/trellis-hostile", "x").map(|()| "write /tmp"),
        std::fs::create_dir("made").map(|()| "make a folder"),
        std::env::current_dir().and_then(std::fs::read_dir).map(|_| "list the current folder"),
    ];
    let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let mut last = Instant::now();
    let mut steps = Vec::new();
    while steps.len() < 3 {
        let now = Instant::now();
        if now > last {
            steps.push(now.duration_since(last).as_nanos());
            last = now;
        }
    }
    Ok(emit_json(&Seen {
        n_arguments: std::env::args().count(),
        n_variables: std::env::vars_os().count(),
        n_stdin_bytes: stdin.len(),
        files: tries.into_iter().filter_map(Result::ok).map(str::to_owned).collect(),
        random: RandomState::new().build_hasher().finish(),
        wall_ns_below_10ms: wall.as_nanos() % 10_000_000,
        monotonic_steps_ns: steps,
    })?)
}
