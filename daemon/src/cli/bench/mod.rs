//! `trellis bench`: verifies first, then measures.

mod engine;
mod error;
mod guest;
mod host;
mod isolation;
mod load;
mod mix;
mod report;
mod samples;
mod server;
mod speed;
mod targets;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::Args;
use trellis_engine::batch::Token;

pub(crate) use self::error::BenchError;
use self::report::Report;
use self::speed::SpeedArgs;
use self::targets::TARGET_MODEL;
use super::cargo;
use super::connect::read_component;
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format};
use super::resolve::{self, Named};
use crate::config::Device;

const EXAMPLES: &str = "\
Examples:
  trellis bench                 measures everything on the bundled model
  trellis bench --check         the same, and fails when a target is missed
  trellis bench --model ./Llama-3.2-1B --contexts 8 --json
  trellis bench --shape llama-3.1-8b --batch 1,32,256 --prompt 2048,8192
  trellis bench --shape llama-3.2-1b --ops
  trellis bench --model ./Llama-3.2-1B --guest --batch 1,64
  trellis bench --mix list      names of mixed loads that come with the program
  trellis bench --mix prompts-beside-streams --shape llama-3.1-8b --device cuda
  trellis bench --mix ./my.toml --model tiny --device cpu
  trellis bench --host          what a step costs the processor, over a device that computes nothing
  trellis bench --isolation     what guests in a process of their own cost, beside guests in threads

A mix is a file such as
  measure_s = 10

  [[load]]
  kind = \"streams\"    # contexts that decode without end
  count = 8
  prompt = 128        # tokens

  [[load]]
  kind = \"prompts\"    # so many under way at all times
  count = 1
  prompt = 512";

/// The guest that it runs.
const GUEST: &str = "probe";

/// Measure speed and memory, of the engine alone and through guests
#[derive(Debug, Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", mix::programs_help()))]
pub(crate) struct BenchArgs {
    /// Measure with this model: a bundled name (tiny, draft), a folder or a GGUF file
    #[arg(long, value_name = "NAME|PATH", default_value = TARGET_MODEL)]
    model: String,
    /// What runs the model; by default the CPU, or with --batch and the like a GPU if there is one. A GPU alone is
    /// measured as with --batch
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
    /// Tokens of each stream; 256, or 128 of each context with --batch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    tokens: Option<u32>,
    /// Contexts that are decoded at once, 32 if not said; --batch is for those of a GPU
    #[arg(long, conflicts_with = "speed", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    contexts: Option<u32>,
    /// How often each thing is measured; the medians are shown. 9, or 5 with --batch or --prompt
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: Option<u32>,
    /// The guest `probe`, built already; by default it is built from its crate
    #[arg(long, value_name = "FILE")]
    guest_wasm: Option<PathBuf>,
    /// Fail when a target is missed; the targets are for `tiny` on two cores
    #[arg(long, conflicts_with_all = ["model", "device", "tokens", "contexts", "speed"])]
    check: bool,
    /// Run loads of several kinds side by side, as a file or a name describes them; `list` lists the names
    #[arg(long, value_name = "FILE|NAME", conflicts_with_all = ["check", "contexts", "tokens", "repeat", "batch", "context", "prompt", "guest", "ops", "peers"])]
    mix: Option<String>,
    /// Measure what a step costs the engine's thread, over a device that computes nothing; --batch and --context choose
    /// the sizes
    #[arg(long, conflicts_with_all = ["check", "contexts", "tokens", "repeat", "prompt", "guest", "ops", "peers", "model", "device", "shape", "dtype", "mix", "guest_wasm"])]
    host: bool,
    /// Measure launches, host calls and streams of guests in threads of a daemon and in processes of their own, in turns
    #[arg(long, conflicts_with_all = ["contexts", "host", "mix", "speed"])]
    isolation: bool,
    #[command(flatten)]
    speed: SpeedArgs,
}

impl BenchArgs {
    /// Whether batches and prompts are measured, and not what the targets are for.
    ///
    /// # Errors
    /// `--contexts` is no size of these.
    fn is_speed(&self) -> Result<bool, BenchError> {
        match (self.speed.is_asked(), self.device, self.contexts) {
            (false, Some(Device::Cuda), Some(n_contexts)) => Err(BenchError::ContextsOfGpu { n_contexts }),
            (is_asked, device, _) => Ok(is_asked || device == Some(Device::Cuda)),
        }
    }
}

pub(crate) async fn bench(args: BenchArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    if let Some(name) = &args.mix {
        return interrupts.stop(mix::bench(&args, name, format)).await;
    }
    if args.host {
        return interrupts.stop(host::bench(&args, format)).await;
    }
    if args.isolation {
        return interrupts.stop(isolation::bench(&args, format)).await;
    }
    if args.is_speed()? {
        return interrupts.stop(speed::bench(&args, format)).await;
    }
    let report = interrupts.stop(targets::measure(&args, format)).await?;
    output::print(format, &report, Report::render)?;
    let names = report.missed();
    if args.check && !names.is_empty() {
        return Err(BenchError::Missed { names }.into());
    }
    Ok(())
}

/// The guest as a component: this file, or built now.
async fn probe_component(file: Option<&Path>, format: Format) -> Result<Bytes, CliError> {
    if let Some(file) = file {
        return read_component(file).await;
    }
    let probe = resolve::resolve(GUEST, &resolve::example_folders())?;
    let Named::Crate(probe) = probe else { return Err(BenchError::NoProbe.into()) };
    read_component(&cargo::build(&probe, format).await?).await
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
