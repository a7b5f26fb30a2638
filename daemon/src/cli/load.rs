//! `trellis load`: puts a model into the running daemon.

use clap::Args;
use serde::Serialize;
use trellis_client::FitInfo;

use super::connect::SocketArgs;
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format, escaped_line};
use super::progress::{ProgressDisplay, Unit};
use crate::config::Device;
use crate::model_path::is_path;

const EXAMPLES: &str = "\
Examples:
  trellis load draft                       a bundled model, beside those that are there
  trellis load ./Llama-3.2-1B              a folder on the daemon's machine
  trellis load ./Llama-3.2-1B-Q4_K_M.gguf  a GGUF file there
  trellis load ./Llama-3.2-1B --device cuda:1
  trellis load ~/.cache/huggingface/hub/models--meta-llama--Llama-3.2-1B
  trellis load --fit ./Llama-3.2-1B        whether there is room, before it is tried

Models that are loaded already go on meanwhile, and give up KV memory for the new one as far as they have more
than their share. Models of the daemon's catalog that nobody uses make room where there is too little. For who has the
permission `load`: the operator, unless the configuration says otherwise; with --fit also for others, about models of the catalog.
Such models are loaded without this command, when a guest asks for them.

Exit status of --fit: 0 there is room, if need be once models are unloaded that nobody uses; 1 there is none, or not now; 2 that cannot
be said: there is no such model, it or its device cannot be used, it is not for you to ask, or no daemon runs.";

/// Load a model into the running daemon
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LoadArgs {
    /// A bundled model (tiny, draft), a folder, also one of the Hugging Face cache, a GGUF file, or a model of the daemon's catalog
    #[arg(value_name = "NAME|PATH")]
    model: String,
    /// Where it is to run: cpu, cuda, or cuda:N for one GPU of several; where the daemon's models run otherwise
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
    /// Say what it needs and whether there is room for it, and load nothing
    #[arg(long)]
    fit: bool,
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
    let LoadArgs { model, device, fit, socket } = args;
    let client = socket.connect(format).await?;
    // The daemon looks from a folder of its own.
    let model = match is_path(&model) {
        true => std::path::absolute(&model)
            .map_err(CliError::io("find the current folder"))?
            .display()
            .to_string(),
        false => model,
    };
    let device = device.map(String::from);
    if fit {
        let fit = client.fit_model(&model, device.as_deref()).await?;
        output::print(format, &fit, fit_text)?;
        return if fit.fits { Ok(()) } else { Err(CliError::NoRoom) };
    }
    let progress = ProgressDisplay::new(format);
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

/// What there is to say of the room for a model.
fn fit_text(fit: &FitInfo) -> String {
    let name = escaped_line(&fit.model);
    let names =
        |models: &[String]| models.iter().map(|name| escaped_line(name)).collect::<Vec<_>>().join(", ");
    let verdict = match fit {
        FitInfo { is_loaded: true, .. } => format!("{name} is loaded"),
        FitInfo { fits: true, evicts, .. } if evicts.is_empty() => format!("{name} fits"),
        FitInfo { fits: true, evicts, .. } => {
            format!("{name} fits once {} made room, which nobody uses", have(&names(evicts), evicts.len()))
        }
        FitInfo { fits_later: true, used, .. } if used.is_empty() => {
            format!("{name} does not fit now: it would take the place of models that were loaded just now")
        }
        FitInfo { fits_later: true, used, .. } => {
            format!("{name} does not fit now: guests use {}, which would make room", names(used))
        }
        _ => format!("{name} does not fit"),
    };
    let FitInfo { needed_bytes, weight_bytes, step_bytes, kv_bytes, .. } = *fit;
    let bytes = output::bytes;
    format!(
        "{verdict}\nit needs {}: {} of weights, {} for steps, {} for the KV of a context of {} tokens\nthe models on {} leave {} of \
         {} that there are{}",
        bytes(needed_bytes),
        bytes(weight_bytes),
        bytes(step_bytes),
        bytes(kv_bytes),
        fit.n_positions,
        fit.device,
        bytes(fit.free_bytes),
        bytes(fit.capacity_bytes),
        match fit.evicts.as_slice() {
            [] => String::new(),
            evicts => format!(", and more without {}", names(evicts)),
        },
    )
}

fn have(names: &str, n_names: usize) -> String {
    format!("{names} {}", if n_names == 1 { "has" } else { "have" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_comes_first_and_names_what_is_in_the_way() {
        let first = |fit: FitInfo| {
            let fit = FitInfo { model: "small".to_owned(), ..fit };
            fit_text(&fit).lines().next().unwrap_or_default().to_owned()
        };
        let models = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let fits = FitInfo { fits: true, ..FitInfo::default() };
        assert_eq!(first(fits.clone()), "small fits");
        assert_eq!(
            first(FitInfo { evicts: models(&["a"]), ..fits.clone() }),
            "small fits once a has made room, which nobody uses"
        );
        assert_eq!(
            first(FitInfo { evicts: models(&["a", "b"]), ..fits }),
            "small fits once a, b have made room, which nobody uses"
        );
        let whole =
            FitInfo { model: "small".to_owned(), evicts: models(&["a"]), fits: true, ..FitInfo::default() };
        let whole = FitInfo {
            needed_bytes: 60,
            free_bytes: 10,
            capacity_bytes: 100,
            device: "cpu".to_owned(),
            ..whole
        };
        let last = "the models on cpu leave 10 B of 100 B that there are, and more without a";
        assert_eq!(fit_text(&whole).lines().last(), Some(last), "less is free than it needs, and it fits");
        let later = FitInfo { fits_later: true, used: models(&["a"]), ..FitInfo::default() };
        assert_eq!(first(later), "small does not fit now: guests use a, which would make room");
        assert_eq!(first(FitInfo::default()), "small does not fit");
    }
}
