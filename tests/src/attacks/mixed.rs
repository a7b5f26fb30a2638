//! All attacks at random, for a long time, beside honest guests.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::neighbour::Window;
use super::neighbours::Neighbours;
use super::processes::{Daemon, Orders, Tally, User};
use super::raw::Raw;
use super::state::State;
use super::{Attack, table};
use crate::engines::Random;

/// Honest users, each with a stream.
const N_NEIGHBOURS: u32 = 2;

/// Users that attack, each with one attack at a time.
const N_ATTACKERS: u32 = 5;

/// How long a round of an attack takes that could go on for ever.
const SECONDS: f64 = 2.0;

/// The attack that leaves most of what is kept of a user's uploads.
const KEPT_UPLOAD: &str = "data-of-12-mb";

/// What became of it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Attacks let loose, their copies not counted.
    pub n_attacks: usize,
    /// How those of each name ended.
    pub ends: BTreeMap<&'static str, Tally>,
    /// What the honest users had.
    pub neighbours: Vec<Window>,
    /// What the daemon held before.
    pub before: State,
    /// What it holds at the end.
    pub after: State,
    /// The most that it and the processes of guests had in memory on the way.
    pub resident_kb_max: u64,
    /// What is wrong; nothing where all is well.
    pub complaints: Vec<String>,
}

/// One attacking user: an attack after the other until the time is over.
fn attack_at_random(
    daemon: &Daemon,
    user: User,
    seed: u64,
    is_over: &AtomicBool,
    done: &mpsc::Sender<(Attack, io::Result<Tally>)>,
) {
    let mut random = Random(seed);
    let all = table();
    while !is_over.load(Ordering::Relaxed) {
        let attack = all[random.below(all.len())];
        if attack.is_of_a_stranger && !daemon.has_users {
            continue;
        }
        let n_copies = 1 + random.below(attack.n_at_once());
        let orders = Orders { name: attack.name.to_owned(), n_copies, seconds: SECONDS, is_repeated: false };
        let tally = daemon.attack(user, &orders).and_then(super::processes::Attackers::wait);
        if done.send((attack, tally)).is_err() {
            return;
        }
    }
}

/// Makes the daemon take what it takes once: each attack, by users at once, and from each of these what is kept of a user's uploads.
fn warm(daemon: &Daemon) -> io::Result<()> {
    let once = |user: User, attack: &Attack| {
        let n_copies = attack.n_at_once();
        let orders = Orders { name: attack.name.to_owned(), n_copies, seconds: SECONDS, is_repeated: false };
        daemon.attack(user, &orders)?.wait().map(drop)
    };
    let all = table();
    std::thread::scope(|scope| {
        let users: Vec<_> = (0..N_ATTACKERS)
            .map(|number| {
                let theirs = all.iter().enumerate().filter(move |(idx, attack)| {
                    let is_theirs = idx % N_ATTACKERS as usize == number as usize;
                    is_theirs || attack.name == KEPT_UPLOAD
                });
                let user = User(N_NEIGHBOURS + number);
                scope.spawn(move || {
                    let mut may = theirs.filter(|(_, attack)| daemon.has_users || !attack.is_of_a_stranger);
                    may.try_for_each(|(_, attack)| once(user, attack))
                })
            })
            .collect();
        users.into_iter().try_for_each(|user| user.join().expect("an attacking user does not panic"))
    })
}

/// Lets them loose for so long, and waits until everything is back.
///
/// # Errors
/// The daemon is gone, or a process does not do what it should.
pub fn run(mut daemon: Daemon, time: Duration, seed: u64, say: &dyn Fn(&str)) -> io::Result<Report> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut raw = runtime.block_on(Raw::connect(&daemon.socket()))?;
    let mut neighbours = Neighbours::begin(&daemon, (0..N_NEIGHBOURS).map(User))?;
    warm(&daemon)?;
    say("each attack was there once; waiting until nothing is left of them");
    let before = runtime.block_on(State::at_rest(&mut raw, daemon.pid()))?;
    neighbours.go()?;

    let is_over = AtomicBool::new(false);
    let (done, endings) = mpsc::channel();
    let begun = Instant::now();
    let mut report = Report {
        n_attacks: 0,
        ends: BTreeMap::new(),
        neighbours: Vec::new(),
        before,
        after: before,
        resident_kb_max: 0,
        complaints: Vec::new(),
    };
    let attacked: io::Result<()> = std::thread::scope(|scope| {
        let (daemon, is_over) = (&daemon, &is_over);
        for number in 0..N_ATTACKERS {
            let done = done.clone();
            let user = User(N_NEIGHBOURS + number);
            scope.spawn(move || {
                attack_at_random(daemon, user, seed.wrapping_add(u64::from(number)), is_over, &done);
            });
        }
        drop(done);
        let mut looked = Instant::now();
        let outcome = loop {
            match endings.recv_timeout(Duration::from_secs(1)) {
                Ok((attack, tally)) => {
                    report.n_attacks += 1;
                    match tally {
                        Ok(tally) => {
                            for (ending, _) in
                                tally.by_end.values().filter(|(ending, _)| ending.code == "internal")
                            {
                                report.complaints.push(format!("{}: {}", attack.name, ending.message));
                            }
                            report.ends.entry(attack.name).or_default().add(tally);
                        }
                        Err(error) => report.complaints.push(format!("{}: {error}", attack.name)),
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break Ok(()),
            }
            if begun.elapsed() > time {
                is_over.store(true, Ordering::Relaxed);
            }
            if looked.elapsed() > Duration::from_secs(10) {
                looked = Instant::now();
                let state =
                    neighbours.look().and_then(|()| runtime.block_on(State::of(&mut raw, daemon.pid())));
                match state {
                    Ok(state) => {
                        let resident_kb = state.resident_kb + state.children_resident_kb;
                        report.resident_kb_max = report.resident_kb_max.max(resident_kb);
                        let seconds = begun.elapsed().as_secs_f64();
                        say(&format!("{seconds:>5.0} s: {} attacks; {}", report.n_attacks, state.line()));
                    }
                    Err(error) => {
                        is_over.store(true, Ordering::Relaxed);
                        break Err(error);
                    }
                }
            }
        };
        is_over.store(true, Ordering::Relaxed);
        outcome
    });
    if let Some(status) = daemon.has_ended()? {
        return Err(io::Error::other(format!("the daemon ended, {status}\n{}", daemon.log())));
    }
    attacked?;
    neighbours.pause()?;
    let (windows, complaints) = neighbours.end();
    report.neighbours = windows;
    report.complaints.extend(complaints);
    let (after, beyond) = runtime.block_on(State::back(&mut raw, daemon.pid(), &report.before))?;
    report.after = after;
    report.complaints.extend(beyond);
    Ok(report)
}
