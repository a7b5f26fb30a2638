//! `trellis unload`: takes a model out of the running daemon.

use std::pin::pin;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::timeout;

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format, escaped_line};
use super::seconds::seconds;

const EXAMPLES: &str = "\
Examples:
  trellis unload draft                guests that use it have 30 seconds to come to their ends
  trellis unload draft --drain 0      they end at once, with `model_unloaded`

New contexts are refused at once, and of contexts saved under a name the files are left. Meanwhile `trellis
models` shows it as draining; to unload it again with a shorter --drain hurries it. Interrupting the command does not
take it back. For who has the permission `load`: the operator, unless the configuration says otherwise.";

/// After so long it is said what is waited for.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// Unload a model from the running daemon
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct UnloadArgs {
    /// Its name in `trellis models`
    #[arg(value_name = "NAME")]
    model: String,
    /// How many seconds its guests have to come to their ends
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    drain: Option<Duration>,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Serialize)]
struct Unloaded {
    unloaded: String,
    /// The model that guests get from now on when they name none.
    default_model: Option<String>,
}

pub(crate) async fn unload(args: UnloadArgs, format: Format) -> Result<(), CliError> {
    let UnloadArgs { model, drain, socket } = args;
    let client = socket.connect(format).await?;
    let name = model.clone();
    let mut unloading = pin!(client.unload_model(&name, drain));
    let default_model = match timeout(SILENCE_MAX, &mut unloading).await {
        Ok(unloaded) => unloaded?,
        Err(_) => {
            let shown = escaped_line(&model);
            let hint = format!("guests still use {shown}; `trellis unload {shown} --drain 0` ends them");
            output::note(format, &hint);
            unloading.await?
        }
    };
    let unloaded = Unloaded { unloaded: model, default_model };
    output::print(format, &unloaded, |Unloaded { unloaded, default_model }| {
        let unloaded = escaped_line(unloaded);
        match default_model {
            Some(default) => format!("unloaded {unloaded}; the default model is {}", escaped_line(default)),
            None => format!("unloaded {unloaded}; no model is loaded now"),
        }
    })
}
