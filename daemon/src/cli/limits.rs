//! `trellis limits`: every limit, who has set it, and what is in use of it.

use std::path::PathBuf;

use clap::Args;
use trellis_client::{ClassInfo, LimitInfo};

use super::connect::SocketArgs;
use super::error::CliError;
use super::info::shown_class;
use super::output::{self, Format};
use super::served;
use super::table::{Align, Table};
use crate::classes::Classes;
use crate::config::{Config, Device, Sizes};
use crate::daemon::DaemonError;
use crate::limits::{self, Scope, UNLIMITED, Unit};
use crate::machine;

const EXAMPLES: &str = "\
Examples:
  trellis limits                              all limits of the running daemon, and what you use of them
  trellis limits n_pages                      those with n_pages in their names, and what they bound
  trellis limits --config trellis.toml        of a daemon that would run with this file
  trellis limits --json | jq -r '.[] | select(.source == \"file\") | .name'

Names are those of the configuration: limits.cpu_ms is cpu_ms in its table [limits]. SET BY says where a number is from: the
default, the file, the machine (the device and its memory), the file's class that you are in, or the program that started the
daemon inside itself. IN USE is what you have in use; - is what is not counted, or what each guest or session has: `trellis ps --json` shows it of guests.
ALL USERS is what all have in use together, for who has the permission see_others.";

/// Show every limit, who has set it, and how much is in use
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LimitsArgs {
    /// Only limits with this in their names, with what they bound
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Show the limits of a daemon with this configuration instead of those of the running one
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    config: Option<PathBuf>,
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn limits(args: LimitsArgs, format: Format) -> Result<(), CliError> {
    let LimitsArgs { name, config, socket } = args;
    let (mut limits, class) = match config {
        Some(path) => {
            let config = served::with_isolation(Some(&path), Config::load(&path)?);
            // A daemon would not start with them.
            Classes::of(&config.classes).map_err(|error| Box::new(DaemonError::from(error)))?;
            (of_config(&config), None)
        }
        None => {
            let client = socket.connect(format).await?;
            (client.limits().await?, client.info().await?.class)
        }
    };
    if let Some(name) = &name {
        limits.retain(|limit| limit.name.contains(name.as_str()));
        if limits.is_empty() {
            return Err(CliError::NoSuchLimit { name: name.clone() });
        }
    }
    output::print(format, &limits, |limits| match &name {
        Some(_) => table(limits) + "\n" + &meanings(limits),
        None => table(limits) + &class.as_ref().map(of_class).unwrap_or_default(),
    })
}

/// What such a daemon would have. What only a device in use can tell is left open.
fn of_config(config: &Config) -> Vec<LimitInfo> {
    let mut limits = limits::table(config);
    limits::set_memory(&mut limits, config, machine::memory_bytes());
    match config.device {
        Device::Auto => {}
        Device::Cpu => limits::set_sizes(&mut limits, &Sizes::CPU),
        Device::Cuda | Device::Ordinal(_) => limits::set_sizes(&mut limits, &Sizes::CUDA),
    }
    limits.into_iter().map(LimitInfo::from).collect()
}

fn heading(scope: &str) -> &str {
    match Scope::named(scope) {
        Some(Scope::Guest) => "each guest",
        Some(Scope::Session) => "each session, a client's connection",
        Some(Scope::User) => "each user",
        Some(Scope::Daemon) => "the daemon, all users together",
        None => scope,
    }
}

fn value(limit: &LimitInfo) -> String {
    match limit.value {
        None => "-".to_owned(),
        Some(UNLIMITED) => "none".to_owned(),
        Some(value) => Unit::named(&limit.unit).shown(value),
    }
}

/// Bytes that come and go are shown to three digits: how many there are to the last one has no meaning.
fn used(limit: &LimitInfo, amount: Option<u64>) -> String {
    match (amount, Unit::named(&limit.unit)) {
        (None, _) => "-".to_owned(),
        (Some(amount), Unit::Bytes) => output::bytes(amount),
        (Some(amount), unit) => unit.shown(amount),
    }
}

fn table(limits: &[LimitInfo]) -> String {
    let is_operator = limits.iter().any(|limit| limit.used_by_all.is_some());
    let last = if is_operator { "ALL USERS" } else { "" };
    let mut table = Table::new([
        ("LIMIT", Align::Left),
        ("VALUE", Align::Right),
        ("SET BY", Align::Left),
        ("IN USE", Align::Right),
        (last, Align::Right),
    ]);
    let mut scope = None;
    for limit in limits {
        if scope.replace(&limit.scope) != Some(&limit.scope) {
            table.push([
                heading(&limit.scope).to_owned(),
                String::new(),
                String::new(),
                String::new(),
                String::new(),
            ]);
        }
        table.push([
            format!("  {}", limit.name),
            value(limit),
            limit.source.clone(),
            used(limit, limit.used),
            if is_operator { used(limit, limit.used_by_all) } else { String::new() },
        ]);
    }
    table.render()
}

fn of_class(class: &ClassInfo) -> String {
    format!("\nyour class: {}\n", output::escaped_line(&shown_class(class)))
}

fn meanings(limits: &[LimitInfo]) -> String {
    limits.iter().map(|limit| format!("{}: {}\n", limit.name, limit.about)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_grouped_by_whose_the_limits_are_and_fits_a_terminal() {
        let file = "device = 'cpu'\n[limits]\ncpu_ms = 7000\n[budgets.user]\nhost_bytes = 536870912";
        let mut limits = of_config(&Config::parse(file).expect("valid"));
        let shown = table(&limits);
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines.iter().all(|line| line.chars().count() <= 100), "{shown}");
        let place = |start: &str| {
            lines
                .iter()
                .position(|line| line.starts_with(start))
                .unwrap_or_else(|| panic!("{start} in {shown}"))
        };
        let places = [
            "LIMIT",
            "each guest",
            "  limits.cpu_ms",
            "each session",
            "each user",
            "the daemon",
            "  kv_bytes",
        ]
        .map(place);
        assert!(places.is_sorted(), "{places:?}");
        let words: Vec<&str> = lines[place("  limits.cpu_ms")].split_whitespace().collect();
        assert_eq!(words, ["limits.cpu_ms", "7,000", "ms", "file", "-"]);
        let words: Vec<&str> = lines[place("  n_step_tokens")].split_whitespace().collect();
        assert_eq!(words, ["n_step_tokens", "256", "machine", "-"]);
        assert!(lines[place("  budgets.user.n_tokens")].contains(" none "), "{shown}");
        assert!(!shown.contains("ALL USERS"));

        for limit in &mut limits {
            (limit.used, limit.used_by_all) = (Some(123_456), Some(1_234_567_890));
        }
        let shown = table(&limits);
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        let line = shown.lines().find(|line| line.contains("budgets.user.host_bytes")).expect("a row");
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        assert_eq!(words, ["512", "MiB", "file", "123", "kB", "1.2", "GB"]);
    }

    #[test]
    fn what_a_daemon_would_find_out_is_left_open() {
        let limits = of_config(&Config::default());
        let open: Vec<&str> =
            limits.iter().filter(|limit| limit.value.is_none()).map(|limit| limit.name.as_str()).collect();
        assert_eq!(open, ["kv_bytes", "model_bytes", "kv_host_bytes", "n_step_tokens", "n_step_rows"]);
        assert!(meanings(&limits).contains("limits.n_memories: Linear memories of a guest.\n"));
    }
}
