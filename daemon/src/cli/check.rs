//! `trellis check`: whether a component would be taken as a guest, and what it asks for.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use trellis_client::Program;
use trellis_engine::account::ActorId;

use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format};
use super::resolve;
use super::run;
use crate::config::Config;
use crate::config::Isolation;
use crate::daemon::cache_dir;
use crate::guest::{About, BroughtBy, GuestHost, GuestHostConfig};
use crate::models::Models;

const EXAMPLES: &str = "\
Examples:
  trellis check my-guest          builds the crate, compiles the component as a daemon would, says what it wants
  trellis check guest.wasm        the same of a component
  trellis --json check guest.wasm for programs

The limits are those of a daemon without a configuration. No model is loaded and nothing of the guest runs.";

/// Say whether a guest would be accepted, and what it asks for
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CheckArgs {
    /// A component, the folder of a guest's crate, an example's name, or a guest of a registry (REGISTRY/NAME:TAG) or a folder (oci:FOLDER)
    #[arg(value_name = "PATH|NAME")]
    guest: String,
}

#[derive(Serialize)]
struct Checked {
    /// BLAKE3 of the component.
    hash: String,
    /// Its length.
    bytes: usize,
    bytes_max: usize,
    /// The package that it was written against; none if it imports nothing of it.
    world: Option<String>,
    #[serde(flatten)]
    about: About,
    memory_bytes_max: usize,
}

pub(crate) async fn check(args: CheckArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let checked = interrupts.stop(checked(&args.guest, format)).await?;
    output::print(format, &checked, text)
}

async fn checked(guest: &str, format: Format) -> Result<Checked, CliError> {
    let named = resolve::resolve(guest, &resolve::example_folders())?;
    let Program::Wasm(wasm) = run::program(&named, format).await? else {
        return Err(CliError::NoSuchPath { path: PathBuf::from(guest) });
    };
    let config = Config::default();
    let limits = config.limits.clone();
    let cache_dir = cache_dir(&config).ok_or(CliError::NoCacheHome)?;
    let models = Models::new(Vec::new(), Vec::new());
    let host = GuestHostConfig {
        limits: limits.clone(),
        cache_dir,
        compile_exe: config.compile_exe,
        isolation: Isolation::Thread,
        models,
    };
    let refused = |error| CliError::Refused { guest: guest.to_owned(), source: error };
    let host = GuestHost::for_replays(host).map_err(|error| refused(Arc::new(error)))?;
    let (bytes, hash) = (wasm.len(), blake3::hash(&wasm).to_string());
    let user = ActorId(rustix::process::geteuid().as_raw());
    let about = host.compile(user, BroughtBy::User, wasm, |_| {}).await.map_err(refused)?.about();
    Ok(Checked {
        hash,
        bytes,
        bytes_max: limits.component_bytes,
        world: about.imports.iter().find_map(|import| world(import)),
        about,
        memory_bytes_max: limits.memory_bytes,
    })
}

/// `trellis:host@0.2.0` of `trellis:host/models@0.2.0`.
fn world(import: &str) -> Option<String> {
    let (interface, version) = import.split_once('@')?;
    let (package, _) = interface.split_once('/')?;
    (package == "trellis:host").then(|| format!("{package}@{version}"))
}

fn text(checked: &Checked) -> String {
    let about = &checked.about;
    let of = |is_wasi: bool| {
        let names = about.imports.iter().filter(|name| name.starts_with("wasi:") == is_wasi);
        let names: Vec<&str> = names.map(|name| name.split('@').next().unwrap_or(name)).collect();
        if names.is_empty() { "nothing".to_owned() } else { names.join(", ").replace("trellis:host/", "") }
    };
    let bytes = |n: usize| output::bytes(n as u64);
    [
        format!("a guest      {}", if about.is_command { "with a `main`" } else { "with a `run`" }),
        format!("world        {}", checked.world.as_deref().unwrap_or("none: it asks nothing of a model")),
        format!("imports      {}", of(false)),
        format!("of WASI      {}", of(true)),
        format!("component    {} of {} at most", bytes(checked.bytes), bytes(checked.bytes_max)),
        format!("compiled     {}", bytes(about.code_bytes)),
        format!(
            "memory       {} to begin with, {} at most",
            bytes(about.memory_bytes),
            bytes(checked.memory_bytes_max)
        ),
        format!("hash         {}", checked.hash),
    ]
    .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_world_is_that_of_the_package_alone() {
        assert_eq!(world("trellis:host/models@0.2.0"), Some("trellis:host@0.2.0".to_owned()));
        assert_eq!(world("wasi:cli/stdout@0.2.6"), None);
        assert_eq!(world("trellis:host"), None);
    }
}
