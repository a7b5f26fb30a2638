//! `trellis status`: whether a daemon serves, and how it is.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::timeout;
use trellis_client::{Client, DaemonInfo, DeviceInfo, Error, LoadingInfo, ModelInfo};

use super::connect::SocketArgs;
use super::error::CliError;
use super::info::shown_isolation;
use super::output::{self, Format, escaped_line};
use crate::ipc::{Lock, Owner, Phase, Seen, owner_of};

const EXAMPLES: &str = "\
Examples:
  trellis status
  trellis status --json | jq -r .state
  until trellis status > /dev/null; do sleep 1; done     wait until a daemon serves

A daemon is ready, draining (it takes on nothing more, and what runs comes to its end), failed (its device has, and nothing is
computed), starting (it loads its models, or another program is about to take its place, and does not answer yet), silent (it takes
connections and does not answer: it has much to do, or stands still) or not running. The last failure is shown to root and the
user who runs the daemon. `trellis info` has the counters, `trellis top` what changes.

Exit status: 0 a daemon serves, also one that drains; 3 none does, or not yet.";

/// How long a daemon may take to take a connection. One that starts does so later, and is there.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// How long one that has taken it may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Letters in front of what is said.
const N_NAME_CELLS: usize = 13;

/// Show whether a daemon is running, and how it is
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    socket: SocketArgs,
}

/// What there is.
#[derive(Serialize)]
#[serde(untagged)]
enum Status {
    /// No daemon listens.
    Stopped { state: &'static str, sockets: Vec<PathBuf> },
    /// One listens and does not answer.
    Silent {
        state: &'static str,
        socket: Option<PathBuf>,
        #[serde(skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        progress: Option<String>,
    },
    /// One answers.
    Serving { state: String, socket: Option<PathBuf>, daemon: Box<DaemonInfo>, models: Vec<ModelInfo> },
}

pub(crate) async fn status(args: StatusArgs, format: Format) -> Result<(), CliError> {
    let status = match timeout(START_PATIENCE, args.socket.connect_silently()).await {
        Ok(Ok(client)) => match timeout(PATIENCE, ask(&client)).await {
            Ok(status) => status?,
            Err(_) => silent(SILENT, client.socket().map(PathBuf::from)),
        },
        Ok(Err(Error::NotRunning { tried })) => {
            let sockets = tried.into_iter().map(|tried| tried.path).collect();
            Status::Stopped { state: "stopped", sockets }
        }
        Ok(Err(error)) => return Err(error.into()),
        // It is the first whose socket is there.
        Err(_) => not_greeted(args.socket.candidates().into_iter().find(|path| path.exists())),
    };
    output::print(format, &status, shown)?;
    match status {
        Status::Serving { .. } => Ok(()),
        Status::Stopped { .. } | Status::Silent { .. } => Err(CliError::NotServing),
    }
}

async fn ask(client: &Client) -> Result<Status, Error> {
    let (daemon, models) = tokio::try_join!(client.info(), client.models())?;
    // An older daemon does not say.
    let state = daemon.state.clone().unwrap_or_else(|| "running".to_owned());
    let socket = client.socket().map(PathBuf::from);
    Ok(Status::Serving { state, socket, daemon: Box::new(daemon), models })
}

const STARTING: &str = "starting";
const SILENT: &str = "silent";
const DRAINING: &str = "draining";

/// A daemon that has taken no connection: one that is ready takes them at once, unless it stands still.
fn not_greeted(socket: Option<PathBuf>) -> Status {
    let phase = socket.as_ref().and_then(|socket| Some(owner_of(socket)?.phase));
    let state = match (phase, &socket) {
        (Some(Phase::Ready), _) => SILENT,
        (Some(Phase::Ending), _) => DRAINING,
        (Some(Phase::Starting(_)), _) => STARTING,
        // It does not say how far it is to every user.
        (None, Some(socket)) if matches!(Lock::look(socket), Seen::Closed) => SILENT,
        (None, _) => STARTING,
    };
    silent(state, socket)
}

/// A daemon that listens there and has not answered.
fn silent(state: &'static str, socket: Option<PathBuf>) -> Status {
    let owner = socket.as_ref().and_then(|socket| owner_of(socket));
    let (pid, progress) = match owner {
        Some(Owner { pid, phase: Phase::Starting(progress) }) => (Some(pid), progress),
        Some(Owner { pid, phase: Phase::Ready | Phase::Ending }) => (Some(pid), None),
        None => (None, None),
    };
    Status::Silent { state, socket, pid, progress }
}

/// `loading big: 34% of 2.1 GB`
pub(super) fn loading(loading: &LoadingInfo) -> String {
    format!("loading {}", how_far(loading))
}

fn how_far(loading: &LoadingInfo) -> String {
    let LoadingInfo { model, done_bytes, total_bytes } = loading;
    match total_bytes {
        0 => model.clone(),
        &total => {
            let percent = 100 * u128::from((*done_bytes).min(total)) / u128::from(total);
            format!("{model}: {percent}% of {}", output::bytes(total))
        }
    }
}

/// `31 MB of 4.2 GB`
pub(super) fn memory(device: &DeviceInfo) -> Option<String> {
    let used = output::bytes(device.memory_bytes_used?);
    Some(match device.memory_bytes {
        Some(all) => format!("{used} of {}", output::bytes(all)),
        None => used,
    })
}

fn shown(status: &Status) -> String {
    let path = |path: &Option<PathBuf>| {
        path.as_ref().map_or_else(|| "-".to_owned(), |path| path.display().to_string())
    };
    let lines = match status {
        Status::Stopped { sockets, .. } => {
            let sockets: Vec<String> = sockets.iter().map(|path| path.display().to_string()).collect();
            vec![
                ("state", "not running; `trellis serve` starts a daemon".to_owned()),
                ("looked on", sockets.join(", ")),
            ]
        }
        Status::Silent { state, socket, pid, progress } => {
            let said = progress.clone().unwrap_or_else(|| match *state {
                SILENT => "it does not answer: it has much to do, or stands still".to_owned(),
                DRAINING => "it takes connections no more, and what runs comes to its end".to_owned(),
                _ => "it does not answer yet".to_owned(),
            });
            let process = pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
            vec![("state", format!("{state}: {said}")), ("socket", path(socket)), ("process", process)]
        }
        Status::Serving { state, socket, daemon, models } => {
            let mut lines = vec![("state", said_state(state, daemon)), ("socket", path(socket))];
            lines.extend(of_daemon(daemon));
            lines.extend(daemon.loading.iter().map(|load| ("loading", how_far(load))));
            lines.extend(models.iter().map(|model| ("model", of_model(model))));
            lines.extend(daemon.devices.iter().map(|device| ("device", of_device(device))));
            lines.extend(daemon.last_failure.iter().map(|failure| {
                let ago = output::duration_ms(failure.ago_ms);
                ("last failure", format!("{ago} ago: {}", failure.message))
            }));
            lines
        }
    };
    let line = |(name, value): (&str, String)| format!("{name:<N_NAME_CELLS$}{}\n", escaped_line(&value));
    lines.into_iter().map(line).collect()
}

fn said_state(state: &str, daemon: &DaemonInfo) -> String {
    match &daemon.failure {
        Some(failure) => format!("FAILED: {failure}"),
        None if state == "draining" => {
            "draining: it takes on nothing more, and what runs comes to its end".to_owned()
        }
        None => state.to_owned(),
    }
}

fn of_daemon(daemon: &DaemonInfo) -> Vec<(&'static str, String)> {
    let mut lines = vec![
        ("build", daemon.build.clone()),
        ("process", format!("{}, with {}", daemon.pid, output::bytes(daemon.resident_bytes))),
        ("running for", output::duration_ms(daemon.uptime_ms)),
        ("guests", daemon.n_guests.to_string()),
        ("sessions", daemon.n_sessions.to_string()),
    ];
    lines.extend(shown_isolation(daemon).map(|isolation| ("isolation", isolation)));
    lines
}

/// `tiny, loaded, f32 on cpu (2 threads), the default, 2 contexts`
fn of_model(model: &ModelInfo) -> String {
    let state = model.failure.as_ref().map_or(model.state.clone(), |failure| format!("FAILED: {failure}"));
    // Of one that is not loaded no more is known than where it would be.
    let is_there = !model.dtype.is_empty();
    let place = if is_there { format!("{} on {}", model.dtype, model.device) } else { model.device.clone() };
    let mut facts = vec![model.name.clone(), state, place];
    facts.extend(model.is_default.then(|| "the default".to_owned()));
    facts.extend(is_there.then(|| match model.n_contexts {
        1 => "1 context".to_owned(),
        n => format!("{n} contexts"),
    }));
    facts.join(", ")
}

/// `cpu, busy for 12% of 3 min 4 s, 31 MB of 4.2 GB`
fn of_device(device: &DeviceInfo) -> String {
    let percent = 100.0 * device.busy_ms as f64 / device.open_ms.max(1) as f64;
    let busy = format!("busy for {percent:.0}% of {}", output::duration_ms(device.open_ms));
    [Some(device.name.clone()), Some(busy), memory(device)]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use trellis_client::FailureInfo;

    use super::*;

    fn serving(daemon: DaemonInfo, models: Vec<ModelInfo>) -> String {
        let state = daemon.state.clone().unwrap_or_default();
        shown(&Status::Serving {
            state,
            socket: Some("/run/t.sock".into()),
            daemon: Box::new(daemon),
            models,
        })
    }

    #[test]
    fn how_a_daemon_is_stands_on_one_screen() {
        let device = DeviceInfo {
            name: "cpu".to_owned(),
            open_ms: 60_000,
            busy_ms: 15_000,
            memory_bytes: Some(4_200_000_000),
            memory_bytes_used: Some(31_000_000),
            ..DeviceInfo::default()
        };
        let daemon = DaemonInfo {
            state: Some("draining".to_owned()),
            isolation: Some("thread".to_owned()),
            pid: 7,
            uptime_ms: 61_000,
            devices: vec![device],
            loading: vec![LoadingInfo { model: "big".to_owned(), done_bytes: 34, total_bytes: 100 }],
            last_failure: Some(FailureInfo { message: "no\u{1b}[2J\ndisk".to_owned(), ago_ms: 5000 }),
            ..DaemonInfo::default()
        };
        let model = ModelInfo {
            name: "tiny".to_owned(),
            state: "loaded".to_owned(),
            dtype: "f32".to_owned(),
            device: "cpu (2 threads)".to_owned(),
            is_default: true,
            n_contexts: 1,
            ..ModelInfo::default()
        };
        let failed = ModelInfo { failure: Some("no memory".to_owned()), ..model.clone() };
        let said = serving(daemon, vec![model, failed]);
        for line in [
            "state        draining: it takes on nothing more, and what runs comes to its end\n",
            "socket       /run/t.sock\n",
            "running for  1 min 1 s\n",
            "isolation    thread: guests run in threads of the daemon\n",
            "loading      big: 34% of 100 B\n",
            "model        tiny, loaded, f32 on cpu (2 threads), the default, 1 context\n",
            "model        tiny, FAILED: no memory, f32 on",
            "device       cpu, busy for 25% of 1 min 0 s, 31.0 MB of 4.2 GB\n",
            "last failure 5.0 s ago: no\\u{1b}[2J\\ndisk\n",
        ] {
            assert!(said.contains(line), "{line:?} in {said}");
        }
        assert!(said.lines().count() <= 24, "{said}");
        let of_an_older_daemon = serving(DaemonInfo::default(), vec![]);
        assert!(!of_an_older_daemon.contains("last failure"), "{of_an_older_daemon}");
        let failed = DaemonInfo { failure: Some("cpu: gone".to_owned()), ..DaemonInfo::default() };
        assert!(serving(failed, vec![]).contains("state        FAILED: cpu: gone\n"));
    }

    #[test]
    fn a_daemon_that_does_not_answer_says_how_far_it_is_where_it_can() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sock");
        let said = || shown(&not_greeted(Some(path.clone())));
        assert!(said().contains("starting: it does not answer yet\n"));
        let lock = crate::ipc::Lock::take(&path).expect("nobody has it");
        lock.note().expect("it is open").say("loading big: 34% of 2.1 GB").expect("written");
        let (pid, starts) = (format!(" {}\n", std::process::id()), said());
        let loads = starts.contains("starting: loading big: 34% of 2.1 GB\n");
        assert!(loads && starts.contains(&pid), "{starts}");
        lock.note().expect("it is open").say_ready().expect("written");
        let stands_still = said();
        let silent =
            stands_still.contains("silent: it does not answer: it has much to do, or stands still\n");
        assert!(silent && stands_still.contains(&pid), "{stands_still}");
        lock.note().expect("it is open").say_replaced(Some(Duration::from_millis(4_200))).expect("written");
        let replaced = said();
        assert!(replaced.contains("starting: another program takes its place in up to 5 s\n"), "{replaced}");
        lock.note().expect("it is open").say_ending().expect("written");
        let ends = said();
        assert!(ends.contains("draining: it takes connections no more") && ends.contains(&pid), "{ends}");
        drop(lock);
        assert!(said().contains("starting: it does not answer yet\n"), "what it says is of one that is gone");
        let stopped = Status::Stopped { state: "stopped", sockets: vec![path.clone()] };
        assert!(shown(&stopped).starts_with("state        not running"));
    }

    #[test]
    fn a_load_of_unknown_length_has_no_part() {
        let load = |done_bytes, total_bytes| LoadingInfo { model: "a".to_owned(), done_bytes, total_bytes };
        let said = [load(0, 0), load(1, 3), load(9, 3)].map(|load| loading(&load));
        assert_eq!(said, ["loading a", "loading a: 33% of 3 B", "loading a: 100% of 3 B"]);
    }
}
