//! `cargo run --release -p trellis-tests --bin simulate`: plays scenes of daemon, scheduler, sessions and clients in virtual
//! time, with faults, and says which seed breaks what must hold.

use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use trellis_tests::sim::{self, Mutation, Summary};

/// Play scenes of daemon, scheduler, sessions and clients on one thread each, in virtual time, with faults
///
/// A scene follows from its seed alone: who connects, what guests do, what fails and when. Connections are cut, readers are slow,
/// allocations and steps fail, guests are dropped where they wait or go on without their connection, models and the daemon go. What clients are told is held
/// against a model that knows no pages and no batches, and nothing may be left at the end. The first seeds that break what must
/// hold end the run, with the line that plays each of them again.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  cargo run --release -p trellis-tests --bin simulate                            10,000 seeds, two at a time
  cargo run --release -p trellis-tests --bin simulate -- --seeds 100000          a night's
  cargo run --release -p trellis-tests --bin simulate -- --seed 4711 --trace     one, event by event")]
struct Told {
    /// How many seeds
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    seeds: u64,
    /// The first of them
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    from: u64,
    /// Play this seed alone
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seeds", "from", "jobs"])]
    seed: Option<u64>,
    /// Print what happens in it, each event in its moment
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Have the simulated parts make a mistake, which is to be noticed
    #[arg(long, value_name = "NAME", value_parser = mutation)]
    mistake: Option<Mutation>,
    /// How many scenes at a time
    #[arg(long, value_name = "N", default_value = "2")]
    jobs: NonZeroUsize,
}

fn mutation(name: &str) -> Result<Mutation, String> {
    let known = || Mutation::ALL.iter().map(|known| known.name()).collect::<Vec<_>>().join(", ");
    let found = Mutation::ALL.iter().find(|known| known.name() == name);
    found.copied().ok_or_else(|| format!("there are {}", known()))
}

/// Failures after which no more seeds are played.
const N_FAILURES_MAX: usize = 5;

fn main() -> ExitCode {
    let told = Told::parse();
    match told.seed {
        Some(seed) => one(seed, told.mistake, told.trace),
        None => many(&told),
    }
}

fn one(seed: u64, mistake: Option<Mutation>, prints: bool) -> ExitCode {
    let outcome = sim::run(seed, mistake, prints);
    let mut out = std::io::stdout().lock();
    for line in &outcome.lines {
        // A reader that has seen enough.
        if write!(out, "{line}").is_err() {
            break;
        }
    }
    let (digest, n_events, elapsed) = (outcome.digest, outcome.n_events, outcome.elapsed);
    let _ = writeln!(out, "seed {seed}: {n_events} events in {elapsed:?} of virtual time, digest {digest}");
    match outcome.violation {
        None => ExitCode::SUCCESS,
        Some(violation) => {
            let _ = writeln!(out, "violation: {violation}");
            ExitCode::FAILURE
        }
    }
}

fn many(told: &Told) -> ExitCode {
    let begun = Instant::now();
    let shows = std::io::stderr().is_terminal();
    let progress = |summary: &Summary| {
        if shows && summary.n_seeds.is_multiple_of(100) {
            eprint!("\r{} of {} seeds, {:.0?}", summary.n_seeds, told.seeds, begun.elapsed());
        }
    };
    let end = told.from.saturating_add(told.seeds);
    let summary = sim::run_all(told.from..end, told.jobs.get(), N_FAILURES_MAX, told.mistake, progress);
    if shows {
        eprintln!();
    }
    let Summary { n_seeds, n_events, elapsed, longest, failures, .. } = &summary;
    println!("{n_seeds} seeds in {:.1?}: {n_events} events, digest {:016x}", begun.elapsed(), summary.digest);
    println!("{elapsed:.0?} of virtual time, {longest:.1?} of them in the longest scene");
    for (name, n) in summary.faults() {
        println!("{n:>10} {name}");
    }
    let mistake = told.mistake.map_or(String::new(), |mistake| format!(" --mistake {}", mistake.name()));
    for (seed, violation) in failures {
        println!("\nseed {seed}: {violation}");
        println!("  cargo run --release -p trellis-tests --bin simulate -- --seed {seed} --trace{mistake}");
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
