//! `trellis bench`: verifies first, then measures.

mod engine;
mod guest;
mod load;
mod report;
mod server;

use std::time::Duration;

use clap::Args;
use trellis_engine::EngineHandle;
use trellis_engine::batch::Token;
use trellis_engine::model::EncodeError;

use self::guest::Probe;
use self::report::{Quantity, Report, Targets};
use self::server::{Scratch, Server};
use super::cargo;
use super::connect::{self, DeviceArg, read_component};
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format};
use super::progress::{Progress, Unit};
use super::resolve::{self, Named};
use crate::config::{Config, Device};

const EXAMPLES: &str = "\
Examples:
  trellis bench                 measures everything on the bundled model
  trellis bench --check         the same, and fails when a target is missed
  trellis bench --model ./Llama-3.2-1B --contexts 8 --json";

/// The guest that it runs.
const GUEST: &str = "probe";

/// The model and the contexts that the targets are for.
const TARGET_MODEL: &str = "tiny";
const N_TARGET_CONTEXTS: u32 = 32;

const N_PREFILL_TOKENS: usize = 512;
const N_FIRST_TOKENS: usize = 128;
const N_STARTS: usize = 5;
const N_LAUNCHES: usize = 101;

/// Measure speed and memory, of the engine alone and through guests
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Measure with this model: a bundled name (tiny, draft) or a folder
    #[arg(long, value_name = "NAME|PATH", default_value = TARGET_MODEL)]
    model: String,
    /// What runs the model
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceArg,
    /// Tokens of each stream
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,
    /// Contexts that are decoded at once
    #[arg(long, value_name = "N", default_value_t = N_TARGET_CONTEXTS, value_parser = clap::value_parser!(u32).range(1..=1024))]
    contexts: u32,
    /// How often each thing is measured; the medians are shown
    #[arg(long, value_name = "N", default_value = "9", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Fail when a target is missed; the targets are for `tiny` on two cores
    #[arg(long, conflicts_with_all = ["model", "device", "tokens", "contexts"])]
    check: bool,
}

/// Why there is nothing to report, or nothing good.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error(
        "the guest {GUEST:?} is not in ./guest-examples, nor in the checkout that this program was built from"
    )]
    NoProbe,
    #[error("a prompt of {n_prompt} and {n_tokens} tokens do not fit in a context of {n_positions}")]
    TooManyTokens { n_prompt: usize, n_tokens: usize, n_positions: usize },
    #[error("{wanted} tokens were asked for and {got} came")]
    Short { wanted: usize, got: usize },
    #[error("greedy decoding differs {place}: token {idx} is {found}, alone it is {expected}")]
    Mismatch { place: String, idx: usize, expected: Token, found: Token },
    #[error("the daemon did not do as asked: {said}")]
    Server { said: String },
    #[error("targets missed: {}", .names.join(", "))]
    Missed { names: Vec<&'static str> },
    #[error(transparent)]
    Engine(#[from] trellis_engine::EngineError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl BenchError {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Mismatch { .. } | Self::Missed { .. } | Self::Short { .. } => 1,
            _ => 2,
        }
    }
}

pub(crate) async fn bench(args: BenchArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let report = interrupts.stop(measure(&args, format)).await?;
    output::print(format, &report, Report::render)?;
    let names = report.missed();
    if args.check && !names.is_empty() {
        return Err(BenchError::Missed { names }.into());
    }
    Ok(())
}

async fn measure(args: &BenchArgs, format: Format) -> Result<Report, CliError> {
    let probe = resolve::resolve(GUEST, &resolve::example_folders())?;
    let Named::Crate(probe) = probe else { return Err(BenchError::NoProbe.into()) };
    let component = read_component(&cargo::build(&probe, format).await?).await?;

    let progress = Progress::of_long_work(format);
    let step = |done, title: &str| progress.update(title, Unit::Items, done, 0);
    let (n_tokens, n_contexts, n_runs) = (args.tokens as usize, args.contexts as usize, args.repeat as usize);

    step(0, "looking at what else runs");
    let busy_percent = load::busy_percent().await;
    step(0, "starting daemons");
    let scratch = Scratch::new()?;
    let config = Config {
        models: vec![args.model.clone()],
        device: Device::from(args.device),
        socket: Some(scratch.path().join("trellis.sock")),
        cache_dir: Some(scratch.path().join("cache")),
        ..Config::default()
    };
    let mut ready = Vec::new();
    for _ in 1..N_STARTS {
        let server = Server::start(&config, &scratch).await?;
        ready.push(server.ready);
        server.stop().await?;
    }
    let server = Server::start(&config, &scratch).await?;
    ready.push(server.ready);
    let resident_ready = server.resident_bytes().await?;

    step(0, "loading the model and compiling the guest");
    let inside = connect::start(&config, format).await?;
    let engine = inside.engine(None).expect("a daemon has a model").clone();
    let probe = Probe::prepare(server.client.clone(), component).await?;
    let prompt = engine::prompt(&engine)?;
    check_length(&engine, prompt.len(), n_tokens)?;

    step(0, "verifying");
    let alone = engine::stream(&engine, &prompt, n_tokens).await?.tokens;
    let (together, _) = engine::contexts(&engine, &prompt, n_tokens, n_contexts).await?;
    for tokens in &together {
        compare(&format!("in a batch of {n_contexts}"), &alone, tokens)?;
    }
    compare("through guest, socket and client", &alone, &probe.stream(n_tokens).await?.tokens)?;

    let is_standard = args.model == TARGET_MODEL && args.contexts == N_TARGET_CONTEXTS;
    let mut report = Report {
        device: engine.device().to_owned(),
        model: engine.model().name.clone(),
        n_tokens,
        n_contexts,
        verified: format!(
            "{n_tokens} greedy tokens are the same alone, in a batch of {n_contexts}, and through guest, socket and client"
        ),
        busy_percent,
        measures: Vec::new(),
        targets: if is_standard { Targets::Apply } else { Targets::Ignore },
    };

    step(0, "measuring one stream, with and without a guest");
    let (mut alone, mut through, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    for run in 0..n_runs {
        // In pairs, either one first, so that whatever else the machine does disturbs both alike.
        let (engine, guest) = if run % 2 == 0 {
            let engine = engine::stream(&engine, &prompt, n_tokens).await?.rate();
            (engine, probe.stream(n_tokens).await?.rate())
        } else {
            let guest = probe.stream(n_tokens).await?.rate();
            (engine::stream(&engine, &prompt, n_tokens).await?.rate(), guest)
        };
        alone.push(engine);
        through.push(guest);
        costs.push((engine / guest - 1.0) * 100.0);
    }
    report.push(Quantity::Stream, alone);
    report.push(Quantity::GuestStream, through);
    report.push(Quantity::GuestOverhead, costs);

    step(0, &format!("measuring {n_contexts} contexts"));
    let mut rates = Vec::new();
    for _ in 0..n_runs {
        rates.push(engine::contexts(&engine, &prompt, n_tokens, n_contexts).await?.1);
    }
    report.push(Quantity::Contexts, rates);

    step(0, "measuring prompts");
    let n_positions = engine.limits().n_positions_max;
    let (mut rates, mut firsts) = (Vec::new(), Vec::new());
    for run in 0..n_runs {
        rates.push(
            engine::prefill(&engine, N_PREFILL_TOKENS.min(n_positions), run)
                .await
                .map_err(BenchError::from)?,
        );
        firsts.push(
            engine::first_token(&engine, N_FIRST_TOKENS.min(n_positions - 1), run).await?.as_secs_f64() * 1e3,
        );
    }
    report.push(Quantity::Prefill, rates);
    report.push(Quantity::FirstToken, firsts);
    drop(inside);

    step(0, "measuring launches and host calls");
    let (mut to_output, mut in_host, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..N_LAUNCHES {
        let launch = probe.launch().await?;
        to_output.push(micros(launch.to_output));
        in_host.push(micros(launch.in_host));
    }
    for _ in 0..n_runs {
        calls.push(micros(probe.host_call().await?));
    }
    report.push(Quantity::LaunchInHost, in_host);
    report.push(Quantity::LaunchToOutput, to_output);
    report.push(Quantity::HostCall, calls);

    report.push(Quantity::DaemonReady, ready.iter().map(|ready| ready.as_secs_f64() * 1e3).collect());
    report.push(Quantity::ResidentReady, vec![resident_ready as f64 / 1e6]);
    report.push(Quantity::ResidentUsed, vec![server.resident_bytes().await? as f64 / 1e6]);
    server.stop().await?;
    Ok(report)
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn check_length(engine: &EngineHandle, n_prompt: usize, n_tokens: usize) -> Result<(), BenchError> {
    let n_positions = engine.limits().n_positions_max;
    if n_prompt + n_tokens > n_positions {
        return Err(BenchError::TooManyTokens { n_prompt, n_tokens, n_positions });
    }
    Ok(())
}

fn compare(place: &str, expected: &[Token], found: &[Token]) -> Result<(), BenchError> {
    if expected.len() != found.len() {
        return Err(BenchError::Short { wanted: expected.len(), got: found.len() });
    }
    match expected.iter().zip(found).enumerate().find(|(_, (expected, found))| expected != found) {
        Some((idx, (&expected, &found))) => {
            Err(BenchError::Mismatch { place: place.to_owned(), idx, expected, found })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        assert!(compare("here", &[1, 2], &[1, 2]).is_ok());
        let error = compare("in a batch", &[1, 2, 3], &[1, 5, 4]).expect_err("they differ");
        assert_eq!(error.to_string(), "greedy decoding differs in a batch: token 1 is 5, alone it is 2");
        assert_eq!(error.exit_code(), 1);
        assert!(matches!(compare("here", &[1, 2], &[1]), Err(BenchError::Short { wanted: 2, got: 1 })));
    }
}
