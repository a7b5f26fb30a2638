//! All attacks on memory at once, again and again, on a daemon that is held to little of it, beside honest guests.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;
use trellis::config::Config;
use trellis_wire::{Call, Value};

use super::group::Group;
use super::neighbour::Window;
use super::neighbours::Neighbours;
use super::processes::{Attackers, Daemon, Orders, Tally, User};
use super::raw::Raw;
use super::state::State;
use super::{Attack, table};

/// Honest users, each with a stream.
const N_NEIGHBOURS: u32 = 2;

/// Users that attack, each with a part of the attacks.
const N_ATTACKERS: u32 = 6;

/// How long a round takes, after which the attacks change places.
const ROUND: Duration = Duration::from_secs(20);

/// Time between two looks at the daemon.
const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// Looks between two lines.
const N_LOOKS_OF_A_LINE: u64 = 10;

/// The limit that says how much memory the daemon has for guests.
const HOST_BYTES: &str = "budgets.daemon.host_bytes";

/// The attacks that take memory: of guests, of the host for them, of sessions, of compilers and of the engine.
pub const NAMES: [&str; 65] = [
    "memory",
    "memory-huge",
    "memory-grow",
    "memory-hog",
    "memory-crowd",
    "token-lists",
    "masks",
    "biases",
    "grammars",
    "programs",
    "samplers",
    "seeded-samplers",
    "decoders",
    "models",
    "streams",
    "call-of-40-mb",
    "grammar-schema",
    "grammar-deep",
    "grammar-regex",
    "grammar-blow-up",
    "grammar-choices",
    "grammar-optional",
    "grammar-doubled",
    "grammar-crowd",
    "chat-of-2000",
    "chat-crowd",
    "mask-of-200000",
    "bias-of-all",
    "decode-long",
    "encode-specials",
    "random-bytes-crowd",
    "realloc-without-end",
    "table-memory",
    "recursion-in-memory",
    "message-of-16-mb",
    "frame-of-a-huge-list",
    "zeroes-of-2-40",
    "full-crowd",
    "top-1024-of-256",
    "hidden-64",
    "beams-512",
    "generations",
    "generations-of-nothing",
    "generations-of-long-tokens",
    "searches",
    "steerings",
    "contexts",
    "fork-bomb",
    "pages",
    "output-unread",
    "output-unread-by-many",
    "recording-unread",
    "profile-unread",
    "recording-of-a-flood",
    "requests-unread",
    "starts-unread",
    "answers-unread",
    "inbox-flood",
    "half-frames",
    "text-of-a-megabyte",
    "functions-of-30000",
    "function-of-60000",
    "data-of-12-mb",
    "compile-crowd",
    "upload-and-leave",
];

/// What became of it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Bytes that the daemon and all that it starts may have.
    pub limit_bytes: u64,
    /// Whether the system held them to that.
    pub is_held: bool,
    /// Bytes that the daemon takes for guests.
    pub host_bytes: u64,
    /// The most that the group had, what the system keeps of files included.
    pub peak_bytes: Option<u64>,
    /// Processes that the system killed for want of memory.
    pub n_killed: Option<u64>,
    /// The most that the daemon had in memory, and the most that it and the processes that it started had together.
    pub resident_kb_max: (u64, u64),
    /// Attacks let loose, their copies not counted.
    pub n_attacks: usize,
    /// How those of each name ended.
    pub ends: BTreeMap<String, Tally>,
    /// What the honest users had.
    pub neighbours: Vec<Window>,
    /// What the daemon held before.
    pub before: State,
    /// What it holds at the end.
    pub after: State,
    /// What is wrong; nothing where all is well.
    pub complaints: Vec<String>,
}

/// The settings of a daemon that `is_held` to so much memory, or, where it is not, is told what it would then have.
#[must_use]
pub fn config(config: Config, limit_bytes: u64, is_held: bool) -> Config {
    let mut config = Config { kv_bytes: Some(48 << 20), kv_host_bytes: Some(32 << 20), ..config };
    if !is_held {
        config.budgets.daemon.host_bytes = Some(limit_bytes / 3);
    }
    config
}

/// The attacks of [`NAMES`], of each as many as beside which a pace is measured.
fn attacks() -> Vec<Attack> {
    table().into_iter().filter(|attack| NAMES.contains(&attack.name)).collect()
}

/// Lets them loose for so long, and waits until everything is back.
///
/// # Errors
/// The daemon is gone, or a process does not do what it should.
pub fn run(
    mut daemon: Daemon,
    group: Option<&Group>,
    limit_bytes: u64,
    time: Duration,
    say: &dyn Fn(&str),
) -> io::Result<Report> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut raw = runtime.block_on(Raw::connect(&daemon.socket()))?;
    let pid = daemon.pid();
    let host_bytes = runtime.block_on(host_bytes(&mut raw))?;
    let mut neighbours = Neighbours::begin(&daemon, (0..N_NEIGHBOURS).map(User))?;
    // What it takes once it takes in a first round, as long as each of the others: arenas of the allocator and stacks are used
    // as far as threads at their busiest use them.
    let mut ends = BTreeMap::new();
    let n_first = loose(&daemon, ROUND, &mut ends, &mut || Ok(()))?;
    say(&format!("{n_first} attacks were there once; waiting until nothing is left of them"));
    let before = runtime.block_on(State::at_rest(&mut raw, pid))?;
    neighbours.go()?;
    let begun = Instant::now();
    let mut resident_kb_max = (0, 0);
    let mut n_looks = 0;
    let n_attacks = loose(&daemon, time, &mut ends, &mut || {
        let state = runtime.block_on(State::of(&mut raw, pid))?;
        let sum_kb = state.resident_kb + state.children_resident_kb;
        resident_kb_max = (resident_kb_max.0.max(state.resident_kb), resident_kb_max.1.max(sum_kb));
        if n_looks % N_LOOKS_OF_A_LINE == 0 {
            neighbours.look()?;
            say(&format!("{:>5.0} s: {}", begun.elapsed().as_secs_f64(), state.line()));
        }
        n_looks += 1;
        Ok(())
    });
    if let Some(status) = daemon.has_ended()? {
        return Err(io::Error::other(format!("the daemon ended, {status}\n{}", daemon.log())));
    }
    let n_attacks = n_attacks?;
    neighbours.pause()?;
    let (neighbours, mut complaints) = neighbours.end();
    let (after, beyond) = runtime.block_on(State::back(&mut raw, pid, &before))?;
    complaints.extend(beyond);
    let (peak_bytes, n_killed) = match group {
        Some(group) => (Some(group.peak_bytes()?), Some(group.n_killed()?)),
        None => (None, None),
    };
    if let Some(n) = n_killed.filter(|&n| n > 0) {
        complaints.push(format!("{n} processes were killed for want of memory"));
    }
    if resident_kb_max.1 << 10 > limit_bytes {
        complaints.push(format!("{} kB in memory, the limit is {limit_bytes} bytes", resident_kb_max.1));
    }
    for (name, tally) in &ends {
        let internal = tally.by_end.values().filter(|(ending, _)| ending.code == "internal");
        complaints.extend(internal.map(|(ending, _)| format!("{name}: {}", ending.message)));
    }
    Ok(Report {
        limit_bytes,
        is_held: group.is_some(),
        host_bytes,
        peak_bytes,
        n_killed,
        resident_kb_max,
        n_attacks,
        ends,
        neighbours,
        before,
        after,
        complaints,
    })
}

/// Bytes that the daemon takes for guests, as it says.
async fn host_bytes(raw: &mut Raw) -> io::Result<u64> {
    let Value::Limits { limits } = raw.value(Call::Limits).await? else {
        return Err(io::Error::other("the answer to limits is none"));
    };
    let limit = limits.into_iter().find(|limit| limit.name == HOST_BYTES).and_then(|limit| limit.value);
    limit.ok_or_else(|| io::Error::other(format!("no limit is called {HOST_BYTES}")))
}

/// Rounds of all attacks at once, for at least so long; how many attacks that were.
fn loose(
    daemon: &Daemon,
    time: Duration,
    ends: &mut BTreeMap<String, Tally>,
    look: &mut dyn FnMut() -> io::Result<()>,
) -> io::Result<usize> {
    let attacks = attacks();
    let is_over = AtomicBool::new(false);
    let begun = Instant::now();
    let (done, endings) = mpsc::channel();
    let mut n_attacks = 0;
    let seconds = ROUND.min(time).as_secs_f64();
    std::thread::scope(|scope| {
        for (number, &attack) in attacks.iter().enumerate() {
            let (done, is_over) = (done.clone(), &is_over);
            scope.spawn(move || {
                // Each round by another user, so that all are attacked by all.
                for round in 0.. {
                    let user = User(N_NEIGHBOURS + (number + round) as u32 % N_ATTACKERS);
                    let name = attack.name.to_owned();
                    let orders = Orders { name, n_copies: attack.n_copies, seconds, is_repeated: true };
                    let tally = daemon.attack(user, &orders).and_then(Attackers::wait);
                    let is_lost = done.send((attack.name, tally)).is_err();
                    if is_lost || is_over.load(Ordering::Relaxed) || begun.elapsed() >= time {
                        return;
                    }
                }
            });
        }
        drop(done);
        let mut looked = Instant::now();
        let outcome = loop {
            match endings.recv_timeout(LOOK_PERIOD) {
                Ok((name, tally)) => {
                    n_attacks += 1;
                    match tally {
                        Ok(tally) => ends.entry(name.to_owned()).or_default().add(tally),
                        Err(error) => break Err(error),
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break Ok(n_attacks),
            }
            if looked.elapsed() >= LOOK_PERIOD {
                looked = Instant::now();
                if let Err(error) = look() {
                    break Err(error);
                }
            }
        };
        is_over.store(true, Ordering::Relaxed);
        outcome
    })
}
