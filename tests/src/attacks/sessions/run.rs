//! Sessions of several users, each a process, against a daemon of its own.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;
use trellis::config::Config;
use trellis::guest::GuestLimits;

use super::{ByMoment, MOMENTS, Visits, complaints, visit};
use crate::attacks::neighbour::Window;
use crate::attacks::neighbours::Neighbours;
use crate::attacks::processes::{Daemon, User, VISITOR, site};
use crate::attacks::raw::Raw;
use crate::attacks::saved;
use crate::attacks::state::State;

/// Users, each with as many sessions.
const N_USERS: u32 = 4;

/// One more, with a stream beside them.
const NEIGHBOUR: User = User(N_USERS);

/// How many times each user comes to each moment before anything is measured.
const N_WARM_ROUNDS: usize = 5;

/// Time between two looks at the daemon.
const LOOK_PERIOD: Duration = Duration::from_secs(5);

/// What became of it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Sessions, those before the measurement not counted.
    pub n_sessions: usize,
    /// How long they took.
    pub seconds: f64,
    /// How those of each moment ended.
    pub by_moment: ByMoment,
    /// What the user with a stream had beside them.
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

/// The settings of a daemon that is visited: little KV memory, so that all of it has been used before anything is measured. Guests
/// have the time that they have by default, so that it is their sessions that end them.
#[must_use]
pub fn config(config: Config) -> Config {
    let limits = GuestLimits { n_programs: 1, ..config.limits };
    Config { kv_bytes: Some(24 << 20), kv_host_bytes: Some(8 << 20), limits, ..config }
}

/// Lets them come and go, and waits until everything is back.
///
/// # Errors
/// The daemon is gone, or a process does not do what it should.
pub fn run(mut daemon: Daemon, visits: Visits, say: &dyn Fn(&str)) -> io::Result<Report> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut raw = runtime.block_on(Raw::connect(&daemon.socket()))?;
    let pid = daemon.pid();
    let mut neighbours = Neighbours::begin(&daemon, [NEIGHBOUR])?;
    let warm =
        Visits { n_sessions: N_USERS as usize * N_WARM_ROUNDS * MOMENTS.len(), seed: !visits.seed, ..visits };
    visit_by_users(&daemon, warm, &mut |_| Ok(()))?;
    say("every moment was there for every user; waiting until nothing is left of them");
    let before = runtime.block_on(State::at_rest(&mut raw, pid))?;

    neighbours.go()?;
    let begun = Instant::now();
    let mut resident_kb_max = 0;
    let by_moment = visit_by_users(&daemon, visits, &mut |n_done| {
        neighbours.look()?;
        let state = runtime.block_on(State::of(&mut raw, pid))?;
        resident_kb_max = resident_kb_max.max(state.resident_kb + state.children_resident_kb);
        say(&format!("{:>5.0} s: {n_done} sessions; {}", begun.elapsed().as_secs_f64(), state.line()));
        Ok(())
    });
    if let Some(status) = daemon.has_ended()? {
        return Err(io::Error::other(format!("the daemon ended, {status}\n{}", daemon.log())));
    }
    let by_moment = by_moment?;
    let seconds = begun.elapsed().as_secs_f64();
    neighbours.pause()?;
    let (neighbours, of_neighbours) = neighbours.end();
    let mut complaints = complaints(&by_moment);
    complaints.extend(of_neighbours);
    let (after, beyond) = runtime.block_on(State::back(&mut raw, pid, &before))?;
    complaints.extend(beyond);
    let left = saved::files(daemon.folder())?;
    complaints.extend(left.iter().map(|file| format!("{} is left among saved contexts", file.name)));
    Ok(Report {
        n_sessions: visits.n_sessions,
        seconds,
        by_moment,
        neighbours,
        before,
        after,
        resident_kb_max,
        complaints,
    })
}

/// Lets users have a part of these sessions each, and tells now and then how many are over.
fn visit_by_users(
    daemon: &Daemon,
    visits: Visits,
    look: &mut dyn FnMut(usize) -> io::Result<()>,
) -> io::Result<ByMoment> {
    let (tell, told) = mpsc::channel();
    let mut seen = ByMoment::new();
    std::thread::scope(|scope| {
        for number in 0..N_USERS {
            let part = |n: usize| (n + N_USERS as usize - 1 - number as usize) / N_USERS as usize;
            let part = Visits {
                n_sessions: part(visits.n_sessions),
                n_at_once: part(visits.n_at_once).max(1),
                seed: visits.seed.wrapping_add(u64::from(number) << 40),
            };
            let tell = tell.clone();
            scope.spawn(move || {
                let said = daemon.run_clients(User(number), VISITOR, &part, &mut |line| {
                    // Who listens is gone where another user's process has failed.
                    let _ = tell.send(Ok((number, line.to_owned())));
                });
                if let Err(error) = said {
                    let _ = tell.send(Err(error));
                }
            });
        }
        drop(tell);
        let mut n_done = [0; N_USERS as usize];
        let mut looked = Instant::now();
        for said in told {
            let (number, line) = said?;
            match line.parse() {
                Ok(n) => n_done[number as usize] = n,
                Err(_) => {
                    for (moment, tally) in serde_json::from_str::<ByMoment>(&line)? {
                        seen.entry(moment).or_default().add(tally);
                    }
                }
            }
            if looked.elapsed() > LOOK_PERIOD {
                looked = Instant::now();
                look(n_done.iter().sum())?;
            }
        }
        Ok(seen)
    })
}

/// The process of one user: says every second how many sessions are over, and at the end how they ended.
///
/// # Errors
/// A session panics.
pub fn be_visitors(folder: &Path, visits: &Visits) -> io::Result<()> {
    let site = site(folder)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let seen = runtime.block_on(async {
        let done = Arc::new(AtomicUsize::new(0));
        let mut visiting = std::pin::pin!(visit(&site, *visits, done.clone()));
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                seen = &mut visiting => return seen,
                _ = ticks.tick() => println!("{}", done.load(Ordering::Relaxed)),
            }
        }
    })?;
    println!("{}", serde_json::to_string(&seen)?);
    Ok(())
}
