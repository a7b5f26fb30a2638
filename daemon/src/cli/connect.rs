//! Finding a daemon, or being one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use trellis_client::{Client, ErrorCode};

use super::error::CliError;
use super::output::{Format, note};
use super::progress::{Progress, Unit};
use crate::config::{Config, Device, DtypeChoice};
use crate::daemon::{Daemon, LoadProgress, Seams};

/// Which daemon to talk to.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SocketArgs {
    /// Talk to the daemon on this socket, not to the usual one
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

impl SocketArgs {
    /// Connects to the running daemon.
    ///
    /// # Errors
    /// None is running, or it cannot be talked to.
    pub(crate) async fn connect(&self) -> Result<Client, CliError> {
        Ok(match &self.socket {
            Some(socket) => Client::connect_to(socket).await?,
            None => Client::connect().await?,
        })
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
    /// Use this model: one that the running daemon has loaded, or else, inside this process, a bundled one (tiny, draft) or
    /// a folder. Given several times, all of them inside this process, the first as the default
    #[arg(long = "model", value_name = "NAME|PATH")]
    pub(crate) models: Vec<String>,
    /// Run inside this process, on this device: auto, cpu, cuda, or cuda:N for one GPU of several
    #[arg(long, value_name = "DEVICE", conflicts_with = "socket")]
    pub(crate) device: Option<Device>,
    /// Run inside this process, computing in this type
    #[arg(long, value_enum, conflicts_with = "socket")]
    pub(crate) dtype: Option<DtypeArg>,
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
    _inside: Option<Inside>,
}

/// Kept alive for its client.
struct Inside(#[expect(dead_code, reason = "held to be dropped after the client")] Daemon);

impl std::fmt::Debug for Inside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inside")
    }
}

impl HomeArgs {
    fn stays_inside(&self) -> bool {
        self.local || self.models.len() > 1 || self.device.is_some() || self.dtype.is_some()
    }

    /// Connects to the running daemon; `None` if guests run inside this process.
    ///
    /// # Errors
    /// A daemon is running and cannot be talked to.
    pub(crate) async fn find(&self) -> Result<Option<Home>, CliError> {
        if self.stays_inside() {
            return Ok(None);
        }
        match self.socket.connect().await {
            Ok(client) => {
                let model = self.models.first().cloned();
                if let Some(name) = &model
                    && self.socket.socket.is_none()
                    && !client.models().await?.iter().any(|loaded| loaded.name == *name)
                {
                    return Ok(None);
                }
                Ok(Some(Home { client, model, _inside: None }))
            }
            // Who names a socket wants the daemon that listens there.
            Err(CliError::Client(trellis_client::Error::NotRunning { .. }))
                if self.socket.socket.is_none() =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Starts a daemon inside this process and says so. It has no guests that go by name.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) async fn make(&self, format: Format) -> Result<Home, CliError> {
        let mut config = Config::default();
        if !self.models.is_empty() {
            config.models.clone_from(&self.models);
        }
        config.device = self.device.unwrap_or(config.device);
        config.dtype = self.dtype.map_or(config.dtype, DtypeChoice::from);
        let daemon = start(&config, format).await?;
        let is_asked = self.stays_inside() || !self.models.is_empty();
        let why = if is_asked { "as asked for" } else { "no daemon is running" };
        note(format, &format!("running inside this process ({why}): {}", describe(&daemon)));
        Ok(Home { client: daemon.connect().await?, model: None, _inside: Some(Inside(daemon)) })
    }
}

/// Starts a daemon inside this process, with a progress bar if it takes long.
///
/// # Errors
/// A model, the device or the sandbox cannot be used.
pub(crate) async fn start(config: &Config, format: Format) -> Result<Daemon, CliError> {
    let progress = Arc::new(Progress::new(format));
    progress.update("starting", Unit::Items, 0, 0);
    let (config, reports) = (config.clone(), progress.clone());
    let mut starting = tokio::task::spawn_blocking(move || {
        let report = |loading| match loading {
            LoadProgress::Loading { model, done_bytes, total_bytes } => {
                reports.update(&format!("loading {model}"), Unit::Bytes, done_bytes, total_bytes);
            }
            LoadProgress::Ready => reports.finish(),
        };
        let seams = Seams { wrap: super::WRAP.get().cloned(), ..Seams::default() };
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

/// The bytes of a component.
///
/// # Errors
/// The file cannot be read.
pub(crate) async fn read_component(path: &Path) -> Result<bytes::Bytes, CliError> {
    let bytes = tokio::fs::read(path).await.map_err(CliError::io(format!("read {}", path.display())))?;
    Ok(bytes.into())
}
