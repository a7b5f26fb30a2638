//! `trellis doctor`: whether this machine has what Trellis needs, and what to do where it has not.
//!
//! - Comes in: the machine, and the settings that a daemon would have.
//! - Goes out: a [`report`]: the verdict, and each finding with its code and its remedy. One file for each check.
//! - A finding is a problem where a daemon with these settings would not work, or could not be reached; anything else is a note.
//!   The exit status says whether there is a problem.
//! - Must not happen: a check that changes what it looks at, or waits without end; a check that asks for less than a daemon
//!   does: models, libraries and settings are looked at by the code that uses them.

mod cache;
mod cpu;
mod finding;
mod folders;
mod gpu;
mod isolation;
mod memory;
mod models;
mod nodes;
mod report;
mod settings;
mod socket;

use std::path::{Path, PathBuf};

use clap::Args;
use trellis_client::socket::default_socket;
use trellis_engine::model::Model;

use self::finding::{Check, Code, Finding};
use self::folders::Runner;
use self::gpu::Gpus;
use self::memory::Room;
use self::report::{Report, Shown};
use self::socket::Daemon;
use super::access::Identity;
use super::connect::{socket_of_environment, socket_told};
use super::error::CliError;
use super::output::{self, Format};
use super::served;
use super::service;
use crate::config::{Config, Device};
use crate::device::{self, Chosen, KERNELS_DIR};

const EXAMPLES: &str = "\
Examples:
  trellis doctor                      the verdict, and what to do about each thing that was found
  trellis doctor --verbose            all that was looked at as well, with paths and versions
  trellis doctor --config trellis.toml    for a daemon with this file: its models, memory, folders, socket, classes, permissions and policy
  trellis doctor --json | jq -r '.findings[] | select(.weight == \"problem\") | .code'

Of the file of the service the folders are looked at as its user finds them.

Exit status: 0 all works, with an NVIDIA GPU or without one; 1 there is a problem.";

/// Say whether Trellis works on this machine, and what to do where it does not
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Look at what a daemon with this TOML file would have
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Show all that was looked at, with paths and versions
    #[arg(long, short)]
    verbose: bool,
}

pub(crate) async fn doctor(args: DoctorArgs, format: Format) -> Result<(), CliError> {
    let DoctorArgs { config: file, verbose } = args;
    let (of_settings, config) = settings::check(file.as_deref());
    let config = served::with_isolation(file.as_deref(), config);
    let who = Identity::this_process();
    let told = socket_told(None, socket_of_environment(), &config);
    let (of_socket, daemon) = socket::check(told.as_deref(), &who, socket::ANSWER_MAX).await;
    let of_isolation =
        isolation::check(config.isolation, &told.or_else(default_socket).unwrap_or_default()).await;
    let runner = runner(file.as_deref(), &who);
    let looking = tokio::task::spawn_blocking(move || {
        let of_folders = folders::check(&config, &runner);
        // What this process compiles is not for the cache of another user.
        let config = match runner {
            Runner::Own(_) => config,
            Runner::Service { .. } => Config { cache_dir: None, ..config },
        };
        // First, so that the cache of kernels is made inside a private folder.
        let (of_cache, cache_dir) = cache::check(&config);
        let gpus = Gpus::look(config.device, cache_dir.as_ref().map(|dir| dir.join(KERNELS_DIR)).as_deref());
        let (mut of_models, models) = models::check(&config);
        let declared = models::check_declared(&config, &models, &mut of_models);
        let mut checks = vec![of_settings, gpus.check()];
        if gpus.is_wanted() {
            let mut of_nodes = nodes::check(Path::new(nodes::DEV), &who);
            if gpus.usable().is_some() {
                // Others than the one that works may be kept for others.
                of_nodes.findings.iter_mut().for_each(Finding::weigh_less);
            }
            checks.push(of_nodes);
        }
        checks.extend([cpu::check(), of_models]);
        checks.extend(check_memory((&models, &declared), &config, &gpus, cache_dir.as_deref(), daemon));
        checks.extend([of_cache, of_folders, of_socket, of_isolation]);
        if file.is_some() {
            checks.extend([settings::check_classes(&config), settings::check_permissions(&config)]);
            checks.push(settings::check_policy(&config));
        }
        Report::new(checks, gpus)
    });
    let report = looking.await.expect("looking at the machine does not panic");
    let shown = if verbose { Shown::All } else { Shown::Findings };
    output::print(format, &report, |report| report.render(shown))?;
    if report.is_healthy() { Ok(()) } else { Err(CliError::Unhealthy) }
}

/// Who a daemon with this file runs as: the user of the service, if the file is the service's.
fn runner(file: Option<&Path>, own: &Identity) -> Runner {
    match file.and_then(service::user_of) {
        Some(user) => {
            let known = Identity::of_user(&user).ok().flatten();
            let who = known.unwrap_or_else(|| Identity::stranger(&user));
            Runner::Service { who, has_socket: service::lent_socket().is_some() }
        }
        None => Runner::Own(own.clone()),
    }
}

/// On the device that models run on; nothing where that cannot be used, which is said of it.
fn check_memory(
    models: (&[Model], &[Model]),
    config: &Config,
    gpus: &Gpus,
    cache_dir: Option<&Path>,
    daemon: Daemon,
) -> Option<Check> {
    let chosen = match (gpus.is_wanted(), gpus.usable()) {
        (true, None) => return None,
        (true, Some(_)) => device::choose(config.device, cache_dir?),
        (false, _) => device::choose(Device::Cpu, Path::new("")),
    };
    let room = |chosen: Chosen| Room::of(&chosen).map(|room| (chosen, room));
    Some(match chosen.and_then(room) {
        Ok((chosen, room)) => memory::check(models, config, &chosen, room, daemon),
        Err(error) => {
            let said = format!("the memory of the device is not known: {error}");
            Check::found(
                "memory",
                Finding::problem(Code::MemoryUnknown, said, "`nvidia-smi` should work first"),
            )
        }
    })
}
