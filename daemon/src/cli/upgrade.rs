//! `trellis upgrade`: puts another program in the place of the running daemon's.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use trellis_client::UpgradeInfo;

use super::connect::SocketArgs;
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format};

const EXAMPLES: &str = "\
Examples:
  trellis upgrade                             what lies now where the daemon was started from
  trellis upgrade --program /opt/trellis-2/bin/trellis
  docker exec trellis trellis upgrade --program /usr/local/bin/trellis.new
  kill -USR2 PID                              as the first; what has come of it is in the log

The program is asked first: for its version, and whether it would start with the command line of the daemon (`trellis serve ... --check`).
If it would not, the daemon serves on and nothing has changed. Else the daemon takes on nothing more, lets what runs come to its end, up to
sessions.drain_ms (10 s), ends what is left, which hears shutting_down and may be tried again, and becomes that program: the same
process, the same command line, the same socket. Whoever connects meanwhile waits for it. If a start fails that was found well, as where
memory does not suffice, the process ends as any that cannot start.

Waits until the next daemon serves. For the operator: root, and the user that the daemon runs as. Where systemd keeps the socket, `systemctl
restart` with the name of the service does the same, and takes the settings of its unit as well.

Exit status: 0 the next daemon serves, 2 the program was refused or did not come to serve, or no daemon runs.";

/// Put another program in the place of the running daemon, without refusing anybody
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct UpgradeArgs {
    /// The program; otherwise what lies where the daemon was started from
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    #[command(flatten)]
    socket: SocketArgs,
}

/// What has come of it.
#[derive(Serialize)]
struct Upgraded {
    program: String,
    /// What the daemon before said of its build.
    before: String,
    /// What this one says.
    after: String,
    took_ms: u64,
}

pub(crate) async fn upgrade(args: UpgradeArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let program = args.program.map(std::path::absolute).transpose();
    let program = program.map_err(CliError::io("find the current folder"))?;
    let program = program.map(|path| path.into_os_string().into_string());
    let program = program.transpose().map_err(|path| CliError::NotUtf8 { path: path.into() })?;
    let begun = Instant::now();
    let client = args.socket.connect(format).await?;
    let (before, socket) = (client.daemon_build().to_owned(), client.socket().map(Path::to_owned));
    let UpgradeInfo { program, version, n_at_work, drain_ms } = client.upgrade(program.as_deref()).await?;
    let seconds = drain_ms as f64 / 1_000.0;
    let waits = match (n_at_work, drain_ms) {
        (0, _) | (_, 0) => String::new(),
        (n, _) => format!(", once {n} at work have ended, or in {seconds} s"),
    };
    output::note(format, &format!("{program} ({version}) takes the place of the daemon{waits}"));
    drop(client);
    let socket = SocketArgs { socket: Some(socket.ok_or(CliError::NoSocketPlace)?) };
    // Who comes from now on is answered by the next one.
    let after = interrupts
        .stop(async {
            let answered = async {
                let client = socket.connect(format).await?;
                client.info().await?;
                Ok::<_, CliError>(client.daemon_build().to_owned())
            };
            answered.await.map_err(|error| match error {
                CliError::Client(error) => CliError::NoSuccessor(error),
                error => error,
            })
        })
        .await?;
    let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    let upgraded = Upgraded { program, before, after, took_ms };
    output::print(format, &upgraded, |Upgraded { before, after, took_ms, .. }| {
        format!("upgraded from {before} to {after} in {took_ms} ms")
    })
}
