//! Models that come and go on a simulated device.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use trellis_engine::account::{ActorId, GuestId};
use trellis_engine::backend::{Backend, BackendError};
use trellis_engine::model::Model;
use trellis_engine::{Engine, EngineSettings, ModelHandle};

use crate::config::Config;
use crate::daemon::{DaemonError, Seams};
use crate::loader::{Fittings, Loader};
use crate::models::names;
pub use crate::on_demand::{Again, LoadListener};
use crate::on_demand::{Asker, Claim, NotLoaded, Opened};
use crate::shares::Needs;

/// What stands in the place of the machine's only device, of the engine on it and of the files of models.
pub trait Machine: fmt::Debug + Send + Sync {
    /// The model of this name, if its files are there.
    fn open_model(&self, name: &str) -> Option<Arc<Model>>;

    /// The engine of the device, which was opened.
    fn begin_engine(&self, settings: EngineSettings) -> Engine;

    /// Bytes that models may take of the device.
    fn capacity_bytes(&self) -> u64;

    /// What a model needs of the device.
    fn needs(&self, model: &str) -> ModelNeeds;

    /// Loads a model and gives it so many pages. `progress` hears bytes loaded and bytes in all, and may unwind.
    ///
    /// # Errors
    /// The device failed.
    fn load(
        &self,
        model: &str,
        n_pages: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Box<dyn Backend>, BackendError>;
}

/// What a model needs of a device.
#[derive(Clone, Copy, Debug)]
pub struct ModelNeeds {
    /// Weights.
    pub weight_bytes: u64,
    /// One KV page.
    pub page_bytes: u64,
    /// Pages that get their memory together.
    pub n_granule_pages: usize,
    /// Pages of the longest context.
    pub n_pages_min: usize,
    /// Pages beyond which it has no use for more.
    pub n_pages_most: usize,
}

impl From<ModelNeeds> for Needs {
    fn from(needs: ModelNeeds) -> Self {
        let ModelNeeds { weight_bytes, page_bytes, n_granule_pages, n_pages_min, n_pages_most } = needs;
        let kv_bytes_most = n_pages_most as u64 * page_bytes;
        Self {
            fixed_bytes: weight_bytes,
            weight_bytes,
            page_bytes,
            n_granule_pages,
            n_pages_min,
            kv_bytes_most,
        }
    }
}

/// A loader, as the daemon has it, over a machine that is simulated.
#[derive(Clone)]
pub struct Loads(Arc<Loader>);

impl fmt::Debug for Loads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Loads").field(&self.names()).finish()
    }
}

/// A model that a guest asked for, which stays as long as it has this.
#[derive(Debug)]
pub struct Held {
    /// The model.
    pub model: ModelHandle,
    _claim: Box<dyn Claim>,
}

impl Loads {
    /// With the models of the settings, and those of their catalog to be had. In a runtime.
    ///
    /// # Errors
    /// A model cannot be used.
    pub fn start(config: Config, machine: Arc<dyn Machine>) -> Result<Self, DaemonError> {
        let seams = Seams { machine: Some(machine), ..Seams::default() };
        let fittings = Fittings { seams, ..Fittings::default() };
        let loader = Arc::new(Loader::start(config, PathBuf::new(), fittings, &|_| {})?);
        loader.open_catalog();
        Ok(Self(loader))
    }

    /// As a guest of a user asks for a model.
    ///
    /// # Errors
    /// What the guest is told, and whether it may ask again.
    pub async fn open(
        &self,
        name: &str,
        (guest, uid): (u64, u32),
        loads: LoadListener,
    ) -> Result<Held, (String, Again)> {
        let asker = Asker { guest: GuestId(guest), user: ActorId(uid), loads };
        let opener = self.0.models().opener().expect("the catalog is open").clone();
        match opener.open(name, asker).await {
            Ok(Opened { model, claim }) => Ok(Held { model, _claim: claim }),
            Err(NotLoaded { reason, again }) => Err((reason, again)),
        }
    }

    /// As who runs the daemon loads a model.
    ///
    /// # Errors
    /// It is not loaded.
    pub async fn load(&self, name: &str) -> Result<(), DaemonError> {
        self.0.load(name.to_owned(), None, |_, _| {}).await.map(drop)
    }

    /// As who runs the daemon unloads a model.
    ///
    /// # Errors
    /// It is not there, or its device has failed.
    pub async fn unload(&self, name: &str, drain: Duration) -> Result<(), Arc<DaemonError>> {
        self.0.unload(name, drain).await.map(drop)
    }

    /// Opens the device again with what is to be on it.
    ///
    /// # Errors
    /// A model cannot be used any more, or loads take longer than that.
    pub async fn reopen(&self, loading_for_max: Duration) -> Result<(), DaemonError> {
        self.0.reopen(loading_for_max).await
    }

    /// Names of the models that guests find.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        names(&self.0.models().now())
    }

    /// Names of the models on the device, once none is coming or going, and how many loads wait for room.
    pub async fn at_rest(&self) -> (Vec<String>, usize) {
        self.0.at_rest().await
    }

    /// No load begins for guests from now on.
    pub fn load_no_more(&self) {
        self.0.load_no_more();
    }

    /// Stops the engine, and loads as soon as they can be.
    pub fn stop(&self) {
        self.0.stop();
    }
}

/// What blocks on this thread takes so much virtual time from now on; with none it has threads of its own.
pub fn simulate_blocking(takes: Option<Box<dyn FnMut() -> Duration>>) {
    crate::tasks::simulated::set(takes);
}
