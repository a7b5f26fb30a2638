//! `trellis bench --mix`: loads of several kinds, each alone and side by side.
//!
//! A file says which. Every load pulls its tokens as a guest does, and times are taken where it pulls.

mod catalog;
mod clients;
mod error;
mod fields;
mod file;
mod load;
mod loads;
mod member;
mod phase;
mod programs;
mod report;
mod search;
mod tally;

use std::sync::Arc;

use trellis_engine::model::Dtype;

use self::clients::Clients;
pub(crate) use self::error::MixError;
use self::file::Mix;
use self::load::Kind;
use self::loads::Operator;
use self::phase::{Reference, Seen, Stage, needs_guests, needs_operator};
pub(super) use self::programs::help as programs_help;
use self::report::MixReport;
use super::speed::{self, Tolerance};
use super::{BenchArgs, BenchError, engine, probe_component};
use crate::cli::connect;
use crate::cli::error::CliError;
use crate::cli::output::{self, Format};
use crate::cli::progress::{ProgressDisplay, Unit};
use crate::config::{Budgets, Config, SharedBudget};
use crate::daemon::Daemon;

/// What lists the mixes that come with the program.
const LIST: &str = "list";

/// Tokens of the stream that is decoded alone and beside the loads.
const N_VERIFIED: usize = 16;

/// Runs the mix of this name or path, and prints what it showed.
///
/// # Errors
/// The mix is not valid or does not fit, the model or the device cannot be used, a member failed, or a stream differs
/// beside the loads.
pub(super) async fn bench(args: &BenchArgs, name: &str, format: Format) -> Result<(), CliError> {
    if name == LIST {
        return output::print(format, &catalog::list(), catalog::render);
    }
    let mix = catalog::read(name).and_then(|text| Mix::parse(&text)).map_err(BenchError::from)?;
    let report = measure(args, name, &mix, format).await?;
    args.speed.save(&report)?;
    output::print(format, &report, MixReport::render)
}

async fn measure(args: &BenchArgs, name: &str, mix: &Mix, format: Format) -> Result<MixReport, CliError> {
    let component = match needs_guests(&mix.loads) {
        true => Some(probe_component(args.guest_wasm.as_deref(), format).await?),
        false => None,
    };
    let config = config(args, mix);
    let has_card = speed::choose(&config)?.is_some();
    let daemon = Arc::new(connect::start(&config, format).await?);
    let measured = measure_on(&daemon, has_card, component, name, mix, format).await;
    // After a failure as well: no device may go while its engine computes.
    tokio::task::spawn_blocking(move || drop(daemon)).await.expect("a daemon stops without a panic");
    measured
}

async fn measure_on(
    daemon: &Arc<Daemon>,
    has_card: bool,
    component: Option<bytes::Bytes>,
    name: &str,
    mix: &Mix,
    format: Format,
) -> Result<MixReport, CliError> {
    let model = daemon.model(None).expect("a daemon has a model");
    let progress = ProgressDisplay::of_long_work(format);
    if mix.has_programs() {
        // Until then the host draws, and the figures would be of that.
        progress.update("getting the device ready for logit programs", Unit::Items, 0, 0);
        daemon.wait_for_programs().await;
    }
    let prompt = engine::prompt(&model)?;
    progress.update("decoding what is compared later", Unit::Items, 0, 0);
    let reference = Reference {
        tokens: engine::stream(&model, &prompt, N_VERIFIED).await?.tokens,
        prompt,
        tolerance: match (has_card, model.weights().dtype) {
            (false, _) => Tolerance::NONE,
            (true, Dtype::F32) => Tolerance::SINGLE,
            (true, Dtype::F16 | Dtype::Bf16) => Tolerance::HALF,
        },
    };
    let clients = component.map(|component| Clients::new(daemon, component)).transpose()?;
    let operator = match needs_operator(&mix.loads) {
        true => Some(Operator::new(daemon, model.clone()).await?),
        false => None,
    };
    let second = match mix.second() {
        Some(name) => Some(Operator::new(daemon, model.clone()).await?.load_second(name).await?),
        None => None,
    };
    let stage = Stage {
        model: &model,
        second: second.as_ref(),
        mix,
        operator: operator.as_ref(),
        clients: clients.as_ref(),
        progress: &progress,
        reference: &reference,
    };
    let seen = run_phases(&stage).await;
    drop((operator, second));
    if let Some(clients) = clients {
        clients.end().await;
    }
    let mut report = MixReport {
        mix: name.to_owned(),
        about: mix.about.clone(),
        device: model.device().to_owned(),
        model: model.model().name.clone(),
        dtype: model.weights().dtype.name(),
        step_rows: model.limits().n_rows_max,
        step_tokens: model.limits().n_tokens_max,
        measure_s: mix.measure.as_secs_f64(),
        n_verified: N_VERIFIED,
        phases: Vec::new(),
    };
    report.extend(mix, &seen?);
    Ok(report)
}

async fn run_phases(stage: &Stage<'_>) -> Result<Vec<Seen>, CliError> {
    for phase in &stage.mix.phases {
        stage.check(phase).map_err(BenchError::from)?;
    }
    for load in &stage.mix.loads {
        if let (Some(clients), Kind::Clients(of)) = (stage.clients, &load.kind) {
            stage.progress.update("what a guest gives", Unit::Items, 0, 0);
            let is_search = of.n_beams.is_some();
            clients.verify(stage.model, load.n_prompt, is_search, stage.reference.tolerance).await?;
        }
    }
    let mut seen = Vec::new();
    for phase in &stage.mix.phases {
        seen.push(stage.run(phase).await?);
    }
    Ok(seen)
}

/// The daemon's settings, with room for the loads.
fn config(args: &BenchArgs, mix: &Mix) -> Config {
    let n_rows = mix.step_rows.unwrap_or(mix.n_rows());
    let mut config = speed::config(args, n_rows);
    if let Some(step_rows) = mix.step_rows {
        config.n_step_rows = Some(step_rows);
    }
    config.n_step_tokens = mix.step_tokens;
    if let Some(multiple) = mix.latency_multiple {
        config.latency_multiple = multiple;
    }
    let n_guests = u32::try_from(mix.n_guests()).unwrap_or(u32::MAX).saturating_add(1);
    config.limits.n_guests = config.limits.n_guests.max(n_guests);
    config.limits.n_guests_per_user = config.limits.n_guests_per_user.max(n_guests);
    let unlimited = SharedBudget::UNLIMITED;
    config.budgets = Budgets { session: unlimited, user: unlimited, daemon: unlimited };
    config
}

#[cfg(test)]
mod tests;
