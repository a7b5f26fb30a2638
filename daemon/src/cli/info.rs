//! `trellis info`: the daemon as a whole.

use clap::Args;
use trellis_client::{DaemonInfo, ModelInfo};

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format, escaped_line};

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
    let client = args.socket.connect().await?;
    let info = client.info().await?;
    let models = match format {
        Format::Text => client.models().await?,
        Format::Json => Vec::new(),
    };
    output::print(format, &info, |info| lines(info, &models))
}

fn shown(model: &ModelInfo) -> String {
    let failed = if model.failure.is_some() { ", its engine has ended" } else { "" };
    format!("{} ({}{failed})", model.name, model.dtype)
}

fn lines(info: &DaemonInfo, models: &[ModelInfo]) -> String {
    let models: Vec<_> = models.iter().map(shown).collect();
    let programs = if info.programs.is_empty() { "none".to_owned() } else { info.programs.join(", ") };
    let state = info.failure.as_ref().map_or("running".to_owned(), |failure| format!("FAILED: {failure}"));
    let lines = [
        ("build", info.build.clone()),
        ("process", info.pid.to_string()),
        ("device", info.device.clone()),
        ("models", models.join(", ")),
        ("programs", programs),
        ("state", state),
        ("up for", output::duration_ms(info.uptime_ms)),
        ("memory", output::bytes(info.resident_bytes)),
        ("KV pages", format!("{} of {} free", info.n_pages_free, info.n_pages)),
        ("guests", info.n_guests.to_string()),
        ("sessions", info.n_sessions.to_string()),
    ];
    lines.iter().map(|(name, value)| format!("{name:<10}{}\n", escaped_line(value))).collect()
}
