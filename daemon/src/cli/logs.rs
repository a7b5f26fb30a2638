//! `trellis logs`: what the daemon says of itself.

use std::borrow::Cow;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde::de::IgnoredAny;
use trellis_client::{Error, ErrorCode, LogLines};

use super::connect::SocketArgs;
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format, escaped_line};

const EXAMPLES: &str = "\
Examples:
  trellis logs                 the newest lines, as many as the daemon keeps
  trellis logs -n 20           20 of them
  trellis logs -f              and those that come, until Ctrl-C or the daemon's end
  trellis logs -f -n 0 --json | jq -r .line

For root and the user who runs the daemon. It keeps the newest lines in memory, up to log_bytes of its configuration, whatever
runs it; what it said before it was started again is where its service manager keeps it: `journalctl -u trellis`, for systemd.
How much it says is decided by log, or --log of `trellis serve`, and how by log_format: text, json or journald.

Exit status: 0 printed, or the daemon that was followed has ended; 2 no daemon is running, or this user may not; 130 interrupted.";

/// Lines that come within this time are asked for together.
const PAUSE: Duration = Duration::from_millis(50);

/// Show the daemon's log
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LogsArgs {
    /// Go on with the lines that come
    #[arg(short, long)]
    follow: bool,
    /// Begin with so many of the newest lines; with all that are kept otherwise
    #[arg(short = 'n', long = "lines", value_name = "N")]
    n_lines: Option<u64>,
    #[command(flatten)]
    socket: SocketArgs,
}

/// A line, for programs.
#[derive(Serialize)]
struct Line<'a> {
    line: &'a str,
}

pub(crate) async fn logs(args: LogsArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    interrupts.stop(show(args, format)).await
}

async fn show(args: LogsArgs, format: Format) -> Result<(), CliError> {
    let client = args.socket.connect(format).await?;
    let mut lines = client.logs(args.n_lines).await?;
    // What is said meanwhile is for those who follow.
    let end = lines.end;
    loop {
        if !args.follow {
            let n_beyond = usize::try_from(lines.next.saturating_sub(end)).unwrap_or(usize::MAX);
            lines.lines.truncate(lines.lines.len().saturating_sub(n_beyond));
        }
        print(&lines, format)?;
        let is_all = lines.lines.is_empty();
        if !args.follow && (is_all || lines.next >= end) {
            return Ok(());
        }
        if !is_all && args.follow {
            tokio::time::sleep(PAUSE).await;
        }
        lines = match client.logs_from(lines.next, args.follow).await {
            Ok(lines) => lines,
            Err(error) if args.follow && has_ended(&error) => {
                output::note(format, "the daemon has ended");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
    }
}

fn print(LogLines { lines, n_missed, .. }: &LogLines, format: Format) -> Result<(), CliError> {
    if *n_missed > 0 {
        output::remark(&format!("trellis: {n_missed} lines came faster than they were read, and are gone"));
    }
    for line in lines {
        match format {
            Format::Text => output::print_line(&shown(line))?,
            Format::Json => output::print_line(&output::to_json(&Line { line }))?,
        }
    }
    Ok(())
}

/// A line that no terminal obeys, and that stays JSON where it is.
fn shown(line: &str) -> Cow<'_, str> {
    let is_json = line.starts_with('{') && serde_json::from_str::<IgnoredAny>(line).is_ok();
    if is_json { output::escaped_json(line).into() } else { escaped_line(line) }
}

/// Whether the daemon goes down, or is gone.
fn has_ended(error: &Error) -> bool {
    matches!(error, Error::ConnectionLost(_)) || error.code() == Some(&ErrorCode::ShuttingDown)
}
