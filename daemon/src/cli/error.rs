//! What a command can end with, and what to do about it.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use serde::Serialize;
use trellis_client::{ErrorBody, ErrorCode};
use trellis_cuda::{CudaError, LoadError};

use super::output::{Format, escaped_line, remark, to_json};
use crate::config::ConfigError;
use crate::daemon::{DaemonError, DeviceFailure};
use crate::guest::{Deed, Difference, GuestError};
use crate::ipc::BindError;
use crate::recording::{Broken, Call, Value};

/// The exit status of an interrupted command: 128 and the number of SIGINT, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;
/// The exit status of a command that may be tried again as it is: its device or its model failed, its model was unloaded
/// or about to be, the daemon was going down. `EX_TEMPFAIL` of `sysexits.h`.
pub const TRY_AGAIN: u8 = 75;
const GUEST_FAILED: u8 = 1;
/// The exit status of the standard test harness where a test fails, which cargo knows.
const TESTS_FAILED: u8 = 101;
const UNHEALTHY: u8 = 1;
/// The exit status of a command that could not begin: a mistake in it, no daemon.
pub(super) const CANNOT: u8 = 2;
/// The exit status of a replay in which the guest did something else than in its recording.
const DIFFERENT: u8 = 3;
/// The exit status of `trellis status` where no daemon serves, as `systemctl status` has it.
const NOT_SERVING: u8 = 3;

/// An error for programs: `sdk/error.schema.json` says what is in it.
#[derive(Debug, Serialize)]
pub(super) struct ErrorObject {
    #[serde(flatten)]
    body: ErrorBody,
    /// Whether the same may succeed another time, unchanged.
    retryable: bool,
}

impl From<ErrorBody> for ErrorObject {
    fn from(body: ErrorBody) -> Self {
        let retryable = body.code.is_retryable();
        Self { body, retryable }
    }
}

impl From<&trellis_client::Error> for ErrorObject {
    fn from(error: &trellis_client::Error) -> Self {
        let body = match error {
            trellis_client::Error::Daemon(body) => (**body).clone(),
            error => {
                let code = error.code().cloned().unwrap_or_else(|| ErrorCode::Other("connection".to_owned()));
                ErrorBody::new(code, error.to_string())
            }
        };
        Self { body, retryable: error.is_retryable() }
    }
}

/// The line of a command that could not do what it was asked to.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "error")]
pub(super) struct ErrorLine {
    pub(super) error: ErrorObject,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hint: Option<String>,
}

/// Why a command did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    #[error(transparent)]
    Client(#[from] trellis_client::Error),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Daemon(#[from] Box<DaemonError>),
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The daemon has ended its guests and goes.
    #[error("the device failed: {0}")]
    Device(DeviceFailure),
    /// The guest was started and did not end well.
    #[error("{0}")]
    Guest(Box<ErrorBody>),
    /// The daemon goes down, and has not started the guest.
    #[error("{0}")]
    NotBegun(Box<ErrorBody>),
    /// A replay came to nothing.
    #[error("{0}")]
    NotCompared(Box<ErrorBody>),
    #[error("interrupted")]
    Interrupted,
    #[error("{guest} would be refused: {source}")]
    Refused { guest: String, source: std::sync::Arc<GuestError> },
    #[error("no place for compiled components: neither XDG_CACHE_HOME nor HOME is set")]
    NoCacheHome,
    /// It listens, or somebody does for it.
    #[error("the daemon at {socket} has not answered, nor shown that it comes on, for {} s", .waited.as_secs_f64())]
    Silent { socket: String, waited: std::time::Duration },
    /// Each start says anew how far it is, and none comes to its end.
    #[error(
        "the daemon at {socket} starts over and over: {n_starts} starts came to nothing while it was waited for"
    )]
    Failing { socket: String, n_starts: u32 },
    /// It takes no connections: what comes is the next daemon's.
    #[error("the daemon at {socket}, process {pid}, is on its way out and takes no connections any more")]
    EndsAlready { socket: String, pid: u32 },
    /// The report has said so.
    #[error("no daemon serves")]
    NotServing,
    #[error("`trellis top` draws on a terminal, and there is none")]
    NoTerminal,
    #[error("some tests failed")]
    TestsFailed,
    #[error("no crate can be named after {}: {reason}", path.display())]
    NoCrateName { path: PathBuf, reason: &'static str },
    #[error(
        "neither XDG_DATA_HOME nor HOME is set: there is no place for the crate that guests are written with"
    )]
    NoHome,
    #[error("not all of standard input was sent")]
    InputCutShort,
    /// The reader of the output has gone away, which it may.
    #[error("nobody reads the output any more")]
    OutputClosed,
    #[error(
        "several --model are all loaded inside this process, and --socket names a daemon that runs outside: give one \
         --model, or no --socket"
    )]
    SeveralModels,
    /// The daemon was named, so that no other will do.
    #[error("{lacking}")]
    NoSuchModel { lacking: String },
    /// It will be gone, and may come again.
    #[error("the daemon at {socket} is unloading its model {name:?}: once that is loaded again, try again")]
    ModelLeaves { socket: String, name: String },
    #[error("there is no daemon in which the guest could go on ({why}): start one with `trellis serve`")]
    NothingToDetachFrom { why: &'static str },
    #[error("this user has no runtime directory to put the socket in")]
    NoSocketPlace,
    #[error("{path} does not exist", path = .path.display())]
    NoSuchPath { path: PathBuf },
    #[error("{path} has no Cargo.toml", path = .path.display())]
    NotACrate { path: PathBuf },
    #[error("{path}: {source}", path = .path.display())]
    NotAComponent { path: PathBuf, source: GuestError },
    #[error("no guest is named {name:?}; known here: {}", list(.known))]
    UnknownGuest { name: String, known: Vec<String> },
    #[error("no limit has {name:?} in its name; `trellis limits` lists all")]
    NoSuchLimit { name: String },
    #[error("{} is of a package, which installs and removes the service", unit.display())]
    ServiceOfPackage { unit: PathBuf },
    #[error("the service could not start with {}: {reason}", file.display())]
    ServiceCannot { file: PathBuf, reason: String, remedy: String },
    #[error("the service is not installed")]
    NoService,
    #[error("the service does not run")]
    ServiceDown,
    #[error("this machine is not run by systemd")]
    NoSystemd,
    #[error("services are for root to manage")]
    NotRoot,
    #[error("`{line}` failed ({status}){}{complaint}", if complaint.is_empty() { "" } else { ": " })]
    NotManaged { line: String, status: ExitStatus, complaint: String },
    #[error("no setting has {name:?} in its name; `trellis config show` lists all")]
    NoSuchSetting { name: String },
    #[error("cargo is needed to build a guest and is not installed")]
    NoCargo,
    #[error("the Rust target {target} is missing, and there is no rustup to add it")]
    NoRustup { target: &'static str },
    #[error("no Rust toolchain works in {path}: {reason}", path = .path.display())]
    NoToolchain { path: PathBuf, reason: String },
    #[error("rustup could not add the target {target} ({status}): {reason}")]
    TargetNotAdded { target: &'static str, status: ExitStatus, reason: String },
    #[error("{path} does not build ({status})", path = .path.display())]
    BuildFailed { path: PathBuf, status: ExitStatus },
    #[error("{path} builds no component", path = .path.display())]
    NoComponent { path: PathBuf },
    #[error("{path} is no UTF-8", path = .path.display())]
    NotUtf8 { path: PathBuf },
    #[error("the daemon has ended for another program, which does not serve: {0}; its log says why")]
    NoSuccessor(trellis_client::Error),
    #[error("cannot {doing}: {source}")]
    Io { doing: String, source: io::Error },
    #[error("{path} cannot be replayed: {source}", path = .path.display())]
    Recording { path: PathBuf, source: Broken },
    #[error("{file} holds no component: it was recorded by the name {guest:?}", file = .file.display())]
    NoRecordedComponent { guest: String, file: PathBuf },
    #[error("the component cannot be replayed: {0}")]
    NotReplayed(std::sync::Arc<GuestError>),
    #[error("{}", both_sides(.0))]
    Different(Box<Difference>),
    #[error("the daemon records nothing: it is of an older version")]
    NotRecorded,
    #[error("{name:?} has no source here that could be watched")]
    NothingToWatch { name: String },
    #[error("no profile has come: the daemon is of an older version, or it was not read in time")]
    NotProfiled,
    #[error(transparent)]
    Oci(#[from] super::oci::OciError),
    #[error(transparent)]
    Bench(#[from] super::bench::BenchError),
    /// The report has said what.
    #[error("there is no room for the model")]
    NoRoom,
    /// The report has said what.
    #[error("something on this machine keeps the daemon or its GPU from working")]
    Unhealthy,
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Where a replay left its recording, and both sides of that.
fn both_sides(difference: &Difference) -> String {
    let Difference { number, recorded, replayed } = difference;
    let place = match (recorded, replayed) {
        (Deed::Call(recorded), Deed::Call(replayed)) if recorded.name == replayed.name => {
            let arguments = |call: &Call| Value::List(call.arguments.clone());
            let place = arguments(recorded).difference(&arguments(replayed));
            place.map(|place| format!(", at argument {place}")).unwrap_or_default()
        }
        _ => String::new(),
    };
    format!(
        "the guest left its recording at entry {number}{place}\n  recorded: {}\n  replayed: {}",
        deed(recorded),
        deed(replayed)
    )
}

fn deed(deed: &Deed) -> String {
    match deed {
        Deed::Call(Call { name, arguments, .. }) => {
            let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
            escaped_line(&format!("{name}({})", arguments.join(", "))).into_owned()
        }
        Deed::End(end) => format!("the end: {}", escaped_line(&end.to_string())),
    }
}

/// Whether a smaller model or KV cache would load.
fn is_out_of_memory(error: &DaemonError) -> bool {
    let DaemonError::Load { source, .. } = error else { return false };
    matches!(**source, LoadError::DoesNotFit { .. } | LoadError::Cuda(CudaError::OutOfMemory { .. }))
}

impl CliError {
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }

    pub(crate) fn from_output(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::Io { doing: "write the output".to_owned(), source: error },
        }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::OutputClosed => 0,
            Self::Device(_) | Self::ModelLeaves { .. } | Self::Silent { .. } | Self::Failing { .. } => {
                TRY_AGAIN
            }
            Self::Guest(body) | Self::NotCompared(body) | Self::NotBegun(body)
                if body.code.is_retryable() =>
            {
                TRY_AGAIN
            }
            Self::Client(error) if error.is_retryable() => TRY_AGAIN,
            Self::Oci(error) if error.is_retryable() => TRY_AGAIN,
            Self::Guest(_) | Self::NotCompared(_) | Self::NotBegun(_) => GUEST_FAILED,
            Self::TestsFailed => TESTS_FAILED,
            Self::Different(_) => DIFFERENT,
            Self::NotServing => NOT_SERVING,
            Self::Bench(error) => error.exit_code(),
            Self::Unhealthy | Self::NoRoom | Self::ServiceDown => UNHEALTHY,
            Self::Interrupted => INTERRUPTED,
            _ => CANNOT,
        }
    }

    /// What the user can do next, where the message does not say it already.
    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Guest(body) if super::run::names_own_option(&body.message) => {
                "options of `trellis run` go before the guest, what comes after it is for the guest"
            }
            Self::Guest(body)
                if body.code == ErrorCode::PermissionDenied && body.name.as_deref() == Some("upload") =>
            {
                "`trellis info` lists the guests that you may run by name: `trellis run NAME`"
            }
            Self::Client(trellis_client::Error::Connect { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                "ask to be added to the group of the socket, or run your own daemon with `trellis serve`"
            }
            Self::Client(error) if error.code() == Some(&ErrorCode::UnknownGuest) => {
                "`trellis ps` lists the running guests"
            }
            Self::Client(error) if error.code() == Some(&ErrorCode::UnknownModel) => {
                "`trellis models` lists the loaded models"
            }
            Self::Silent { .. } | Self::Failing { .. } => {
                "`trellis status` says what can be said of it, its log more"
            }
            Self::EndsAlready { pid, .. } => {
                return Some(format!(
                    "`kill {pid}` has it wait no more for what it is at; where another program takes its place, the first `kill` has none do so, \
                     and a second one has it wait no more"
                ));
            }
            Self::ModelLeaves { .. } => "or run inside this process with --local",
            Self::NoSuchModel { .. } => "`trellis models` lists the loaded models, `trellis load` loads one",
            Self::Client(trellis_client::Error::Handshake(_) | trellis_client::Error::TooOld { .. }) => {
                "daemon and client must be of versions that fit: restart the daemon with this `trellis`"
            }
            Self::Daemon(error) if matches!(**error, DaemonError::UnknownModel { .. }) => {
                "give a bundled name, a folder that holds config.json, tokenizer.json and *.safetensors, or a GGUF file"
            }
            Self::Daemon(error)
                if matches!(**error, DaemonError::CudaUnusable { .. } | DaemonError::Cuda(_)) =>
            {
                "`trellis doctor` says what was looked for and what to install"
            }
            Self::Daemon(error) if is_out_of_memory(error) => {
                "`--dtype bf16` halves an f32 model; `kv_bytes` in the configuration gives each KV cache its size"
            }
            Self::NoRecordedComponent { .. } => {
                "name the guest: a component, the folder of its crate, or an example"
            }
            Self::Device(_) => {
                "start the daemon again; `trellis doctor` says whether the device works, and a service manager can \
                 restart on this exit status (75)"
            }
            Self::Bind(BindError::AlreadyRunning { .. }) => {
                "stop it with `trellis stop --daemon`, or give this one another place with --socket"
            }
            Self::NoSocketPlace => "give a place with --socket /absolute/path/trellis.sock",
            Self::ServiceOfPackage { .. } => "use `systemctl` with it: `systemctl restart trellis`",
            Self::ServiceCannot { remedy, .. } => remedy,
            Self::NoService => "`sudo trellis service install` does that",
            Self::ServiceDown => "`journalctl -u trellis` says why, `sudo systemctl start trellis` starts it",
            Self::NoSystemd => "have whatever watches over services run `trellis serve --config FILE`",
            Self::NoTerminal => {
                "`trellis ps --json` and `trellis info --json` are for programs, `trellis top --once` is one frame as text"
            }
            Self::NotRoot => "run it again with `sudo`",
            Self::NotACrate { .. } | Self::NotAComponent { source: GuestError::NotWasm { .. }, .. } => {
                "give a folder with a Cargo.toml, a .wasm component, or an example's name; a guest in Python or JavaScript is built \
                 as the README.md in its folder says"
            }
            Self::UnknownGuest { .. } => "give one of these names, a .wasm component, or a guest's folder",
            Self::NoCargo => "install Rust from https://rustup.rs, or run a component that is built already",
            Self::NoToolchain { .. } => {
                "install one from https://rustup.rs, or with `rustup toolchain install` in that folder; a component that is built already \
                 (a .wasm file, a guest of the daemon's) runs without"
            }
            Self::NoRustup { .. } => {
                "install Rust from https://rustup.rs, or the target with the system's packages"
            }
            Self::TargetNotAdded { .. } => {
                "`rustup target add wasm32-wasip2` adds it; a component that is built already (a .wasm file, a guest of the daemon's) runs \
                 without"
            }
            Self::Oci(error) => return error.hint().map(str::to_owned),
            Self::NoComponent { .. } => "its Cargo.toml needs [lib] with crate-type = [\"cdylib\"]",
            _ => return None,
        };
        Some(hint.to_owned())
    }

    /// Tells the user, on standard error.
    pub(crate) fn print(&self, format: Format) {
        match (self, format) {
            // The user's own doing, or said already.
            (
                Self::OutputClosed
                | Self::Interrupted
                | Self::Unhealthy
                | Self::NoRoom
                | Self::TestsFailed
                | Self::NotServing,
                _,
            ) => {}
            // The last of the guest's events has said it.
            (Self::Different(_) | Self::Guest(_), Format::Json) => {}
            (_, Format::Text) => {
                remark(&format!("error: {self}"));
                if let Some(hint) = self.hint() {
                    remark(&format!("hint: {hint}"));
                }
            }
            (_, Format::Json) => {
                remark(&to_json(&ErrorLine { error: self.object(), hint: self.hint() }));
            }
        }
    }

    pub(super) fn object(&self) -> ErrorObject {
        let body = match self {
            Self::Client(error) => return error.into(),
            Self::Guest(body) | Self::NotBegun(body) | Self::NotCompared(body) => (**body).clone(),
            Self::Device(_) => ErrorBody::new(ErrorCode::DeviceFailed, self.to_string()),
            Self::NoSuchModel { .. } => ErrorBody::new(ErrorCode::UnknownModel, self.to_string()),
            Self::ModelLeaves { name, .. } => {
                ErrorBody::new(ErrorCode::ModelLeaving, self.to_string()).about("model").with_value(name)
            }
            Self::Oci(error) => super::fetch::body(error),
            _ => ErrorBody::new(ErrorCode::Other("cli".to_owned()), self.to_string()),
        };
        ErrorObject { body, retryable: self.exit_code() == TRY_AGAIN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_status_tells_whose_fault_it_is() {
        let body = || Box::new(ErrorBody::new(ErrorCode::GuestFailed, "no"));
        assert_eq!(CliError::Guest(body()).exit_code(), 1);
        assert_eq!(CliError::Client(trellis_client::Error::Daemon(body())).exit_code(), 2);
        let retryable = [
            ErrorCode::DeviceFailed,
            ErrorCode::ModelLeaving,
            ErrorCode::ModelUnloaded,
            ErrorCode::ShuttingDown,
        ];
        for code in retryable {
            let lost = || Box::new(ErrorBody::new(code.clone(), "no"));
            assert_eq!(CliError::Guest(lost()).exit_code(), TRY_AGAIN);
            assert_eq!(CliError::Client(trellis_client::Error::Daemon(lost())).exit_code(), TRY_AGAIN);
        }
        assert_eq!(CliError::Interrupted.exit_code(), 130);
        assert_eq!(CliError::from_output(io::ErrorKind::BrokenPipe.into()).exit_code(), 0);
        assert_eq!(CliError::from_output(io::ErrorKind::StorageFull.into()).exit_code(), 2);
    }

    #[test]
    fn a_smaller_model_is_advised_only_where_memory_lacks() {
        let hint = |source: LoadError| {
            let error = DaemonError::Load { name: "a model".to_owned(), source: Box::new(source) };
            CliError::Daemon(Box::new(error)).hint()
        };
        let full = CudaError::OutOfMemory { what: "weights", needed_bytes: 2, free_bytes: 1, total_bytes: 2 };
        assert!(hint(full.into()).expect("a hint").contains("--dtype bf16"));
        let refused = CudaError::Call { call: "cuLaunchKernel", code: None, reason: "no".to_owned() };
        assert_eq!(hint(refused.into()), None);
        let shape = LoadError::Unsupported { what: "head_dim", expected: "64 or 128".to_owned(), found: 80 };
        assert_eq!(hint(shape), None);
    }
}
