//! `trellis load`: puts a model into the running daemon.

use clap::Args;
use serde::Serialize;

use super::connect::SocketArgs;
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format, escaped_line};
use super::progress::{ProgressDisplay, Unit};
use crate::bundled;
use crate::config::Device;

const EXAMPLES: &str = "\
Examples:
  trellis load draft                       a bundled model, beside those that are there
  trellis load ./Llama-3.2-1B              a folder on the daemon's machine
  trellis load ./Llama-3.2-1B --device cuda:1

Models that are loaded already go on meanwhile, and give up KV memory for the new one as far as they have more
than their share. For the user that the daemon runs as, and root.";

/// Load a model into the running daemon
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LoadArgs {
    /// A bundled model (tiny, draft) or a folder
    #[arg(value_name = "NAME|PATH")]
    model: String,
    /// Where it is to run: cpu, cuda, or cuda:N for one GPU of several; where the daemon's models run otherwise
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Serialize)]
struct Loaded {
    /// The name that guests ask for.
    loaded: String,
    /// What was asked for.
    from: String,
}

pub(crate) async fn load(args: LoadArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let LoadArgs { model, device, socket } = args;
    let client = socket.connect().await?;
    // The daemon looks from a folder of its own.
    let is_folder = !bundled::NAMES.contains(&model.as_str()) && std::path::Path::new(&model).is_dir();
    let model = match is_folder {
        true => std::path::absolute(&model)
            .map_err(CliError::io("find the current folder"))?
            .display()
            .to_string(),
        false => model,
    };
    let progress = ProgressDisplay::new(format);
    let device = device.map(String::from);
    let title = format!("loading {model}");
    let loading = client.load_model(&model, device.as_deref(), |done, total| {
        progress.update(&title, Unit::Bytes, done, total);
    });
    let loaded = interrupts.stop(async { Ok(loading.await?) }).await?;
    progress.finish();
    output::print(format, &Loaded { loaded, from: model }, |Loaded { loaded, from }| {
        let name = escaped_line(loaded);
        if loaded == from {
            format!("loaded {name}")
        } else {
            format!("loaded {name} from {}", escaped_line(from))
        }
    })
}
