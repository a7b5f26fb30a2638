//! The daemon put together: models, engines, guests and the service that sessions talk to.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use trellis_client::{Client, ReloadInfo};
use trellis_cuda::probe::Problem;
use trellis_cuda::{CudaError, LoadError};
use trellis_engine::backend::Backend;
use trellis_engine::cpu::CpuError;
use trellis_engine::model::{Dtype, Model, ModelError, SHAPES, shape};
use trellis_engine::{EngineError, ModelHandle, Port};

use crate::accounts::Accounts;
use crate::bundled;
use crate::classes::{ClassError, Classes};
use crate::config::{Config, OnDeviceFailure, SavedContexts};
use crate::descriptors::Shares;
use crate::guest::{GuestError, GuestHost, GuestHostConfig, GuestLimits, Policy, PolicyError, make_private};
pub use crate::hub::HubError;
use crate::ipc::{self, Listener};
use crate::live::Live;
use crate::loader::{Fittings, Loader};
use crate::machine;
use crate::model_path::source_of;
pub use crate::models::DeviceFailure;
use crate::on_demand::Declared;
use crate::permissions::{PermissionError, Permissions};
use crate::reload::{Origin, Reload, ReloadError};
use crate::saved::{Keepers, Store, StoreLimits};
use crate::service::{HostService, Parts};
use crate::session::{Actor, Sessions};
use crate::start_check;
use crate::upgrade::Upgrade;

/// Bytes in flight each way between a client in this process and its session.
const DUPLEX_BYTES: usize = 64 << 10;

/// A device that fails again so soon after it was opened again is given up.
const REOPENED_FOR_MIN: Duration = Duration::from_secs(60);

/// How long a device that failed waits for a load to be done before it is opened again. A load may be reading from where
/// nothing answers; then the process ends instead.
const LOADING_FOR_MAX: Duration = Duration::from_secs(60);

/// A model choice that begins so is random weights of a known shape, for measurements.
pub(crate) const SHAPE_PREFIX: &str = "shape:";
/// As the published weights of these shapes are stored.
const SHAPE_DTYPE: Dtype = Dtype::Bf16;
const SHAPE_SEED: u64 = 1;

/// Puts something between an engine and its backend, given the model's name; for tests, which let backends fail.
pub type BackendWrap = Arc<dyn Fn(&str, Box<dyn Backend>) -> Box<dyn Backend> + Send + Sync>;

/// What tests put into a daemon.
#[derive(Clone, Default)]
pub struct Seams {
    /// Between the engines and their backends.
    pub wrap: Option<BackendWrap>,
    /// Between guests and the engines.
    pub port: Port,
}

/// A daemon that has loaded its models and is ready for clients. Dropping it stops the engines.
pub struct Daemon {
    sessions: Arc<Sessions<HostService>>,
    service: Arc<HostService>,
    reload: Arc<Reload>,
    upgrade: Arc<Upgrade>,
    shutdown: CancellationToken,
    loader: Arc<Loader>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.loader.stop();
    }
}

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Neither a bundled model nor a folder or file.
    #[error("{name:?} is neither a bundled model ({}) nor a folder with a config.json nor a GGUF file", bundled::NAMES.join(", "))]
    UnknownModel {
        /// What was asked for.
        name: String,
    },
    /// Random weights of a shape that is not known.
    #[error("no shape is named {name:?}; known are {}", SHAPES.join(", "))]
    UnknownShape {
        /// What was asked for.
        name: String,
    },
    /// Two models of one name.
    #[error("two models are named {name:?}: guests could not tell them apart")]
    DuplicateModel {
        /// The name.
        name: String,
    },
    /// One model, asked for twice.
    #[error("model {name:?} is given twice")]
    GivenTwice {
        /// The name.
        name: String,
    },
    /// A model of that name is there.
    #[error("model {name:?} is loaded already{}", .folder.as_ref().map(|folder| format!(", from {}", folder.display())).unwrap_or_default())]
    AlreadyLoaded {
        /// The name.
        name: String,
        /// Where it is from.
        folder: Option<PathBuf>,
    },
    /// A mistake of ours while a model was loaded.
    #[error("loading model {name:?} panicked: {message}")]
    Panicked {
        /// The model.
        name: String,
        /// What the panic said.
        message: String,
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
    /// It does not fit beside the models that are there.
    #[error(
        "model {name:?} needs {needed_bytes} bytes ({weight_bytes} of weights and for steps, {kv_bytes} for the KV of one \
         context); of the {capacity_bytes} that the device has for models, {free_bytes} are free or can be freed"
    )]
    NoRoom {
        /// The model.
        name: String,
        /// All of it.
        needed_bytes: u64,
        /// Of which weights and memory for steps.
        weight_bytes: u64,
        /// Of which KV: what one context takes.
        kv_bytes: u64,
        /// What other models do not need.
        free_bytes: u64,
        /// What all models may take together.
        capacity_bytes: u64,
    },
    /// It would fit if others were not used, and was not to wait any longer.
    #[error("model {name:?} needs {needed_bytes} bytes, and there was no room for {waited:?}: {}; try again later", in_the_way(.used))]
    NoRoomNow {
        /// The model.
        name: String,
        /// What it needs.
        needed_bytes: u64,
        /// Models that guests use, and that would make room otherwise.
        used: Vec<String>,
        /// How long it has waited.
        waited: Duration,
    },
    /// It takes no new guests, because somebody waits for its room, and the guest was not to wait any longer.
    #[error(
        "model {name:?} takes no new guests at this moment: another one is to have its room; try again later"
    )]
    MakesRoom {
        /// The model.
        name: String,
    },
    /// It has the name of a model of the catalog, and is another.
    #[error("{choice:?} is a model named {name:?}, which is a name of the catalog")]
    Declared {
        /// What was asked for.
        choice: String,
        /// Its name.
        name: String,
    },
    /// A folder of the Hugging Face cache in which there is none.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// It is on its way out.
    #[error("model {name:?} is being unloaded: its guests are coming to their ends")]
    Leaving {
        /// The model.
        name: String,
    },
    /// A model is being loaded, and the devices cannot be opened again meanwhile.
    #[error("a model is being loaded, which has not come to its end within {} s", .waited.as_secs())]
    Loading {
        /// How long that was waited for.
        waited: Duration,
    },
    /// No more models are loaded.
    #[error("the daemon is shutting down")]
    Ending,
    /// The caller has stopped waiting for the model to be loaded.
    #[error("the load was cancelled")]
    GivenUp,
    /// No model of that name is there to be unloaded.
    #[error("no model named {name:?} is loaded; {}", if .known.is_empty() { "there is none".to_owned() } else { format!("there are {}", .known.join(", ")) })]
    NotLoaded {
        /// What was asked for.
        name: String,
        /// Those that are loaded.
        known: Vec<String>,
    },
    /// The engine did not do what a change of models needs.
    #[error("model {name:?}: {source}")]
    Engine {
        /// The model.
        name: String,
        /// Why.
        source: EngineError,
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
    /// A GPU was asked for or found, and something is missing that it needs.
    #[error("CUDA cannot be used: {}; --device cpu computes on the processor", list(.problems))]
    CudaUnusable {
        /// What is missing or does not fit.
        problems: Vec<Problem>,
    },
    /// The GPU failed before a model was loaded.
    #[error("CUDA cannot be used: {0}; --device cpu computes on the processor")]
    Cuda(#[from] CudaError),
    /// A model could not be loaded onto the GPU.
    #[error("model {name:?} cannot be loaded onto the GPU: {source}")]
    Load {
        /// The model.
        name: String,
        /// Why; numbers, if it does not fit.
        source: Box<LoadError>,
    },
    /// The processor does not compute in this type.
    #[error("dtype {} needs a GPU: the CPU computes in f32", .dtype.name())]
    CpuDtype {
        /// What was asked for.
        dtype: Dtype,
    },
    /// The guests that go by name cannot be listed.
    #[error("guests_dir {}: {source}", path.display())]
    GuestsDir {
        /// Their folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is nowhere to keep compiled guests.
    #[error("no cache directory: set cache_dir in the configuration, or XDG_CACHE_HOME or HOME")]
    NoCacheDir,
    /// A class of users is wrong.
    #[error(transparent)]
    Class(#[from] ClassError),
    /// A permission is given to nobody known.
    #[error(transparent)]
    Permission(#[from] PermissionError),
    /// The operator's policy cannot be used.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The sandbox could not be set up.
    #[error(transparent)]
    Host(#[from] GuestError),
}

impl DaemonError {
    /// Whether it says nothing of the daemon or the model, but of a moment in which others had what was asked for.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Self::AlreadyLoaded { .. } | Self::Leaving { .. } | Self::NoRoomNow { .. })
    }
}

/// How far the start is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadProgress {
    /// A model's weights are being read.
    Loading {
        /// The model.
        model: String,
        /// Bytes of its weights that are on the device.
        done_bytes: u64,
        /// Bytes in all; 0 as long as that is not known.
        total_bytes: u64,
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
        Self::start_with(config, Seams::default(), progress)
    }

    /// As [`Daemon::start`], with what a test puts into it.
    ///
    /// # Errors
    /// A model, the device or the sandbox cannot be used.
    pub fn start_with(
        config: &Config,
        seams: Seams,
        progress: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, DaemonError> {
        let started = Instant::now();
        let cache_dir = cache_dir(config).ok_or(DaemonError::NoCacheDir)?;
        make_private(&cache_dir)?;
        start_check::check_guests_dir(config)?;
        let classes = Classes::of(&config.classes)?;
        let permissions = Arc::new(Live::new(Permissions::of(&config.permissions)?));
        let policy = Policy::open(&config.policy, &config.limits, &cache_dir, config.compile_exe.as_deref())?;
        let keepers = keepers(config).map(Arc::new);
        let fittings = Fittings { seams, policy, keepers };
        let loader = Arc::new(Loader::start(config.clone(), cache_dir.clone(), fittings, progress)?);
        loader.open_catalog();
        let n_programs = config.limits.n_programs.min(Shares::now().n_programs);
        let host = GuestHost::new(GuestHostConfig {
            limits: GuestLimits { n_programs, ..config.limits.clone() },
            cache_dir,
            compile_exe: config.compile_exe.clone(),
            isolation: config.isolation,
            models: loader.models().clone(),
        })?;
        let shutdown = CancellationToken::new();
        let guests_dir = config.guests_dir.clone();
        let accounts =
            Accounts::with_classes(&config.budgets, config.host_bytes(machine::memory_bytes()), classes);
        let reload = Reload::new(config.clone(), permissions.clone(), accounts.clone(), shutdown.clone());
        let upgrade = Upgrade::new(shutdown.clone());
        let service = Arc::new(HostService::new(Parts {
            host,
            loader: loader.clone(),
            guests_dir,
            accounts,
            permissions,
            reload: reload.clone(),
            upgrade: upgrade.clone(),
            shutdown: shutdown.clone(),
            started,
        }));
        let sessions = Sessions::new(service.clone(), config.sessions.clone(), config.limits.clone());
        reload.set_sessions(&sessions);
        upgrade.set_sessions(&sessions);
        reload.set_loader(&loader);
        progress(LoadProgress::Ready);
        Ok(Self { sessions, service, reload, upgrade, shutdown, loader })
    }

    /// The model of that name, or the default model.
    #[must_use]
    pub fn model(&self, name: Option<&str>) -> Option<ModelHandle> {
        let is_it = |handle: &&ModelHandle| name.is_none_or(|name| handle.model().name == name);
        self.service.host().models().iter().find(is_it).cloned()
    }

    /// Waits until the devices run logit programs, as far as they do, which they otherwise begin to get ready for at the first.
    pub(crate) async fn wait_for_programs(&self) {
        self.loader.wait_for_programs().await;
    }

    /// How a device failed, unless all work. The daemon still answers then, and starts no guests.
    #[must_use]
    pub fn failure(&self) -> Option<DeviceFailure> {
        self.loader.models().failure()
    }

    /// Waits until a device fails, whether or not a model is on it.
    pub async fn failed(&self) -> DeviceFailure {
        self.loader.models().failed().await
    }

    /// Says where the configuration is from that [`Self::reload`] reads.
    pub fn set_origin(&self, origin: Arc<dyn Origin>) {
        self.reload.set_origin(origin);
    }

    /// Reads the configuration again, and has hold of it what can while the daemon runs.
    ///
    /// # Errors
    /// It is wrong; nothing has changed then.
    pub async fn reload(&self) -> Result<ReloadInfo, ReloadError> {
        self.reload.reload().await
    }

    /// What puts another program in the place of this one.
    pub(crate) fn upgrade(&self) -> &Arc<Upgrade> {
        &self.upgrade
    }

    /// What sessions talk to.
    #[must_use]
    pub fn service(&self) -> &Arc<HostService> {
        &self.service
    }

    /// The sessions of all clients.
    #[must_use]
    pub fn sessions(&self) -> &Arc<Sessions<HostService>> {
        &self.sessions
    }

    /// A client inside this process, as the user who runs it.
    ///
    /// # Errors
    /// The handshake failed.
    pub async fn connect(&self) -> Result<Client, trellis_client::Error> {
        self.loader.follow_catalog(&Handle::current());
        let (near, far) = tokio::io::duplex(DUPLEX_BYTES);
        let (sessions, shutdown) = (self.sessions.clone(), self.shutdown.clone());
        tokio::spawn(async move {
            match sessions.serve(far, Actor::this_process(), shutdown).await {
                Err(error) if !error.is_departure() => {
                    tracing::warn!(%error, "the session inside this process failed");
                }
                Ok(()) | Err(_) => {}
            }
        });
        Client::over(near).await
    }

    /// Serves clients until [`Daemon::shutdown`] is cancelled, by a holder of the token or by a client that may; then
    /// stops the guests and lets the sessions say so. When the device fails, does the same, unless the settings want it
    /// opened again and that works.
    ///
    /// # Errors
    /// The device failed.
    pub async fn serve(&self, listener: Listener) -> Result<(), DeviceFailure> {
        self.loader.follow_catalog(&Handle::current());
        let hand_over = self.upgrade.hand_over().clone();
        let mut serving = pin!(ipc::run(listener, self.sessions.clone(), self.shutdown.clone(), hand_over));
        let mut reopened: Option<Instant> = None;
        loop {
            let failure = tokio::select! {
                () = &mut serving => {
                    self.loader.settle_saved(self.sessions.ends_by()).await;
                    return Ok(());
                }
                failure = self.failed() => failure,
            };
            tracing::error!(device = failure.device, error = %failure.failure, "the device has failed");
            self.loader.news().note_failure(format!("the device failed: {failure}"));
            let is_hopeless = reopened.is_some_and(|at| at.elapsed() < REOPENED_FOR_MIN);
            if self.loader.config().on_device_failure == OnDeviceFailure::Reopen && !is_hopeless {
                let reopening = tokio::select! {
                    () = &mut serving => return Ok(()),
                    reopening = self.loader.reopen(LOADING_FOR_MAX) => reopening,
                };
                match reopening {
                    Ok(()) => {
                        reopened = Some(Instant::now());
                        tracing::warn!("the device was opened again; all contexts are gone");
                        continue;
                    }
                    Err(error) => {
                        tracing::error!(%error, "the device cannot be opened again");
                        self.loader
                            .news()
                            .note_failure(format!("the device cannot be opened again: {error}"));
                    }
                }
            }
            self.sessions.cut_short();
            self.shutdown.cancel();
            serving.await;
            return Err(failure);
        }
    }

    /// Takes on no more work and waits for what there is, for as long as `sessions.drain_ms` says; does not stop the daemon. One that
    /// is stopped meanwhile, by a client or because a device failed, waits no more, and is gone as soon as after a second signal; for one that
    /// was stopped before, this is a first signal.
    pub async fn drain(&self) {
        self.loader.load_no_more();
        self.service.host().drain(Instant::now() + self.sessions.drain_time());
        self.sessions.drain_unless(&self.shutdown).await;
    }

    /// How long [`Self::drain`] waits at most, and for how many guests, uploads and loads.
    #[must_use]
    pub fn drains(&self) -> (Duration, usize) {
        (self.sessions.drain_time(), self.sessions.n_at_work())
    }

    /// Stops the daemon when cancelled.
    #[must_use]
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }
}

/// The daemon's cache: what the settings say, or `$XDG_CACHE_HOME/trellis`, or `~/.cache/trellis`.
pub(crate) fn cache_dir(config: &Config) -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let usual = || absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    config.cache_dir.clone().or_else(|| usual().map(|dir| dir.join("trellis")))
}

/// The daemon's state, unless the settings say where: `$XDG_STATE_HOME/trellis`, or `~/.local/state/trellis`.
pub(crate) fn usual_state_dir() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let usual = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    usual.map(|dir| dir.join("trellis"))
}

/// What keeps saved contexts, where the settings name a place for them.
fn keepers(config: &Config) -> Option<Keepers> {
    let dir = config.state_dir.as_ref().filter(|_| config.saved_contexts == SavedContexts::Disk)?;
    let limits = StoreLimits { of_user: config.saved_disk_bytes_per_user, of_all: config.saved_disk_bytes };
    let on_demand = config.catalog.keys().cloned().collect();
    Some(Keepers::over(Store::new(dir.join("contexts"), limits), on_demand))
}

/// Opens a model, and checks all of its files but the values of its weights. What the catalog has under a name or an alias comes before a bundled
/// model or a folder.
pub(crate) fn open_model(choice: &str, config: &Config) -> Result<Model, DaemonError> {
    let names = Declared::of(config);
    if let Some((name, declared)) = names.resolve(choice).and_then(|name| config.catalog.get_key_value(name))
    {
        let mut model = open_undeclared(&declared.path, config)?;
        name.clone_into(&mut model.name);
        return Ok(model);
    }
    let model = open_undeclared(choice, config)?;
    match names.resolve(&model.name) {
        Some(_) => Err(DaemonError::Declared { choice: choice.to_owned(), name: model.name }),
        None => Ok(model),
    }
}

fn open_undeclared(choice: &str, config: &Config) -> Result<Model, DaemonError> {
    if let Some(name) = choice.strip_prefix(SHAPE_PREFIX) {
        let shape = shape(name).ok_or_else(|| DaemonError::UnknownShape { name: name.to_owned() })?;
        let dtype = config.dtype.chosen().unwrap_or(SHAPE_DTYPE);
        let tokenizer = bundled::tokenizer_json_of(shape.vocab_size);
        return Model::with_random_weights(name, shape, dtype, SHAPE_SEED, &tokenizer)
            .map_err(|source| DaemonError::Model { name: name.to_owned(), source: Box::new(source) });
    }
    let (name, source) = source_of(choice)?;
    Model::open(&name, &source).map_err(|source| DaemonError::Model { name, source: Box::new(source) })
}

fn in_the_way(used: &[String]) -> String {
    match used {
        [] => "what is there was loaded just now".to_owned(),
        used => format!("guests use {}", used.join(", ")),
    }
}

fn list(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
