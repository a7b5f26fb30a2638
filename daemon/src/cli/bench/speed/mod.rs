//! Batches and prompts on one model, against what the device can do: verified first, then measured.

mod args;
mod decode;
mod guest;
mod ops;
mod peers;
mod regret;
mod report;
mod work;

use trellis_cuda::{Card, DeviceLimits};
use trellis_engine::ModelHandle;
use trellis_engine::batch::Token;
use trellis_engine::model::Dtype;

pub(crate) use self::args::SpeedArgs;
pub(super) use self::decode::Tolerance;
use self::peers::Peers;
pub(super) use self::regret::check_streams;
pub(super) use self::report::ms;
use self::report::{Bound, Case, SpeedReport};
use self::work::Work;
use super::guest::Probe;
use super::{BenchArgs, BenchError, engine, probe_component};
use crate::cli::connect;
use crate::cli::error::CliError;
use crate::cli::output::{self, Format};
use crate::cli::progress::{ProgressDisplay, Unit};
use crate::config::{Config, Device, DtypeChoice, Sizes};
use crate::daemon::{DaemonError, SHAPE_PREFIX, cache_dir};
use crate::device::{self, Chosen};
use crate::guest::make_private;

/// Tokens of each context, and how often each thing is measured, when nothing else is asked for.
const N_TOKENS: u32 = 128;
const N_RUNS: u32 = 5;

/// Prompts that are timed are numbered from here on: no batch has one of them in the prefix cache.
const PREFILL_RUN: usize = 1 << 20;

/// Measures and prints.
///
/// # Errors
/// The model or the device cannot be used, a batch decodes something else than a context alone, or a peer is faster.
pub(crate) async fn bench(args: &BenchArgs, format: Format) -> Result<(), CliError> {
    if args.speed.ops {
        let report = ops::measure(args, format).await?;
        args.speed.save(&report)?;
        return output::print(format, &report, ops::OpsReport::render);
    }
    let report = measure(args, format).await?;
    args.speed.save(&report)?;
    output::print(format, &report, SpeedReport::render)?;
    Ok(report.check_peers()?)
}

/// The daemon's settings, with steps that take `n_contexts`.
pub(super) fn config(args: &BenchArgs, n_contexts: usize) -> Config {
    let model = match &args.speed.shape {
        Some(shape) => format!("{SHAPE_PREFIX}{shape}"),
        None => args.model.clone(),
    };
    let usual = Config::default();
    let n_guests = u32::try_from(n_contexts).unwrap_or(u32::MAX).max(usual.limits.n_guests);
    let mut limits = usual.limits.clone();
    (limits.n_guests, limits.n_guests_per_user) = (n_guests, n_guests);
    Config {
        models: vec![model],
        device: args.device.map_or(usual.device, Device::from),
        dtype: args.speed.dtype.map_or(usual.dtype, DtypeChoice::from),
        // As users have it, unless that is not enough.
        n_step_rows: (n_contexts > Sizes::CPU.n_step_rows.min(Sizes::CUDA.n_step_rows)).then_some(n_contexts),
        limits,
        ..usual
    }
}

/// The card, if the daemon would use one.
pub(super) fn choose(config: &Config) -> Result<Option<Card>, CliError> {
    let chosen = || -> Result<Chosen, DaemonError> {
        let dir = cache_dir(config).ok_or(DaemonError::NoCacheDir)?;
        make_private(&dir)?;
        device::choose(config.device, &dir)
    };
    match chosen().map_err(Box::new)? {
        Chosen::Cuda { card, .. } => Ok(Some(card)),
        Chosen::Cpu => Ok(None),
    }
}

async fn measure(args: &BenchArgs, format: Format) -> Result<SpeedReport, CliError> {
    let peers = args.speed.peers.as_deref().map(Peers::load).transpose()?;
    let component = match args.speed.guest {
        true => Some(probe_component(args.guest_wasm.as_deref(), format).await?),
        false => None,
    };
    // The widest batch is known before the model is: only prompts depend on it.
    let n_contexts = args.speed.sizes(usize::MAX).batches.into_iter().max().unwrap_or(1);
    let config = config(args, n_contexts);
    let progress = ProgressDisplay::of_long_work(format);
    let limits = match choose(&config)? {
        Some(card) => {
            progress.update("measuring the device's limits", Unit::Items, 0, 0);
            let measuring = tokio::task::spawn_blocking(move || DeviceLimits::measure(&card));
            Some(measuring.await.expect("measuring does not panic").map_err(BenchError::from)?)
        }
        None => None,
    };
    progress.finish();
    let daemon = connect::start(&config, format).await?;
    let model = daemon.model(None).expect("a daemon has a model");
    let weights = model.weights();
    let mut report = SpeedReport {
        device: model.device().to_owned(),
        model: model.model().name.clone(),
        dtype: weights.dtype.name(),
        weight_bytes: weights.n_bytes,
        limits: limits.map(Into::into),
        rows: Vec::new(),
        guests: Vec::new(),
        peers,
    };
    let run = Run {
        model: &model,
        work: Work::new(&model.model().config, weights),
        n_tokens: args.tokens.unwrap_or(N_TOKENS) as usize,
        n_runs: args.repeat.unwrap_or(N_RUNS) as usize,
        tolerance: match (limits.is_some(), weights.dtype) {
            (false, _) => Tolerance::NONE,
            (true, Dtype::F32) => Tolerance::SINGLE,
            (true, Dtype::F16 | Dtype::Bf16) => Tolerance::HALF,
        },
        progress: &progress,
    };
    let sizes = args.speed.sizes(model.limits().n_positions_max);
    run.check(&sizes)?;
    if let Some(peers) = &report.peers {
        peers.check(&report.model, weights.dtype, &sizes.cases())?;
    }
    for &n_contexts in &sizes.batches {
        run.decode(&mut report, n_contexts, sizes.context_len).await?;
    }
    for &n_prompt in &sizes.prompts {
        run.prefill(&mut report, n_prompt).await?;
    }
    if let Some(component) = component {
        progress.update("compiling the guest", Unit::Items, 0, 0);
        let probe = Probe::prepare(daemon.connect().await?, component).await?;
        for &n_contexts in &sizes.batches {
            progress.update(&format!("measuring {n_contexts} guests"), Unit::Items, 0, 0);
            let cost =
                guest::compare(&model, &probe, n_contexts, run.n_tokens, run.n_runs, run.tolerance).await?;
            report.guests.push(cost);
        }
    }
    Ok(report)
}

/// What all measurements share.
struct Run<'a> {
    model: &'a ModelHandle,
    work: Work,
    n_tokens: usize,
    n_runs: usize,
    tolerance: Tolerance,
    progress: &'a ProgressDisplay,
}

impl Run<'_> {
    /// Finds out before anything is measured that something does not fit.
    fn check(&self, sizes: &args::Sizes) -> Result<(), BenchError> {
        let n_positions = self.model.limits().n_positions_max;
        let too_many = |n_prompt, n_tokens| BenchError::TooManyTokens { n_prompt, n_tokens, n_positions };
        for &n_contexts in &sizes.batches {
            let n_used = sizes.context_len + self.n_tokens;
            if n_used > n_positions {
                return Err(too_many(sizes.context_len, self.n_tokens));
            }
            decode::check_room(self.model, n_contexts, n_used)?;
        }
        for &n_prompt in &sizes.prompts {
            if n_prompt >= n_positions {
                return Err(too_many(n_prompt, 1));
            }
            decode::check_room(self.model, 1, n_prompt + 1)?;
        }
        Ok(())
    }

    async fn decode(
        &self,
        report: &mut SpeedReport,
        n_contexts: usize,
        n_prompt: usize,
    ) -> Result<(), BenchError> {
        let Self { model, n_tokens, .. } = *self;
        let prompts: Vec<Vec<Token>> =
            (0..n_contexts).map(|idx| engine::unseen(model, n_prompt, idx)).collect();
        self.progress.update(&format!("verifying {n_contexts} contexts"), Unit::Items, 0, 0);
        let agreement = decode::verify(model, &prompts, n_tokens, self.tolerance).await?;
        let (mut samples, mut n_bytes) = (Vec::new(), 0.0);
        for run in 0..self.n_runs {
            let title = format!("measuring {n_contexts} contexts");
            self.progress.update(&title, Unit::Items, run as u64, self.n_runs as u64);
            let decoded = decode::decode(model, &prompts, n_tokens).await?;
            let together = decode::together(&decoded, n_prompt)
                .ok_or(BenchError::NeverTogether { n_contexts, n_tokens })?;
            samples.push(together.step.as_secs_f64() * 1e3);
            n_bytes += self.work.decode_bytes(n_contexts, together.n_positions) / self.n_runs as f64;
        }
        report.push(Case::Decode { n_contexts, n_prompt }, samples, Bound::Bytes(n_bytes), Some(agreement));
        Ok(())
    }

    async fn prefill(&self, report: &mut SpeedReport, n_prompt: usize) -> Result<(), BenchError> {
        let title = format!("measuring prompts of {n_prompt}");
        let mut samples = Vec::new();
        // The first does not count: steps of a new size may have to be prepared.
        for run in 0..=self.n_runs {
            self.progress.update(&title, Unit::Items, run as u64, self.n_runs as u64);
            samples.push(
                engine::first_token(self.model, n_prompt, PREFILL_RUN + run).await?.as_secs_f64() * 1e3,
            );
        }
        samples.remove(0);
        let needed = Bound::Operations(self.work.prompt_operations(n_prompt));
        report.push(Case::Prefill { n_prompt }, samples, needed, None);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
