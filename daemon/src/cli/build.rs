//! `trellis build`: makes a component of a guest's crate.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::cargo;
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format};
use super::resolve;

const EXAMPLES: &str = "\
Examples:
  trellis build my-guest                    builds it and says where the component is
  trellis build my-guest -o my-guest.wasm   puts a copy there";

/// Build a guest's crate into a component
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BuildArgs {
    /// The crate's folder, or an example's name
    #[arg(value_name = "FOLDER")]
    folder: String,
    /// Also put the component here
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
}

#[derive(Serialize)]
struct Built {
    path: PathBuf,
    bytes: u64,
}

pub(crate) async fn build(args: BuildArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let folder = resolve::crate_folder(&args.folder)?;
    let mut path = interrupts.stop(cargo::build(&folder, format)).await?;
    if let Some(output) = args.output {
        let doing = format!("write {}", output.display());
        tokio::fs::copy(&path, &output).await.map_err(CliError::io(doing))?;
        path = output;
    }
    let metadata =
        tokio::fs::metadata(&path).await.map_err(CliError::io(format!("look at {}", path.display())))?;
    let built = Built { path, bytes: metadata.len() };
    output::print(format, &built, |built| {
        format!("{} ({})", built.path.display(), output::bytes(built.bytes))
    })
}
