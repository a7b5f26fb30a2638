//! Finding a daemon, or being one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tokio::io::AsyncReadExt;
use trellis_client::socket::candidates;
use trellis_client::{Client, ErrorCode, ModelInfo};

use super::error::CliError;
use super::output::{Format, note};
use super::patience::Patience;
use super::progress::{ProgressDisplay, Unit};
use super::seconds::seconds;
use crate::config::{Config, Device, DtypeChoice, SavedContexts};
use crate::daemon::{Daemon, LoadProgress, Seams};
use crate::guest::check_format;
use crate::model_path::{is_path, path_name};

/// Bytes of a file that tell whether it is a component.
const N_BYTES_BEGUN: u64 = 4 << 10;

/// Where the environment names a socket.
const SOCKET_VARIABLE: &str = "TRELLIS_SOCKET";

/// The socket that the environment names, for clients and the daemon.
pub(crate) fn socket_of_environment() -> Option<PathBuf> {
    std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The socket that a daemon with these settings is told to use, by the first that says so: the command line, the environment, the
/// settings. Nothing where it is left to the machine.
pub(crate) fn socket_told(
    flag: Option<PathBuf>,
    environment: Option<PathBuf>,
    config: &Config,
) -> Option<PathBuf> {
    flag.or(environment).or_else(|| config.socket.clone())
}

/// Which daemon to talk to.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SocketArgs {
    /// Talk to the daemon on this socket; otherwise on that in TRELLIS_SOCKET, or else on the usual one
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

impl SocketArgs {
    /// The socket that the user named, if any.
    fn named(&self) -> Option<PathBuf> {
        self.socket.clone().or_else(socket_of_environment)
    }

    /// The sockets on which a daemon is looked for, in that order.
    pub(crate) fn candidates(&self) -> Vec<PathBuf> {
        self.named().map_or_else(candidates, |socket| vec![socket])
    }

    /// As [`Self::connect`], and says nothing however long that takes.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn connect_silently(&self) -> Result<Client, trellis_client::Error> {
        match self.named() {
            Some(socket) => Client::connect_to(socket).await,
            None => Client::connect().await,
        }
    }

    /// Connects to the running daemon, and says what is waited for if that takes long.
    ///
    /// # Errors
    /// None is running, or it cannot be talked to, or gives no sign for too long.
    pub(crate) async fn connect(&self, format: Format) -> Result<Client, CliError> {
        Patience::new(None, format).connect(self).await
    }
}

/// Where guests run: in the running daemon, or in one inside this process.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct HomeArgs {
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Run inside this process even if a daemon is running
    #[arg(long, conflicts_with = "socket")]
    pub(crate) local: bool,
    /// Use this model: one that the running daemon has loaded or loads on demand, by its name or its path, or else, inside this process, a
    /// bundled one (tiny, draft), a folder or a GGUF file. Given several times, all of them inside this process, the first as the default
    #[arg(long = "model", value_name = "NAME|PATH")]
    pub(crate) models: Vec<String>,
    /// Run inside this process, on this device: auto, cpu, cuda, or cuda:N for one GPU of several
    #[arg(long, value_name = "DEVICE", conflicts_with = "socket")]
    pub(crate) device: Option<Device>,
    /// Run inside this process, computing in this type
    #[arg(long, value_enum, conflicts_with = "socket")]
    pub(crate) dtype: Option<DtypeArg>,
    /// Wait so long without a sign of it for a daemon that starts or is replaced; otherwise 120. One of which three starts are seen to
    /// come to nothing is waited for no longer
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) wait: Option<Duration>,
}

/// Type of weights, activations and KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    /// That of the model's files on a GPU, f32 on the CPU
    Auto,
    /// 32 bits
    F32,
    /// 16 bits
    F16,
    /// 16 bits, with the range of f32
    Bf16,
}

impl From<DtypeArg> for DtypeChoice {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::Auto => Self::Auto,
            DtypeArg::F32 => Self::F32,
            DtypeArg::F16 => Self::F16,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}

/// A connection, and the daemon at its other end if that is in this process.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) client: Client,
    /// The daemon's model to use, if one was named.
    pub(crate) model: Option<String>,
    inside: Option<Inside>,
}

impl Home {
    /// Whether the daemon is in this process, and has no other users.
    pub(crate) fn is_inside(&self) -> bool {
        self.inside.is_some()
    }
}

/// Where guests are to run.
#[derive(Debug)]
pub(crate) enum Found {
    /// In the running daemon.
    There(Home),
    /// Inside this process, for this reason.
    Here(&'static str),
    /// Inside this process, as the running daemon does not have the model: which daemon that is, and what it has.
    Lacking(String),
}

/// Kept alive for its client.
struct Inside(#[expect(dead_code, reason = "held to be dropped after the client")] Daemon);

impl std::fmt::Debug for Inside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inside")
    }
}

impl HomeArgs {
    /// Whether no daemon that runs is asked.
    pub(crate) fn stays_inside(&self) -> bool {
        self.local || self.models.len() > 1 || self.device.is_some() || self.dtype.is_some()
    }

    /// For one wait for a daemon.
    pub(crate) fn patience(&self, format: Format) -> Patience {
        Patience::new(self.wait, format)
    }

    /// Connects to the running daemon, unless guests are to run inside this process.
    ///
    /// # Errors
    /// A daemon is running and cannot be talked to, or is unloading the model, or does not have it and was named; or the
    /// arguments contradict each other.
    pub(crate) async fn find(&self, patience: &mut Patience) -> Result<Found, CliError> {
        let is_named = self.socket.named().is_some();
        if self.socket.socket.is_some() && self.models.len() > 1 {
            return Err(CliError::SeveralModels);
        }
        if self.stays_inside() {
            return Ok(Found::Here("as asked for"));
        }
        let client = match patience.connect(&self.socket).await {
            Ok(client) => client,
            // A socket that is named means the daemon that listens there.
            Err(CliError::Client(trellis_client::Error::NotRunning { .. })) if !is_named => {
                return Ok(Found::Here("no daemon is running"));
            }
            Err(error) => return Err(error),
        };
        let Some(choice) = self.models.first() else {
            return Ok(Found::There(Home { client, model: None, inside: None }));
        };
        let models = client.models().await?;
        match pick(choice, &models) {
            Ok(name) => Ok(Found::There(Home { client, model: Some(name), inside: None })),
            Err(lacking) => {
                let socket = client.socket().map(|path| path.display().to_string()).unwrap_or_default();
                if models.iter().any(|model| model.name == *choice) {
                    return Err(CliError::ModelLeaves { socket, name: choice.clone() });
                }
                let lacking = format!("the daemon at {socket} {lacking}");
                if is_named {
                    return Err(CliError::NoSuchModel { lacking });
                }
                Ok(Found::Lacking(lacking))
            }
        }
    }

    /// Starts a daemon inside this process and says so. It has no guests that go by name.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) async fn make(&self, why: &str, format: Format) -> Result<Home, CliError> {
        let mut config = Config::default();
        if !self.models.is_empty() {
            config.models.clone_from(&self.models);
        }
        config.device = self.device.unwrap_or(config.device);
        config.dtype = self.dtype.map_or(config.dtype, DtypeChoice::from);
        let daemon = start(&config, format).await?;
        note(format, &format!("running inside this process ({why}): {}", describe(&daemon)));
        Ok(Home { client: daemon.connect().await?, model: None, inside: Some(Inside(daemon)) })
    }
}

/// The name of the daemon's model that is meant, by its name or by its folder or file; or what the daemon has instead.
fn pick(choice: &str, models: &[ModelInfo]) -> Result<String, String> {
    // One that is loaded on demand comes back when somebody asks for it.
    let is_open = |model: &&ModelInfo| model.state != "draining" || model.is_on_demand;
    let open: Vec<&ModelInfo> = models.iter().filter(is_open).collect();
    let is_it =
        |model: &&&ModelInfo| model.name == choice || model.aliases.iter().any(|alias| alias == choice);
    if let Some(model) = open.iter().find(is_it) {
        return Ok(model.name.clone());
    }
    let names: Vec<&str> = open.iter().map(|model| model.name.as_str()).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let folder = is_path(choice).then(|| Path::new(choice).canonicalize().ok()).flatten();
    let Some(folder) = folder else {
        return Err(format!("has no model {choice:?} (it has {names})"));
    };
    let is_from = |model: &&&ModelInfo| model.folder.as_deref().is_some_and(|from| folder == Path::new(from));
    if let Some(model) = open.iter().find(is_from) {
        return Ok(model.name.clone());
    }
    let is_namesake =
        |model: &&&ModelInfo| path_name(&folder).is_some_and(|name| name == model.name.as_str());
    let shown = folder.display();
    Err(match open.iter().find(is_namesake).map(|model| (&model.name, &model.folder)) {
        Some((name, Some(other))) => format!("has its model {name:?} from {other}, not from {shown}"),
        Some((name, None)) => format!("does not say whether its model {name:?} is that of {shown}"),
        None => format!("has no model from {shown} (it has {names})"),
    })
}

/// Starts a daemon inside this process, with a progress bar if it takes long.
///
/// # Errors
/// A model, the device or the sandbox cannot be used.
pub(crate) async fn start(config: &Config, format: Format) -> Result<Daemon, CliError> {
    // It ends with what it is started for.
    let config = Config { saved_contexts: SavedContexts::Memory, ..config.clone() };
    start_told(&config, format, |_| {}).await
}

/// As [`start`]; `tell` hears as well how far it is.
pub(crate) async fn start_told(
    config: &Config,
    format: Format,
    tell: impl Fn(&LoadProgress) + Send + Sync + 'static,
) -> Result<Daemon, CliError> {
    let progress = Arc::new(ProgressDisplay::new(format));
    progress.update("starting", Unit::Items, 0, 0);
    let (config, reports) = (config.clone(), progress.clone());
    let mut starting = tokio::task::spawn_blocking(move || {
        let report = |loading| {
            tell(&loading);
            match loading {
                LoadProgress::Loading { model, done_bytes, total_bytes } => {
                    reports.update(&format!("loading {model}"), Unit::Bytes, done_bytes, total_bytes);
                }
                LoadProgress::Ready => reports.finish(),
            }
        };
        let seams = Seams { wrap: super::test_build().wrap, ..Seams::default() };
        Daemon::start_with(&config, seams, &report).map_err(Box::new)
    });
    loop {
        tokio::select! {
            started = &mut starting => return Ok(started.expect("starting a daemon does not panic")?),
            () = progress.due() => {}
        }
    }
}

/// Stops a daemon. One that answers that it is going down already has been stopped just as well.
///
/// # Errors
/// The daemon refused, or the connection was lost before.
pub(crate) async fn shut_down(client: &Client) -> Result<(), CliError> {
    match client.shutdown().await {
        Err(error) if error.code() != Some(&ErrorCode::ShuttingDown) => Err(error.into()),
        _ => Ok(()),
    }
}

/// `tiny on cpu (2 threads)`
pub(crate) fn describe(daemon: &Daemon) -> String {
    match daemon.model(None) {
        Some(model) => format!("{} on {}", model.model().name, model.device()),
        None => "no model".to_owned(),
    }
}

/// The bytes of a component. A file that does not begin like one is not read to its end, which it may not have.
///
/// # Errors
/// The file cannot be read, or is no component.
pub(crate) async fn read_component(path: &Path) -> Result<bytes::Bytes, CliError> {
    let read = || CliError::io(format!("read {}", path.display()));
    let mut file = tokio::fs::File::open(path).await.map_err(read())?;
    let mut bytes = Vec::new();
    (&mut file).take(N_BYTES_BEGUN).read_to_end(&mut bytes).await.map_err(read())?;
    check_format(&bytes).map_err(|source| CliError::NotAComponent { path: path.to_owned(), source })?;
    file.read_to_end(&mut bytes).await.map_err(read())?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::GuestError;

    #[tokio::test]
    async fn a_file_without_an_end_is_read_no_further_than_it_is_seen_to_be_no_component() {
        let read = read_component(Path::new("/dev/zero")).await;
        assert!(
            matches!(read, Err(CliError::NotAComponent { source: GuestError::NotWasm { .. }, .. })),
            "{read:?}"
        );
    }

    #[test]
    fn the_command_line_comes_before_the_environment_and_that_before_the_file() {
        let config = Config { socket: Some("/file".into()), ..Config::default() };
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(socket_told(path("/flag"), path("/environment"), &config), path("/flag"));
        assert_eq!(socket_told(None, path("/environment"), &config), path("/environment"));
        assert_eq!(socket_told(None, None, &config), path("/file"));
        assert_eq!(socket_told(None, None, &Config::default()), None);
    }

    #[test]
    fn a_folder_is_the_daemons_model_only_if_the_daemon_says_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        std::fs::create_dir_all(&one).expect("made");
        std::os::unix::fs::symlink(&one, &other).expect("made");
        let (one, other) = (one.to_str().expect("UTF-8"), other.to_str().expect("UTF-8"));
        let canonical = std::fs::canonicalize(one).expect("it is there").display().to_string();
        let model = |name: &str, state: &str, folder: Option<&str>| ModelInfo {
            name: name.to_owned(),
            state: state.to_owned(),
            folder: folder.map(str::to_owned),
            ..ModelInfo::default()
        };
        let of = |folder: Option<&str>| [model("tiny", "loaded", None), model("one", "loaded", folder)];
        assert_eq!(pick("one", &of(None)), Ok("one".to_owned()), "it is a name");
        let aliased = ModelInfo { aliases: vec!["small".to_owned()], ..model("one", "unloaded", None) };
        assert_eq!(pick("small", &[aliased]), Ok("one".to_owned()), "it is loaded on demand");
        let leaves = ModelInfo { is_on_demand: true, ..model("one", "draining", None) };
        assert_eq!(pick("one", &[leaves]), Ok("one".to_owned()), "and comes back");
        assert_eq!(pick(one, &of(Some(&canonical))), Ok("one".to_owned()));
        assert_eq!(pick(other, &of(Some(&canonical))), Ok("one".to_owned()), "by another way");
        let said = |choice: &str, models: &[ModelInfo]| pick(choice, models).expect_err(choice);
        assert!(said(one, &of(None)).contains("does not say"));
        assert!(said(one, &of(Some("/elsewhere/one"))).contains("from /elsewhere/one, not from"));
        assert!(said(one, &[model("tiny", "loaded", None)]).contains("(it has tiny)"));
        assert!(said("draft", &of(None)).contains("no model \"draft\" (it has tiny, one)"));
        assert!(said("one", &[model("one", "draining", None)]).contains("(it has none)"));
    }
}
