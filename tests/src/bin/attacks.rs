//! `cargo run --release -p trellis-tests --bin attacks`: lets attacks by name loose on a daemon, beside a neighbour.

use std::error::Error;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use serde::Serialize;
use trellis::config::{Config, Device, Isolation};
use trellis_tests::attacks::group::Group;
use trellis_tests::attacks::neighbour::Window;
use trellis_tests::attacks::processes::{self, Daemon, Orders};
use trellis_tests::attacks::sessions::{self, Visits};
use trellis_tests::attacks::state::State;
use trellis_tests::attacks::{Attack, Component, alone, killed, memory, mixed, pace, suite, table};
use trellis_tests::guests;

const EXAMPLES: &str = "\
Examples:
  attacks                                     each attack once; what is left of it, and what a neighbour has beside it
  attacks --by-process --only memory          those with `memory` in their names, with guests in processes of their own
  attacks --list                              their names and what may come of each
  attacks --pace                              what a neighbour keeps of its pace beside each attack; an hour
  attacks --pace --only spin --copies 30 --seconds 5 --json pace.json
  attacks --alone                             what a user has beside whom there is nobody: processors, compilations, KV pages
  attacks --minutes 20                        all of them mixed at random; everything has to be back at the end
  attacks --sessions 10000                    sessions that are dropped at every moment; everything has to be back
  attacks --memory --minutes 2                all that take memory at once, on a daemon in a control group of 3 GiB
  attacks --kills 200 --by-process            kills the daemon at random moments under honest clients, and starts it again

Exit status:
  0   all is as it should be
  1   something is not, or could not be tried
  77  nothing is wrong, but not all could be shown: without root all users are one and what processes of guests hold is not shown,
      without the right to make a control group nothing holds the daemon to its memory; the last lines say which";

/// The exit status where something that is to be shown cannot be here, as test harnesses know it from automake.
const SKIPPED: u8 = 77;

/// Let attacks by name loose on a daemon of this build, beside a neighbour that streams
///
/// Starts `trellis serve` with the model `tiny` on the processor. As root, the neighbour and the attackers run under users of their own;
/// otherwise all of them are this user, who then shares budgets with itself. Without an option each attack is made once, and afterwards
/// its end, the neighbour's tokens, and guests, contexts, pages, threads, files and memory of the daemon and its processes are looked at.
#[derive(Debug, Parser)]
#[command(after_help = EXAMPLES)]
struct Told {
    #[command(subcommand)]
    role: Option<Role>,
    /// List the attacks, and do nothing
    #[arg(long)]
    list: bool,
    /// Only the one of this name, or those with this in their names or categories; may be given more than once
    #[arg(long, value_name = "FILTER")]
    only: Vec<String>,
    /// Measure what a neighbour has, alone and attacked by turns; attacks that are over at once are made over and over meanwhile
    #[arg(long)]
    pace: bool,
    /// Make no attack, but measure whether a user beside whom there is nobody has the whole machine
    #[arg(long, conflicts_with_all = ["pace", "minutes", "only", "kills", "sessions", "memory"])]
    alone: bool,
    /// How many of each attack at once in --pace; those of the table otherwise
    #[arg(long, value_name = "N", requires = "pace")]
    copies: Option<usize>,
    /// How long each window of --pace and --alone is
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    seconds: f64,
    /// How many windows of each kind --pace has for an attack
    #[arg(long, value_name = "N", default_value_t = 2)]
    rounds: usize,
    /// Mix all attacks at random for so long; with --memory, how long that takes, a minute otherwise
    #[arg(long, value_name = "M", conflicts_with = "pace")]
    minutes: Option<f64>,
    /// Make no attack, but kill the daemon so often under honest clients, as it starts, serves and ends, and start it again
    #[arg(long, value_name = "N", conflicts_with_all = ["pace", "minutes", "only"])]
    kills: Option<usize>,
    /// Open so many sessions, use them, and drop them at every moment
    #[arg(long, value_name = "N", conflicts_with_all = ["pace", "minutes", "memory"])]
    sessions: Option<usize>,
    /// How many sessions at once
    #[arg(long, value_name = "N", default_value_t = 16, requires = "sessions")]
    at_once: usize,
    /// All attacks that take memory at once, on a daemon in a control group of its own
    #[arg(long, conflicts_with = "pace")]
    memory: bool,
    /// How much memory that group has
    #[arg(long, value_name = "MIB", default_value_t = 3072, requires = "memory")]
    cgroup_mib: u64,
    /// The seed of the mix, of the sessions, and of the moments of kills
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Attack this `trellis` instead of the one in this program
    #[arg(long, value_name = "PATH")]
    trellis: Option<PathBuf>,
    /// Start the daemon with the settings of this file; limits that the attacks need are set all the same
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Give the guests of each user a process of their own
    #[arg(long)]
    by_process: bool,
    /// Also write what was found as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What a process of this program is that another one has started.
#[derive(Debug, Subcommand)]
enum Role {
    #[command(name = processes::NEIGHBOUR, hide = true)]
    Neighbour {
        #[arg(long)]
        folder: PathBuf,
    },
    #[command(name = processes::ATTACKER, hide = true)]
    Attacker {
        #[arg(long)]
        folder: PathBuf,
        #[arg(long)]
        orders: String,
    },
    #[command(name = processes::LONE, hide = true)]
    Lone {
        #[arg(long)]
        folder: PathBuf,
        #[arg(long)]
        orders: String,
    },
    #[command(name = processes::VISITOR, hide = true)]
    Visitor {
        #[arg(long)]
        folder: PathBuf,
        #[arg(long)]
        orders: String,
    },
}

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What was found.
struct Found {
    /// Whether all that was tried is as it should be.
    is_well: bool,
    /// What could not be shown here, and why.
    missing: Vec<String>,
}

impl Found {
    const ALL_WELL: Self = Self { is_well: true, missing: Vec::new() };

    /// What is shown where this process may become other users, and otherwise is of one user.
    fn of_users(is_well: bool) -> Self {
        let is_root = rustix::process::geteuid().is_root();
        let missing =
            "what users have beside others, and attacks of who is not the operator: that takes root";
        Self { is_well, missing: if is_root { Vec::new() } else { vec![missing.to_owned()] } }
    }

    /// The same, where these are states that were compared.
    fn with_states<'a>(mut self, mut states: impl Iterator<Item = &'a State>) -> Self {
        if states.any(|state| state.n_hidden > 0) {
            self.missing.push(
                "open files and memory of the daemon and its processes together: that takes root".to_owned(),
            );
        }
        self
    }
}

fn main() -> ExitCode {
    // The daemon is this program, too, and so are the processes that it starts.
    if trellis::cli::is_child() || std::env::args().nth(1).as_deref() == Some("serve") {
        return trellis::cli::main();
    }
    let told = Told::parse();
    let outcome = match &told.role {
        Some(Role::Neighbour { folder }) => {
            processes::be_neighbour(folder).map(|()| Found::ALL_WELL).map_err(Into::into)
        }
        Some(Role::Attacker { folder, orders }) => be_attackers(folder, orders).map(|()| Found::ALL_WELL),
        Some(Role::Lone { folder, orders }) => be_lone(folder, orders).map(|()| Found::ALL_WELL),
        Some(Role::Visitor { folder, orders }) => be_visitors(folder, orders).map(|()| Found::ALL_WELL),
        None => run(&told),
    };
    match outcome {
        Ok(Found { is_well, missing }) => {
            for missing in &missing {
                eprintln!("attacks: not shown: {missing}");
            }
            match (is_well, missing.is_empty()) {
                (false, _) => ExitCode::FAILURE,
                (true, true) => ExitCode::SUCCESS,
                (true, false) => ExitCode::from(SKIPPED),
            }
        }
        Err(error) => {
            eprintln!("attacks: {error}");
            ExitCode::FAILURE
        }
    }
}

fn be_attackers(folder: &Path, orders: &str) -> Outcome<()> {
    let orders: Orders = serde_json::from_str(orders)?;
    Ok(processes::be_attackers(folder, &orders)?)
}

fn be_lone(folder: &Path, orders: &str) -> Outcome<()> {
    Ok(alone::be_lone(folder, serde_json::from_str(orders)?)?)
}

fn be_visitors(folder: &Path, orders: &str) -> Outcome<()> {
    Ok(sessions::be_visitors(folder, &serde_json::from_str(orders)?)?)
}

fn run(told: &Told) -> Outcome<Found> {
    let is_name = |filter: &str| table().iter().any(|attack| attack.name == filter);
    let is_wanted = |attack: &Attack| {
        let is_in = |filter: &String| match is_name(filter) {
            true => attack.name == filter,
            false => attack.name.contains(filter) || attack.category.name().contains(filter),
        };
        told.only.is_empty() || told.only.iter().any(is_in)
    };
    let attacks: Vec<Attack> = table().into_iter().filter(is_wanted).collect();
    if attacks.is_empty() {
        return Err(format!("no attack has {} in its name", told.only.join(" or ")).into());
    }
    if told.list {
        return match list(&attacks) {
            // Who reads the list has seen enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Found::ALL_WELL),
            listed => Ok(listed.map(|()| Found::ALL_WELL)?),
        };
    }
    let of_one = |is_well| Found { is_well, missing: Vec::new() };
    if let Some(n_kills) = told.kills {
        return kill(told, n_kills).map(of_one);
    }
    if told.alone {
        return leave_alone(told).map(of_one);
    }
    if let Some(n_sessions) = told.sessions {
        return visit(told, n_sessions);
    }
    if told.memory {
        return take_memory(told, Duration::from_secs_f64(60.0 * told.minutes.unwrap_or(1.0)));
    }
    if let Some(minutes) = told.minutes {
        return mix(told, Duration::from_secs_f64(60.0 * minutes));
    }
    if told.pace { measure(told, &attacks).map(Found::of_users) } else { attack_once(told, &attacks) }
}

fn list(attacks: &[Attack]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for attack in attacks {
        let ends: Vec<String> = attack
            .ends
            .iter()
            .map(|end| end.name.map_or(end.code.to_owned(), |name| format!("{} {name}", end.code)))
            .collect();
        let (name, category, n_copies) = (attack.name, attack.category.name(), attack.n_copies);
        writeln!(
            out,
            "{name:<30}{category:<22}{n_copies:>4}  {:?} -> {}",
            attack.attacker,
            ends.join(" or ")
        )?;
    }
    writeln!(out, "{} attacks", attacks.len())
}

/// The daemon's executable, and the settings that it was given, on the processor.
fn settings(told: &Told) -> Outcome<(PathBuf, Config)> {
    let trellis = told.trellis.clone().map_or_else(std::env::current_exe, Ok)?;
    let config = told.config.as_deref().map_or_else(|| Ok(Config::default()), Config::load)?;
    let isolation = match config.isolation {
        _ if told.by_process => Isolation::Process,
        // Both modes are attacked, whoever runs this.
        Isolation::Auto => Isolation::Thread,
        told => told,
    };
    Ok((trellis, Config { device: Device::Cpu, isolation, ..config }))
}

fn daemon(told: &Told, change: impl FnOnce(Config) -> Config) -> Outcome<Daemon> {
    daemon_in(None, told, change)
}

fn daemon_in(group: Option<&Group>, told: &Told, change: impl FnOnce(Config) -> Config) -> Outcome<Daemon> {
    let clients = std::env::current_exe()?;
    let (trellis, config) = settings(told)?;
    let cache_dir = Some(trellis.with_file_name("attacks-cache"));
    let config = change(Config { cache_dir, ..config });
    let hostile = Component::new(guests::hostile());
    Ok(Daemon::start_in(group, &trellis, &clients, &config, &hostile)?)
}

fn write(told: &Told, found: &impl Serialize) -> Outcome<()> {
    if let Some(path) = &told.json {
        std::fs::write(path, serde_json::to_string_pretty(found)?)?;
    }
    Ok(())
}

fn attack_once(told: &Told, attacks: &[Attack]) -> Outcome<Found> {
    let mut suite = suite::Suite::begin(daemon(told, suite::config)?, Component::new(guests::hostile()))?;
    println!("before: {:?}", suite.before());
    let mut reports = Vec::new();
    for attack in attacks
        .iter()
        .filter(|attack| !attack.is_of_a_stranger || suite.has_users())
        .copied()
        .collect::<Vec<_>>()
    {
        let report = suite.attack(&attack)?;
        let is_well = report.complaints.is_empty();
        let mark = if is_well { "ok  " } else { "FAIL" };
        println!(
            "{mark} {:<30}{:<22}{:>6} ms{:>7} MiB  {}",
            report.name,
            report.category,
            report.back_ms,
            report.state.resident_kb / 1024,
            if is_well { report.ends.line() } else { report.complaints.join("; ") }
        );
        reports.push(report);
        write(told, &reports)?;
    }
    let failed: Vec<&str> =
        reports.iter().filter(|report| !report.complaints.is_empty()).map(|report| report.name).collect();
    println!(
        "{} attacks, {} failed{}{}",
        reports.len(),
        failed.len(),
        if failed.is_empty() { "" } else { ": " },
        failed.join(", ")
    );
    let states = reports.iter().map(|report| &report.state);
    Ok(Found::of_users(failed.is_empty()).with_states(states.chain([suite.before()])))
}

fn measure(told: &Told, attacks: &[Attack]) -> Outcome<bool> {
    let mut track = pace::Track::begin(daemon(told, pace::config)?)?;
    let attacks: Vec<Attack> =
        attacks.iter().filter(|attack| !attack.is_of_a_stranger || track.has_users()).copied().collect();
    let minutes = |time: Duration| (time.as_secs_f64() / 60.0).ceil();
    let n_all = attacks.len();
    println!(
        "{n_all} attacks, for each {} windows alone and {} attacked of {} s: about {:.0} minutes",
        told.rounds,
        told.rounds,
        told.seconds,
        minutes(pace::estimate(n_all, told.seconds, told.rounds))
    );
    println!("{:>8}{:>10}  {}", "done", "left", pace::Row::head());
    let begun = Instant::now();
    let mut rows = Vec::new();
    for attack in &attacks {
        let n_copies = told.copies.unwrap_or(attack.n_copies);
        let row = track.measure(attack, n_copies, told.seconds, told.rounds)?;
        rows.push(row);
        let n_done = rows.len();
        let left = begun.elapsed() * (n_all - n_done) as u32 / n_done as u32;
        let line = rows[n_done - 1].line();
        println!("{:>8}{:>6.0} min  {line}", format!("{n_done}/{n_all}"), minutes(left));
        write(told, &rows)?;
    }
    let over: Vec<&str> = rows.iter().filter(|row| !row.over().is_empty()).map(|row| row.name).collect();
    println!(
        "{} attacks, {} over (pace below {:.0} %, silence, info or stop above {} ms, encode above {} ms, or another \
         end){}{}",
        rows.len(),
        over.len(),
        100.0 * pace::PACE_MIN,
        pace::MS_MAX,
        pace::ENCODE_MS_MAX,
        if over.is_empty() { "" } else { ": " },
        over.join(", ")
    );
    Ok(over.is_empty())
}

fn leave_alone(told: &Told) -> Outcome<bool> {
    let daemon = daemon(told, alone::config)?;
    println!("{}", alone::Row::head());
    let rows = alone::run(daemon, told.seconds, &|row| println!("{}", row.line()))?;
    write(told, &rows)?;
    Ok(!rows.iter().any(alone::Row::is_missed))
}

fn mix(told: &Told, time: Duration) -> Outcome<Found> {
    let report = mixed::run(daemon(told, suite::config)?, time, told.seed, &|line| println!("{line}"))?;
    write(told, &report)?;
    println!("{} attacks of {} names", report.n_attacks, report.ends.len());
    println!("before: {:?}", report.before);
    println!("after:  {:?}, at most {} MiB in memory", report.after, report.resident_kb_max / 1024);
    let found = Found::of_users(is_well(&report.neighbours, &report.complaints));
    Ok(found.with_states([&report.before, &report.after].into_iter()))
}

/// Says what neighbours had and what is wrong; whether nothing is.
fn is_well(neighbours: &[Window], complaints: &[String]) -> bool {
    for window in neighbours {
        println!(
            "a neighbour: {} tokens, {:.0} a second, {} wrong, silent for {:.0} ms at most",
            window.n_tokens,
            window.pace(),
            window.n_wrong,
            window.silence_ms
        );
    }
    for complaint in complaints {
        println!("FAIL {complaint}");
    }
    complaints.is_empty()
}

fn visit(told: &Told, n_sessions: usize) -> Outcome<Found> {
    let visits = Visits { n_sessions, n_at_once: told.at_once, seed: told.seed };
    let report = sessions::run(daemon(told, sessions::config)?, visits, &|line| println!("{line}"))?;
    write(told, &report)?;
    for (moment, tally) in &report.by_moment {
        println!("{moment:<45}{}", tally.line());
    }
    println!(
        "{} sessions in {:.0} s at {} moments, at most {} MiB in memory",
        report.n_sessions,
        report.seconds,
        report.by_moment.len(),
        report.resident_kb_max / 1024
    );
    println!("before: {:?}", report.before);
    println!("after:  {:?}", report.after);
    let found = Found::of_users(is_well(&report.neighbours, &report.complaints));
    Ok(found.with_states([&report.before, &report.after].into_iter()))
}

fn take_memory(told: &Told, time: Duration) -> Outcome<Found> {
    let limit_bytes = told.cgroup_mib << 20;
    let (group, missing) = match Group::make(limit_bytes) {
        Ok(group) => (Some(group), None),
        Err(error) => {
            println!(
                "no control group: the daemon is told how much guests may have, and memory is summed up"
            );
            let missing = format!(
                "a daemon that a control group holds to {} MiB: none can be made ({error})",
                told.cgroup_mib
            );
            (None, Some(missing))
        }
    };
    let change = |config| memory::config(config, limit_bytes, group.is_some());
    let daemon = daemon_in(group.as_ref(), told, change)?;
    let report = memory::run(daemon, group.as_ref(), limit_bytes, time, &|line| println!("{line}"))?;
    write(told, &report)?;
    for (name, tally) in &report.ends {
        println!("{name:<30}{}", tally.line());
    }
    let mib = |n_bytes: u64| n_bytes >> 20;
    let (own_kb, all_kb) = report.resident_kb_max;
    println!("{} attacks of {} names", report.n_attacks, report.ends.len());
    println!(
        "of {} MiB guests may have {}; in memory were at most {} MiB of the daemon, {} with all that it started",
        mib(limit_bytes),
        mib(report.host_bytes),
        own_kb >> 10,
        all_kb >> 10
    );
    if let (Some(peak), Some(n_killed)) = (report.peak_bytes, report.n_killed) {
        println!("the group had at most {} MiB, files that were read included; {n_killed} killed", mib(peak));
    }
    println!("before: {:?}", report.before);
    println!("after:  {:?}", report.after);
    let found = Found::of_users(is_well(&report.neighbours, &report.complaints));
    let mut found = found.with_states([&report.before, &report.after].into_iter());
    found.missing.extend(missing);
    Ok(found)
}

fn kill(told: &Told, n_kills: usize) -> Outcome<bool> {
    let (trellis, config) = settings(told)?;
    let report = killed::run(&trellis, &config, n_kills, told.seed, &|line| println!("{line}"))?;
    write(told, &report)?;
    for line in report.lines() {
        println!("{line}");
    }
    for complaint in &report.complaints {
        println!("FAIL {complaint}");
    }
    Ok(report.complaints.is_empty())
}
