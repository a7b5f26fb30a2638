//! `trellis stop`: ends a guest, or the daemon.

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use trellis_client::{Client, Error, ErrorCode};

use super::connect::{self, SocketArgs};
use super::error::CliError;
use super::output::{self, Format};

const EXAMPLES: &str = "\
Examples:
  trellis stop 12          a guest, by its number in `trellis ps`
  trellis stop --daemon    the daemon, and with it all guests";

/// How long the end of a guest is waited for. What interrupts nothing, such as the encoding of a long text, comes to its own end
/// first.
const WAIT: Duration = Duration::from_secs(2);

/// The state in which a detached guest is listed once it has ended.
const ENDED: &str = "ended";

/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(20);

/// Stop a guest, or the daemon
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
#[group(id = "target", required = true, multiple = false, args = ["guest_id", "daemon"])]
pub(crate) struct StopArgs {
    /// The guest's number
    #[arg(value_parser = guest_number)]
    guest_id: Option<u64>,
    /// Stop the daemon
    #[arg(long)]
    daemon: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

/// The number of a guest. What is none is told where they are.
fn guest_number(text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| "expected the number of a guest, which `trellis ps` lists under GUEST".to_owned())
}

#[derive(Serialize)]
#[serde(tag = "stopped", rename_all = "snake_case")]
enum Stopped {
    Guest {
        guest_id: u64,
        /// Whether it has ended: in a host call that takes long it does so at the end of that.
        has_ended: bool,
    },
    Daemon,
}

pub(crate) async fn stop(args: StopArgs, format: Format) -> Result<(), CliError> {
    let client = args.socket.connect(format).await?;
    let stopped = match args.guest_id {
        Some(guest_id) => {
            client.stop(guest_id).await?;
            Stopped::Guest { guest_id, has_ended: has_ended(&client, guest_id).await? }
        }
        None => {
            connect::shut_down(&client).await?;
            Stopped::Daemon
        }
    };
    output::print(format, &stopped, |stopped| match stopped {
        Stopped::Guest { guest_id, has_ended: true } => format!("stopped guest {guest_id}"),
        Stopped::Guest { guest_id, has_ended: false } => format!(
            "guest {guest_id} was told to stop, and has not ended after {} s: `trellis ps` lists it until it has",
            WAIT.as_secs()
        ),
        Stopped::Daemon => "stopped the daemon".to_owned(),
    })
}

/// Waits until a guest has ended, for a while.
async fn has_ended(client: &Client, guest_id: u64) -> Result<bool, CliError> {
    let ended = async {
        loop {
            match client.ps().await {
                Ok(guests)
                    if !guests.iter().any(|guest| guest.guest_id == guest_id && guest.state != ENDED) =>
                {
                    return Ok(true);
                }
                Ok(_) => tokio::time::sleep(LOOK).await,
                // With its daemon.
                Err(Error::ConnectionLost(_)) => return Ok(true),
                Err(error) if error.code() == Some(&ErrorCode::ShuttingDown) => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    };
    tokio::time::timeout(WAIT, ended).await.unwrap_or(Ok(false))
}
