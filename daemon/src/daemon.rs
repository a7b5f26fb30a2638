//! The daemon put together: models, engines, guests and the service that sessions talk to.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tokio_util::sync::CancellationToken;
use trellis_client::Client;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::cpu::{CpuBackend, CpuError, CpuOptions};
use trellis_engine::model::{Model, ModelConfig, ModelError, ModelSource};
use trellis_engine::{Engine, EngineHandle, EngineSettings, PrefixScope};

use crate::bundled;
use crate::config::{Config, Device};
use crate::guest::{GuestError, GuestHost, GuestHostConfig};
use crate::ipc::{self, Listener};
use crate::service::HostService;
use crate::session::{Actor, Limits, Sessions};

/// Bytes in flight each way between a client in this process and its session.
const DUPLEX_BYTES: usize = 64 << 10;

/// A daemon that has loaded its models and is ready for clients. Dropping it stops the engines.
pub struct Daemon {
    sessions: Arc<Sessions<HostService>>,
    service: Arc<HostService>,
    shutdown: CancellationToken,
    /// Stopped after the service that uses them.
    engines: Vec<Engine>,
}

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Neither a bundled model nor a folder.
    #[error("{name:?} is neither a bundled model ({}) nor a folder with a config.json", bundled::NAMES.join(", "))]
    UnknownModel {
        /// What was asked for.
        name: String,
    },
    /// Two models of one name.
    #[error("two models are named {name:?}: guests could not tell them apart")]
    DuplicateModel {
        /// The name.
        name: String,
    },
    /// A model folder that cannot be used.
    #[error("model {name:?}: {source}")]
    Model {
        /// The model.
        name: String,
        /// What is wrong with it.
        source: Box<ModelError>,
    },
    /// The backend could not be made.
    #[error("model {name:?}: {source}")]
    Backend {
        /// The model.
        name: String,
        /// Why.
        source: Box<CpuError>,
    },
    /// The KV cache does not hold one context.
    #[error(
        "model {name:?}: a context of {n_positions} tokens needs {needed_bytes} bytes of KV cache, \
         kv_bytes allows {kv_bytes}"
    )]
    KvTooSmall {
        /// The model.
        name: String,
        /// Tokens of the longest context.
        n_positions: usize,
        /// Bytes that it needs.
        needed_bytes: u64,
        /// Bytes that there are.
        kv_bytes: u64,
    },
    /// A GPU was asked for.
    #[error("--device cuda: this build computes on the CPU only; use --device cpu")]
    NoCuda,
    /// There is nowhere to keep compiled guests.
    #[error("no cache directory: set cache_dir in the configuration, or XDG_CACHE_HOME or HOME")]
    NoCacheDir,
    /// The sandbox could not be set up.
    #[error(transparent)]
    Host(#[from] GuestError),
}

/// How far the start is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadProgress {
    /// A model's files are being read.
    Loading {
        /// The model.
        model: String,
        /// Models done.
        done: usize,
        /// Models in all.
        total: usize,
    },
    /// All models are loaded.
    Ready,
}

impl Daemon {
    /// Loads the models and starts the engines. Blocks until that is done.
    ///
    /// # Errors
    /// A model, the device or the sandbox cannot be used.
    pub fn start(config: &Config, progress: &(dyn Fn(LoadProgress) + Sync)) -> Result<Self, DaemonError> {
        let started = Instant::now();
        if config.device == Device::Cuda {
            return Err(DaemonError::NoCuda);
        }
        let mut engines: Vec<Engine> = Vec::new();
        for (done, choice) in config.models.iter().enumerate() {
            let total = config.models.len();
            progress(LoadProgress::Loading { model: choice.clone(), done, total });
            let engine = start_engine(choice, config)?;
            let name = &engine.handle().model().name;
            if engines.iter().any(|other| &other.handle().model().name == name) {
                return Err(DaemonError::DuplicateModel { name: name.clone() });
            }
            engines.push(engine);
        }
        let handles: Vec<EngineHandle> = engines.iter().map(|engine| engine.handle().clone()).collect();
        let host = GuestHost::new(GuestHostConfig {
            limits: config.limits.clone(),
            cache_dir: config.cache_dir.clone().or_else(default_cache_dir).ok_or(DaemonError::NoCacheDir)?,
            compile_exe: config.compile_exe.clone(),
            engines: handles.clone(),
        })?;
        let shutdown = CancellationToken::new();
        let guests_dir = config.guests_dir.clone();
        let service = HostService::new(host, handles, guests_dir, &config.budgets, shutdown.clone(), started);
        let service = Arc::new(service);
        let limits = Limits {
            component_bytes_max: config.limits.component_bytes as u64,
            n_messages_max: config.limits.n_messages,
            credit_bytes_max: config.limits.output_bytes_in_flight as u64,
            ..Limits::default()
        };
        progress(LoadProgress::Ready);
        Ok(Self { sessions: Sessions::new(service.clone(), limits), service, shutdown, engines })
    }

    /// The engine of the model of that name, or of the default model.
    #[must_use]
    pub fn engine(&self, name: Option<&str>) -> Option<&EngineHandle> {
        let mut handles = self.engines.iter().map(Engine::handle);
        match name {
            Some(name) => handles.find(|handle| handle.model().name == name),
            None => handles.next(),
        }
    }

    /// What sessions talk to.
    #[must_use]
    pub fn service(&self) -> &Arc<HostService> {
        &self.service
    }

    /// A client inside this process, as the user who runs it.
    ///
    /// # Errors
    /// The handshake failed.
    pub async fn connect(&self) -> Result<Client, trellis_client::Error> {
        let (near, far) = tokio::io::duplex(DUPLEX_BYTES);
        let (sessions, shutdown) = (self.sessions.clone(), self.shutdown.clone());
        tokio::spawn(async move {
            if let Err(error) = sessions.serve(far, Actor::this_process(), shutdown).await {
                tracing::warn!(%error, "the session inside this process failed");
            }
        });
        Client::over(near).await
    }

    /// Serves clients until [`Daemon::shutdown`] is cancelled, by whoever holds it or by a client that may; then
    /// stops the guests and lets the sessions say so.
    pub async fn serve(&self, listener: Listener) {
        ipc::run(listener, self.sessions.clone(), self.shutdown.clone()).await;
    }

    /// Stops the daemon when cancelled.
    #[must_use]
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }
}

/// `$XDG_CACHE_HOME/trellis`, or `~/.cache/trellis`.
fn default_cache_dir() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".cache")))
        .map(|dir| dir.join("trellis"))
}

fn start_engine(choice: &str, config: &Config) -> Result<Engine, DaemonError> {
    let (name, source) = match bundled::source(choice) {
        Some(source) => (choice.to_owned(), source),
        None => {
            let folder = PathBuf::from(choice);
            if !folder.join("config.json").is_file() {
                return Err(DaemonError::UnknownModel { name: choice.to_owned() });
            }
            let name =
                folder.canonicalize().ok().and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
            (name.unwrap_or_else(|| choice.to_owned()), ModelSource::Folder(folder))
        }
    };
    let model = Model::open(&name, &source)
        .map_err(|source| DaemonError::Model { name: name.clone(), source: Box::new(source) })?;
    let options = CpuOptions {
        n_pages: n_pages(&name, &model.config, config.kv_bytes)?,
        n_host_pages: (config.kv_host_bytes / CpuBackend::page_bytes(&model.config)) as usize,
        n_threads: None,
        n_rows_max: config.n_step_rows,
        n_tokens_max: config.n_step_tokens,
    };
    let backend = CpuBackend::new(&model, &options)
        .map_err(|source| DaemonError::Backend { name, source: Box::new(source) })?;
    let prefix_scope = if config.is_prefix_cache_shared { PrefixScope::Shared } else { PrefixScope::Actor };
    let settings = EngineSettings { prefix_scope, n_step_tokens: config.n_step_tokens };
    Ok(Engine::start(Arc::new(model), Box::new(backend), settings))
}

fn n_pages(name: &str, model: &ModelConfig, kv_bytes: u64) -> Result<usize, DaemonError> {
    let n_pages = kv_bytes / CpuBackend::page_bytes(model);
    let n_needed = model.n_positions.div_ceil(PAGE_LEN) as u64;
    if n_pages < n_needed {
        return Err(DaemonError::KvTooSmall {
            name: name.to_owned(),
            n_positions: model.n_positions,
            needed_bytes: n_needed * CpuBackend::page_bytes(model),
            kv_bytes,
        });
    }
    Ok(n_pages as usize)
}
