//! How the service is.

use std::io;

use serde::Serialize;

use super::{UNITS, ran};
use crate::cli::error::CliError;
use crate::cli::output::{self, Format};

/// How it is, as systemd has it.
#[derive(Serialize)]
struct State {
    /// `active`, `inactive`, `failed`, ...; `not-installed` where there is none.
    state: String,
    /// What the daemon has said last.
    status: Option<String>,
    pid: Option<u32>,
    /// How often systemd has started it again.
    n_restarts: u64,
}

/// # Errors
/// It does not run, or there is no systemd.
pub(super) fn show(format: Format) -> Result<(), CliError> {
    let shown = ["LoadState", "ActiveState", "StatusText", "MainPID", "NRestarts"].join(",");
    let output = ran("systemctl", &["show", UNITS[1], "--property", &shown]);
    let state = match output {
        Ok(output) if !output.status.success() => return Err(CliError::NoSystemd),
        Ok(output) => state_of(&String::from_utf8_lossy(&output.stdout)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(CliError::NoSystemd),
        Err(error) => return Err(CliError::io("run systemctl")(error)),
    };
    output::print(format, &state, text_of)?;
    let is_up = ["active", "activating", "reloading"].contains(&state.state.as_str());
    if is_up { Ok(()) } else { Err(CliError::ServiceDown) }
}

/// Of what `systemctl show` says.
fn state_of(shown: &str) -> State {
    let value = |name: &str| {
        let line = shown.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.filter(|value| !value.is_empty())
    };
    let state = match value("LoadState") {
        Some("loaded") => value("ActiveState").unwrap_or("unknown"),
        Some("not-found") | None => "not-installed",
        Some(other) => other,
    };
    State {
        state: state.to_owned(),
        status: value("StatusText").map(str::to_owned),
        pid: value("MainPID").and_then(|pid| pid.parse().ok()).filter(|&pid| pid > 0),
        n_restarts: value("NRestarts").and_then(|n| n.parse().ok()).unwrap_or(0),
    }
}

fn text_of(state: &State) -> String {
    let State { state, status, pid, n_restarts } = state;
    let pid = pid.map(|pid| format!(", process {pid}")).unwrap_or_default();
    let status = status.as_ref().map(|status| format!(": {status}")).unwrap_or_default();
    let again = match n_restarts {
        0 => String::new(),
        n => format!(" (started again {n} times)"),
    };
    match state.as_str() {
        "not-installed" => "not installed; `sudo trellis service install` does that".to_owned(),
        state => format!("{state}{pid}{status}{again}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_what_systemd_says() {
        let shown =
            "LoadState=loaded\nActiveState=active\nStatusText=serving tiny on cpu\nMainPID=7\nNRestarts=2\n";
        let state = state_of(shown);
        assert_eq!(text_of(&state), "active, process 7: serving tiny on cpu (started again 2 times)");
        let state =
            state_of("LoadState=not-found\nActiveState=inactive\nStatusText=\nMainPID=0\nNRestarts=0\n");
        assert_eq!((state.state.as_str(), state.pid, state.status), ("not-installed", None, None));
    }
}
