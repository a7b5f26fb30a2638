//! `trellis stop`: ends a guest, or the daemon.

use clap::Args;
use serde::Serialize;

use super::connect::{self, SocketArgs};
use super::error::CliError;
use super::output::{self, Format};

const EXAMPLES: &str = "\
Examples:
  trellis stop 12          a guest, by its number in `trellis ps`
  trellis stop --daemon    the daemon, and with it all guests";

/// Stop a guest, or the daemon
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
#[group(id = "target", required = true, multiple = false, args = ["guest_id", "daemon"])]
pub(crate) struct StopArgs {
    /// The guest's number
    guest_id: Option<u64>,
    /// Stop the daemon
    #[arg(long)]
    daemon: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Serialize)]
#[serde(tag = "stopped", rename_all = "snake_case")]
enum Stopped {
    Guest { guest_id: u64 },
    Daemon,
}

pub(crate) async fn stop(args: StopArgs, format: Format) -> Result<(), CliError> {
    let client = args.socket.connect().await?;
    let stopped = match args.guest_id {
        Some(guest_id) => {
            client.stop(guest_id).await?;
            Stopped::Guest { guest_id }
        }
        None => {
            connect::shut_down(&client).await?;
            Stopped::Daemon
        }
    };
    output::print(format, &stopped, |stopped| match stopped {
        Stopped::Guest { guest_id } => format!("stopped guest {guest_id}"),
        Stopped::Daemon => "stopped the daemon".to_owned(),
    })
}
