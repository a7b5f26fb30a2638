//! `trellis stop`: ends a guest, or the daemon.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::timeout;
use trellis_client::lock::{self, Seen};
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

/// How often it is looked, while a connection is waited for, whether the daemon still takes any.
const LOOK_AT_DAEMON: Duration = Duration::from_millis(200);

/// Stop a guest, or the daemon
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
#[group(id = "target", required = true, multiple = false, args = ["guest_id", "daemon"])]
pub(crate) struct StopArgs {
    /// The guest's number
    #[arg(value_parser = guest_number)]
    guest_id: Option<u64>,
    /// Stop the daemon; one that waits for what it is at is gone within a second, unless it takes no connections meanwhile, as where
    /// systemd has its socket or another program takes its place
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
    let stopped = match args.guest_id {
        Some(guest_id) => {
            let client = args.socket.connect(format).await?;
            client.stop(guest_id).await?;
            Stopped::Guest { guest_id, has_ended: has_ended(&client, guest_id).await? }
        }
        None => {
            let client = connect_to_this(&args.socket, format).await?;
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

/// Connects to the daemon that runs, and not to the one after it: who waits at the socket of one that takes no connections any more would
/// have that start, and stop it.
async fn connect_to_this(socket: &SocketArgs, format: Format) -> Result<Client, CliError> {
    let candidates = socket.candidates();
    check_takes_connections(&candidates)?;
    let mut connecting = pin!(socket.connect(format));
    loop {
        if let Ok(connected) = timeout(LOOK_AT_DAEMON, &mut connecting).await {
            return connected;
        }
        check_takes_connections(&candidates)?;
    }
}

/// Whether the daemon that is found at these sockets takes connections, as far as this user may know.
fn check_takes_connections(sockets: &[PathBuf]) -> Result<(), CliError> {
    let is_there = |socket: &&PathBuf| matches!(lock::look(socket), Seen::Held { .. } | Seen::Closed);
    let Some(socket) = sockets.iter().find(is_there) else { return Ok(()) };
    match lock::owner_of(socket) {
        Some(owner) if owner.is_on_its_way_out() => {
            Err(CliError::EndsAlready { socket: socket.display().to_string(), pid: owner.pid })
        }
        _ => Ok(()),
    }
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::ipc::Lock;

    #[tokio::test]
    async fn a_daemon_that_takes_no_connections_any_more_is_not_waited_past() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sock");
        // As a service manager's socket, which stays: the next daemon would be the one that is stopped.
        let listener = UnixListener::bind(&path).expect("a free place");
        listener.set_nonblocking(true).expect("it can be");
        let lock = Lock::take(&path).expect("nobody has it");
        let note = lock.note().expect("it is open");
        let stop = || {
            let socket = SocketArgs { socket: Some(path.clone()) };
            stop(StopArgs { guest_id: None, daemon: true, socket }, Format::Json)
        };
        let refused = |error: &CliError| matches!(error, CliError::EndsAlready { pid, .. } if *pid == std::process::id());
        for is_replaced in [false, true] {
            let said = if is_replaced { note.say_replaced(None) } else { note.say_ending() };
            said.expect("written");
            let error = stop().await.expect_err("it is on its way out");
            assert!(refused(&error), "{error}");
            let asked = listener.accept().expect_err("nobody has come");
            assert_eq!(asked.kind(), std::io::ErrorKind::WouldBlock);
        }
        // Where that begins while a connection is waited for.
        note.say_ready().expect("written");
        let waiting = tokio::spawn(stop());
        tokio::time::sleep(2 * LOOK_AT_DAEMON).await;
        assert!(!waiting.is_finished(), "it may still answer");
        note.say_ending().expect("written");
        let error = timeout(Duration::from_secs(60), waiting).await.expect("in time").expect("no panic");
        assert!(error.is_err_and(|error| refused(&error)));
    }
}
