//! `cargo run -p trellis-tests --bin fuzz`: fuzzes what strangers send, with what `tests/oracles` holds against it.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use trellis_oracles::{TARGETS, fresh_seed};
use trellis_tests::fuzz::on_device::{self, DevicePlan};
use trellis_tests::fuzz::{self, Plan};

/// Fuzz what strangers send: frames, recordings, model files, grammars, programs, operations
///
/// Builds the targets of tests/fuzz through cargo-fuzz and runs them, some at a time, for so many minutes each. Every minute a
/// line says for each how many inputs were tried, how much of the code they have reached, and how many of them are worth
/// keeping. The first input for which something does not hold ends all: it is made small, and the last lines say where it lies
/// and how to see it again.
///
/// It needs a nightly toolchain and cargo-fuzz, and says how to get them where they are missing; with `--device` it needs neither.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  cargo run -p trellis-tests --bin fuzz                           all targets, 30 minutes each, two at a time
  cargo run -p trellis-tests --bin fuzz -- --minutes 2 frames     one target, for a look
  cargo run -p trellis-tests --bin fuzz -- --keep frames grammars and keep what reached more than what was kept
  cargo run -p trellis-tests --bin fuzz -- --device programs      logit programs on a CUDA device, beside the processor")]
struct Told {
    /// Say which targets there are, and end
    #[arg(long)]
    list: bool,
    /// How long each target runs
    #[arg(long, value_name = "M", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: u64,
    /// How many targets run at a time
    #[arg(long, value_name = "N", default_value = "2")]
    at_once: NonZeroUsize,
    /// Leave out the targets of the daemon, and with them wasmtime, which takes most of the time of a build
    #[arg(long)]
    no_daemon: bool,
    /// Put the inputs that reach most, as far as there is room, into tests/fuzz/corpus in the place of those that are there
    #[arg(long)]
    keep: bool,
    /// Where corpora grow and builds lie, unless CARGO_TARGET_DIR says otherwise
    #[arg(long, value_name = "FOLDER")]
    target_dir: Option<PathBuf>,
    /// Run logit programs on the first CUDA device and on the processor, which have to give the same bits: what is kept of the
    /// target `programs`, and what is made of it for so many minutes
    #[arg(long, conflicts_with_all = ["keep", "no_daemon", "target_dir"])]
    device: bool,
    /// With --device: inputs in the place of those in tests/fuzz; more than once for more folders
    #[arg(long, value_name = "FOLDER", requires = "device")]
    corpus: Vec<PathBuf>,
    /// With --device: a seed that was said, to make the same inputs again; of the clock otherwise
    #[arg(long, value_name = "SEED", requires = "device")]
    seed: Option<u64>,
    /// Targets; all when none is named
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
}

fn main() -> ExitCode {
    // The daemon starts processes of the program that it is in.
    if trellis::cli::is_child() {
        return trellis::cli::main();
    }
    let told = Told::parse();
    if told.list {
        for target in TARGETS {
            println!("{:<12} {}", target.name, target.about);
        }
        return ExitCode::SUCCESS;
    }
    if told.device {
        return on_the_device(told);
    }
    let plan = Plan {
        targets: told.targets,
        minutes: told.minutes,
        n_at_once: told.at_once,
        has_daemon: !told.no_daemon,
        keeps: told.keep,
        target_dir: told.target_dir,
    };
    match fuzz::run(&plan) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(finding)) => {
            println!("\n{finding}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("fuzz: {error}");
            ExitCode::from(2)
        }
    }
}

fn on_the_device(told: Told) -> ExitCode {
    if let Some(other) = told.targets.iter().find(|name| **name != on_device::TARGET) {
        eprintln!("fuzz: {other:?} does not run on a device; {} does", on_device::TARGET);
        return ExitCode::from(2);
    }
    let plan = DevicePlan {
        corpora: told.corpus,
        time: Duration::from_secs(60 * told.minutes),
        seed: told.seed.unwrap_or_else(fresh_seed),
    };
    match on_device::run(&plan) {
        Ok((counts, None)) => {
            println!("{counts}");
            ExitCode::SUCCESS
        }
        Ok((counts, Some(difference))) => {
            println!(
                "{counts}\n\n{}\nthe device gives something else for {}",
                difference.about,
                difference.input.display()
            );
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("fuzz: {error}");
            ExitCode::from(2)
        }
    }
}
