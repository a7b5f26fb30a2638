//! What the bundled model has to reach on two cores, and what other models do reach of it.

use std::time::Duration;

use trellis_engine::ModelHandle;

use super::guest::Probe;
use super::report::{Quantity, Report, Targets};
use super::server::{Scratch, Server};
use super::{BenchArgs, BenchError, compare, engine, load, probe_component};
use crate::cli::connect;
use crate::cli::error::CliError;
use crate::cli::output::Format;
use crate::cli::progress::{ProgressDisplay, Unit};
use crate::config::{Config, Device};

/// The model and the contexts that the targets are for.
pub(super) const TARGET_MODEL: &str = "tiny";
const N_TARGET_CONTEXTS: u32 = 32;

/// Tokens of each stream, and how often each thing is measured, when nothing else is asked for.
const N_TOKENS: u32 = 256;
const N_RUNS: u32 = 9;

const N_PREFILL_TOKENS: usize = 512;
const N_FIRST_TOKENS: usize = 128;
const N_STARTS: usize = 5;
const N_LAUNCHES: usize = 101;

/// # Errors
/// Something differs between two ways to decode the same, or cannot be run.
pub(super) async fn measure(args: &BenchArgs, format: Format) -> Result<Report, CliError> {
    let component = probe_component(args.guest_wasm.as_deref(), format).await?;

    let progress = ProgressDisplay::of_long_work(format);
    let step = |done, title: &str| progress.update(title, Unit::Items, done, 0);
    let n_tokens = args.tokens.unwrap_or(N_TOKENS) as usize;
    let n_runs = args.repeat.unwrap_or(N_RUNS) as usize;
    let n_contexts = args.contexts.unwrap_or(N_TARGET_CONTEXTS) as usize;

    step(0, "looking at what else runs");
    let busy_percent = load::busy_percent().await;
    step(0, "starting daemons");
    let scratch = Scratch::new()?;
    let config = Config {
        models: vec![args.model.clone()],
        device: device(args),
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
    let model = inside.model(None).expect("a daemon has a model");
    let probe = Probe::prepare(server.client.clone(), component).await?;
    let prompt = engine::prompt(&model)?;
    check_length(&model, prompt.len(), n_tokens)?;

    step(0, "verifying");
    let alone = engine::stream(&model, &prompt, n_tokens).await?.tokens;
    let (together, _) = engine::contexts(&model, &prompt, n_tokens, n_contexts).await?;
    for tokens in &together {
        compare(&format!("in a batch of {n_contexts}"), &alone, tokens)?;
    }
    compare("through guest, socket and client", &alone, &probe.stream(n_tokens).await?.tokens)?;

    let is_standard = args.model == TARGET_MODEL
        && n_contexts == N_TARGET_CONTEXTS as usize
        && config.device == Device::Cpu;
    let mut report = Report {
        device: model.device().to_owned(),
        model: model.model().name.clone(),
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
            let engine = engine::stream(&model, &prompt, n_tokens).await?.rate();
            (engine, probe.stream(n_tokens).await?.rate())
        } else {
            let guest = probe.stream(n_tokens).await?.rate();
            (engine::stream(&model, &prompt, n_tokens).await?.rate(), guest)
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
        rates.push(engine::contexts(&model, &prompt, n_tokens, n_contexts).await?.1);
    }
    report.push(Quantity::Contexts, rates);

    step(0, "measuring prompts");
    let n_positions = model.limits().n_positions_max;
    let (mut rates, mut firsts) = (Vec::new(), Vec::new());
    for run in 0..n_runs {
        rates.push(
            engine::prefill(&model, N_PREFILL_TOKENS.min(n_positions), run)
                .await
                .map_err(BenchError::from)?,
        );
        firsts.push(
            engine::first_token(&model, N_FIRST_TOKENS.min(n_positions - 1), run).await?.as_secs_f64() * 1e3,
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

/// What the targets are for, unless something else is asked for.
pub(super) fn device(args: &BenchArgs) -> Device {
    args.device.unwrap_or(Device::Cpu)
}

pub(super) fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

pub(super) fn check_length(model: &ModelHandle, n_prompt: usize, n_tokens: usize) -> Result<(), BenchError> {
    let n_positions = model.limits().n_positions_max;
    if n_prompt + n_tokens > n_positions {
        return Err(BenchError::TooManyTokens { n_prompt, n_tokens, n_positions });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn parse(words: &[&str]) -> BenchArgs {
        Cli::try_parse_from(["bench"].iter().chain(words)).expect("valid").bench
    }

    #[test]
    fn the_targets_are_measured_on_the_cpu() {
        for words in [&[][..], &["--check"], &["--device", "cpu"], &["--contexts", "8"]] {
            let args = parse(words);
            assert_eq!((device(&args), args.is_speed().expect("valid")), (Device::Cpu, false), "{words:?}");
        }
        assert_eq!(device(&parse(&["--device", "auto"])), Device::Auto);
    }

    #[test]
    fn a_gpu_is_measured_in_batches() {
        assert!(parse(&["--device", "cuda"]).is_speed().expect("valid"));
        assert!(parse(&["--batch", "1"]).is_speed().expect("valid"));
        let error = parse(&["--device", "cuda", "--contexts", "8"]).is_speed().expect_err("no such size");
        assert!(error.to_string().contains("--batch 8"), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}
