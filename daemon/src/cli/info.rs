//! `trellis info`: the daemon as a whole.

use clap::Args;
use trellis_client::DaemonInfo;

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format};

const EXAMPLES: &str = "\
Examples:
  trellis info
  trellis info --json | jq .resident_bytes";

/// Show what the daemon is and how it is doing
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn info(args: InfoArgs, format: Format) -> Result<(), CliError> {
    let info = args.socket.connect().await?.info().await?;
    output::print(format, &info, lines)
}

fn lines(info: &DaemonInfo) -> String {
    let programs = if info.programs.is_empty() { "none".to_owned() } else { info.programs.join(", ") };
    let lines = [
        ("build", info.build.clone()),
        ("process", info.pid.to_string()),
        ("device", info.device.clone()),
        ("models", info.models.join(", ")),
        ("programs", programs),
        ("up for", output::duration_ms(info.uptime_ms)),
        ("memory", output::bytes(info.resident_bytes)),
        ("KV pages", format!("{} of {} free", info.n_pages_free, info.n_pages)),
        ("guests", info.n_guests.to_string()),
        ("sessions", info.n_sessions.to_string()),
    ];
    lines.iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect()
}
