//! Devices, the engine on each, and the models that come and go there.

mod capacity;
mod demand;
mod errand;
mod fit;
mod gate;
mod idle;
mod load;
mod news;
mod queue;
mod reopen;
mod residents;
mod room;
mod setbacks;
mod start_check;
mod unload;

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, watch};
use tokio_util::sync::CancellationToken;
use trellis_engine::backend::{Backend, PAGE_LEN};
use trellis_engine::model::Model;
use trellis_engine::sampling::Operator;
use trellis_engine::{
    Engine, EngineError, EngineSettings, KvBounds, ModelFittings, ModelHandle, PrefixScope,
};

use self::capacity::Capacity;
use self::demand::Demand;
pub(crate) use self::fit::{Fit, Verdict};
use self::gate::Gates;
use self::load::Coming;
pub(crate) use self::news::News;
use self::queue::Queue;
pub(crate) use self::residents::is_evictable;
use self::residents::{Residents, Wish};
use self::setbacks::Setbacks;
pub(crate) use self::start_check::check_models;
use crate::bundled;
use crate::config::{Config, Device};
use crate::daemon::{DaemonError, LoadProgress, Seams, open_model};
use crate::device::{self, Chosen, Kv};
use crate::guest::Policy;
use crate::leaving::Leaving;
use crate::models::{DevicePast, DeviceWatch, Models, names};
use crate::on_demand::Declared;
use crate::saved::Keepers;
use crate::session::EndsBy;
use crate::shares::Needs;
use crate::tasks::blocking;
use crate::totals::Totals;

/// Positions that the shortest of long contexts has, where a device has no room for longer ones.
pub(crate) const N_POSITIONS_LEAST: usize = 2048;

/// How long it is waited for that what was saved is on disk: a gigabyte, on a disk that does little else.
const SETTLING_FOR_MAX: Duration = Duration::from_secs(10);

/// Time of that between two looks at whether the daemon is to end at once.
const SETTLING_PART: Duration = Duration::from_millis(200);

/// What goes with every model that is loaded.
#[derive(Clone, Default)]
pub(crate) struct Fittings {
    /// What a test puts into the daemon.
    pub(crate) seams: Seams,
    /// The operator's policy.
    pub(crate) policy: Option<Arc<Policy>>,
    /// What keeps saved contexts on disk.
    pub(crate) keepers: Option<Arc<Keepers>>,
}

/// A model that was read onto its device, and what stands in front of its samplers.
type Read = (Box<dyn Backend>, Option<Arc<Operator>>);

/// All that it takes to load models, the first time and again.
pub(crate) struct Loader {
    config: Config,
    cache_dir: PathBuf,
    fittings: Fittings,
    /// As guests find them.
    models: Models,
    /// The name of the model that guests get when they name none.
    default: String,
    leaving: Leaving,
    totals: Totals,
    news: News,
    residents: Residents,
    /// Loads that wait for room.
    queue: Queue,
    /// Models that take no new guests, since loads wait for them to go.
    gates: Arc<Gates>,
    demand: Demand,
    /// Models that have failed for guests.
    setbacks: Setbacks,
    /// Held while something is done to a device, and not while a model is read.
    devices: Mutex<Vec<OpenDevice>>,
    /// How often a model has come to the place that was kept for it, or has failed to, or has gone: loads that wait for room
    /// look again.
    changes: watch::Sender<u64>,
    /// Ends loads with the daemon.
    ending: CancellationToken,
}

/// A device in use. Its engine ends with it.
struct OpenDevice {
    /// As the settings would name it.
    device: Device,
    chosen: Chosen,
    capacity_bytes: u64,
    tenants: Vec<Tenant>,
    /// Those that are being read. While there are any, the device stays.
    coming: Vec<Coming>,
    engine: Engine,
    past: Arc<DevicePast>,
}

/// A model on a device.
struct Tenant {
    /// How it was asked for.
    choice: String,
    handle: ModelHandle,
    needs: Needs,
}

/// A model that is not loaded yet.
struct Candidate {
    choice: String,
    model: Model,
    needs: Needs,
}

impl Loader {
    /// Opens the device and loads the models of the settings. Blocks until that is done.
    ///
    /// # Errors
    /// A model or the device cannot be used.
    pub(crate) fn start(
        mut config: Config,
        cache_dir: PathBuf,
        fittings: Fittings,
        progress: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, DaemonError> {
        // All models are opened before any of them is loaded, which may take long. A driver takes about as long to begin.
        let (models, first) = std::thread::scope(|scope| {
            let opening = scope.spawn(|| open_device(config.device, &config, &cache_dir, &fittings));
            let models = open_models(&config.models, &config);
            (models, opening.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let (models, first) = (models?, first?);
        // A GPU that is lost is not to be replaced by the processor without a word.
        config.device = first.device;
        let order: Vec<String> = models.iter().map(|(_, model)| model.name.clone()).collect();
        let mut devices = vec![first];
        for (device, models) in by_device(models, &config) {
            let idx = match devices.iter().position(|open| open.device.is_same(device)) {
                Some(idx) => idx,
                None => {
                    devices.push(open_device(device, &config, &cache_dir, &fittings)?);
                    devices.len() - 1
                }
            };
            fill(&mut devices[idx], models, &config, &fittings, progress)?;
        }
        let mut loaded = handles(&devices);
        loaded.sort_by_key(|handle| order.iter().position(|name| *name == handle.model().name));
        let models = Models::with_declared(loaded, watches(&devices), Declared::of(&config));
        let default = models.declared().default_model().map(str::to_owned);
        let default = default.or_else(|| names(&models.now()).into_iter().next()).unwrap_or_default();
        let residents = Residents::default();
        names(&models.now()).iter().for_each(|name| residents.note_loaded(name, Wish::Operator, None));
        Ok(Self {
            config,
            cache_dir,
            fittings,
            models,
            default,
            leaving: Leaving::default(),
            totals: Totals::default(),
            news: News::default(),
            residents,
            queue: Queue::default(),
            gates: Arc::default(),
            demand: Demand::default(),
            setbacks: Setbacks::default(),
            devices: Mutex::new(devices),
            changes: watch::Sender::new(0),
            ending: CancellationToken::new(),
        })
    }

    /// The models that are loaded.
    pub(crate) fn models(&self) -> &Models {
        &self.models
    }

    /// The operator's policy, if there is one.
    pub(crate) fn policy(&self) -> Option<&Arc<Policy>> {
        self.fittings.policy.as_ref()
    }

    /// What keeps saved contexts on disk, if anything does.
    pub(crate) fn keepers(&self) -> Option<&Arc<Keepers>> {
        self.fittings.keepers.as_ref()
    }

    /// Waits until what was saved of a model is on disk, if not for ever.
    pub(crate) async fn settle_saved_of(&self, model: &ModelHandle) {
        self.settle(Some(model.model().name.clone()), SETTLING_FOR_MAX).await;
    }

    /// As [`Self::settle_saved_of`], of all models, for no longer than `ends_by` lets it.
    pub(crate) async fn settle_saved(&self, ends_by: &EndsBy) {
        let last = ends_by.at_most(SETTLING_FOR_MAX);
        loop {
            let now = tokio::time::Instant::now();
            let until = ends_by.at_most(last.saturating_duration_since(now));
            // In parts: the daemon may be told meanwhile to end at once.
            if self.settled(None, until.saturating_duration_since(now).min(SETTLING_PART)).await {
                return;
            }
            if tokio::time::Instant::now() >= until {
                return note_not_settled();
            }
        }
    }

    /// Waits until all devices run logit programs, as far as they do.
    pub(crate) async fn wait_for_programs(&self) {
        let devices: Vec<Chosen> = self.devices.lock().await.iter().map(|open| open.chosen.clone()).collect();
        blocking(move || devices.iter().for_each(Chosen::wait_for_programs)).await;
    }

    async fn settle(&self, of: Option<String>, at_most: Duration) {
        if !self.settled(of, at_most).await {
            note_not_settled();
        }
    }

    /// Whether what was saved is on disk, or comes there in so long.
    async fn settled(&self, of: Option<String>, at_most: Duration) -> bool {
        let Some(keepers) = self.keepers().cloned() else { return true };
        blocking(move || keepers.settle(of.as_deref(), at_most)).await
    }

    /// What was computed by all models that were ever loaded.
    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }

    /// What is being loaded, and what went wrong last.
    pub(crate) fn news(&self) -> &News {
        &self.news
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Where a model is to run that was asked for so: where that was said, or where the catalog has it, or where the others do.
    fn device_of(&self, choice: &str, device: Option<Device>) -> Device {
        device_of(choice, device, &self.config)
    }

    /// For how long no guest has had anything of a model of the catalog that is loaded.
    pub(crate) fn unused_for(&self, model: &ModelHandle) -> Option<Duration> {
        self.config.catalog.get(&model.model().name)?;
        self.residents.unused_for(model)
    }

    /// How many bytes of a model are loaded for guests that wait for it, or for the operator, and how many there are; `None` if it is
    /// not being loaded.
    pub(crate) fn progress_of(&self, name: &str) -> Option<(u64, u64)> {
        self.demand.progress_of(name).or_else(|| self.news.progress_of(name))
    }

    /// For the log.
    fn default_now(&self) -> String {
        names(&self.models.now()).into_iter().next().unwrap_or_else(|| "none".to_owned())
    }

    /// Stops all engines, and loads as soon as they can be.
    pub(crate) fn stop(&self) {
        self.ending.cancel();
        // A task that holds the devices lets go of the loader soon, and they go with it.
        if let Ok(mut devices) = self.devices.try_lock() {
            devices.clear();
        }
    }
}

impl OpenDevice {
    /// The most KV memory that any model may ever have.
    fn kv_bytes_max(&self, config: &Config) -> u64 {
        self.capacity().kv_bytes_max(config)
    }

    /// What it has for models, and what of that is taken or kept.
    fn capacity(&self) -> Capacity {
        Capacity { device: self.device, n_bytes: self.capacity_bytes, taken: self.needs().collect() }
    }

    /// KV memory of all models together, when these are the ones.
    fn kv_bytes(&self, models: &[Needs], config: &Config) -> u64 {
        self.capacity().kv_bytes(models, config)
    }

    /// As [`Capacity::divided`].
    fn divided(&self, coming: &[Candidate], config: &Config) -> Option<Vec<usize>> {
        self.capacity().divided(coming, config)
    }

    /// As [`Capacity::shares`].
    fn shares(&self, coming: &mut [Candidate], config: &Config) -> Result<Vec<usize>, DaemonError> {
        self.capacity().shares(coming, config)
    }

    /// Those of the models that are there, and of those for which a place is kept.
    fn needs(&self) -> impl Iterator<Item = Needs> {
        self.tenants.iter().map(|tenant| tenant.needs).chain(self.coming.iter().map(Coming::needs))
    }

    /// KV memory that the models on the device may have together, without what is kept for others.
    fn kv_bytes_of_tenants(&self, config: &Config) -> u64 {
        let needs: Vec<Needs> = self.needs().collect();
        let kept_bytes: u64 = self.coming.iter().map(|coming| coming.needs().kv_bytes_min()).sum();
        self.kv_bytes(&needs, config) - kept_bytes
    }

    /// Puts a loaded model on the engine.
    fn take_in(
        &mut self,
        candidate: Candidate,
        (mut backend, operator): Read,
        fittings: &Fittings,
    ) -> Result<ModelHandle, DaemonError> {
        let Candidate { choice, model, mut needs } = candidate;
        let name = model.name.clone();
        // What it is cut to it keeps.
        needs.n_pages_min = backend.limits().n_positions_max.div_ceil(PAGE_LEN);
        needs.n_granule_pages = backend.limits().n_granule_pages;
        let n_pages_max = usize::try_from(needs.kv_bytes_most / needs.page_bytes).unwrap_or(usize::MAX);
        let bounds = KvBounds { n_pages_min: needs.n_pages_min, n_pages_max };
        let model = Arc::new(model);
        let archive = fittings.keepers.as_ref().map(|keepers| keepers.of(&model, backend.as_mut()));
        let handle = self.engine.add_with(ModelFittings { operator, archive }, model, backend, bounds);
        let handle = handle.map_err(|source| DaemonError::Engine { name, source })?;
        self.tenants.push(Tenant { choice, handle: handle.clone(), needs });
        Ok(handle)
    }

    /// Lets the models have all the memory, as far as it can be had.
    async fn settle(&mut self, config: &Config) {
        let kv_bytes = self.kv_bytes_of_tenants(config);
        if let Err(error) = self.share(kv_bytes).await {
            tracing::warn!(%error, kv_bytes, "models go on with the pages that they have");
        }
    }

    /// Sees to it that all models have so many bytes of KV memory together.
    async fn share(&self, kv_bytes: u64) -> Result<(), EngineError> {
        self.engine.share(kv_bytes)?.await
    }
}

impl Candidate {
    /// Whether its contexts are shorter than the model allows.
    fn is_cut(&self) -> bool {
        self.needs.n_pages_min * PAGE_LEN < self.model.config.n_positions
    }
}

/// Opens all of these models.
fn open_models(choices: &[String], config: &Config) -> Result<Vec<(String, Model)>, DaemonError> {
    let mut models: Vec<(String, Model)> = Vec::new();
    for choice in choices {
        let model = open_model(choice, config)?;
        if let Some((_, other)) = models.iter().find(|(_, other)| other.name == model.name) {
            return Err(match other.folder == model.folder {
                true => DaemonError::GivenTwice { name: model.name },
                false => DaemonError::DuplicateModel { name: model.name },
            });
        }
        models.push((choice.clone(), model));
    }
    Ok(models)
}

fn device_of(choice: &str, device: Option<Device>, config: &Config) -> Device {
    let declared = || config.catalog.get(Declared::of(config).resolve(choice)?)?.device;
    device.or_else(declared).filter(|&device| device != Device::Auto).unwrap_or(config.device)
}

/// These models, with those together that run on one device.
fn by_device<M>(models: Vec<(String, M)>, config: &Config) -> Vec<(Device, Vec<(String, M)>)> {
    let mut devices: Vec<(Device, Vec<(String, M)>)> = Vec::new();
    for (choice, model) in models {
        let device = device_of(&choice, None, config);
        match devices.iter_mut().find(|(other, _)| other.is_same(device)) {
            Some((_, models)) => models.push((choice, model)),
            None => devices.push((device, vec![(choice, model)])),
        }
    }
    devices
}

fn open_device(
    device: Device,
    config: &Config,
    cache_dir: &std::path::Path,
    fittings: &Fittings,
) -> Result<OpenDevice, DaemonError> {
    let chosen = device::choose(device, cache_dir)?;
    let prefix_scope = if config.is_prefix_cache_shared { PrefixScope::Shared } else { PrefixScope::Actor };
    let settings = EngineSettings {
        prefix_scope,
        n_step_tokens: chosen.sizes(config).n_step_tokens,
        latency_multiple: config.latency_multiple,
        port: fittings.seams.port,
    };
    let capacity_bytes = chosen.capacity_bytes()?.min(config.model_bytes.unwrap_or(u64::MAX));
    Ok(OpenDevice {
        device: chosen.device(),
        capacity_bytes,
        chosen,
        tenants: Vec::new(),
        coming: Vec::new(),
        engine: Engine::start(settings),
        // The most of all numbers stands for what is not known.
        past: DevicePast::begin(Some(capacity_bytes).filter(|&n_bytes| n_bytes < u64::MAX)),
    })
}

/// Loads models onto a device that has none.
fn fill(
    open: &mut OpenDevice,
    models: Vec<(String, Model)>,
    config: &Config,
    fittings: &Fittings,
    progress: &(dyn Fn(LoadProgress) + Sync),
) -> Result<(), DaemonError> {
    let mut coming = Vec::new();
    for (choice, model) in models {
        let needs = open.chosen.needs(&model, config, open.kv_bytes_max(config))?;
        coming.push(Candidate { choice, model, needs });
    }
    let shares = open.shares(&mut coming, config)?;
    for (candidate, n_pages) in coming.into_iter().zip(shares) {
        let name = candidate.model.name.clone();
        let report = |done_bytes, total_bytes| {
            progress(LoadProgress::Loading { model: name.clone(), done_bytes, total_bytes });
        };
        report(0, 0);
        let kv = Kv { n_pages, kv_bytes_max: open.kv_bytes_max(config) };
        let read = load_backend(&open.chosen, &candidate.model, config, kv, fittings, &report)?;
        open.take_in(candidate, read, fittings)?;
    }
    // They have it already; nothing is to be waited for.
    if let Err(error) = open.engine.share(open.kv_bytes_of_tenants(config)) {
        tracing::warn!(%error, "the models of a device do not share its memory");
    }
    Ok(())
}

fn load_backend(
    chosen: &Chosen,
    model: &Model,
    config: &Config,
    kv: Kv,
    fittings: &Fittings,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Read, DaemonError> {
    let backend = chosen.load(model, config, kv, progress)?;
    bundled::let_go();
    let operator = match &fittings.policy {
        Some(policy) => policy.operator(model, backend.limits().n_positions_max)?,
        None => None,
    };
    let backend = match &fittings.seams.wrap {
        Some(wrap) => wrap(&model.name, backend),
        None => backend,
    };
    Ok((backend, operator))
}

fn handles(devices: &[OpenDevice]) -> Vec<ModelHandle> {
    devices.iter().flat_map(|open| &open.tenants).map(|tenant| tenant.handle.clone()).collect()
}

/// The devices, as watched for whether they work.
fn watches(devices: &[OpenDevice]) -> Vec<DeviceWatch> {
    let watch = |open: &OpenDevice| DeviceWatch {
        device: open.device.into(),
        engine: open.engine.watch(),
        past: open.past.clone(),
    };
    devices.iter().map(watch).collect()
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

fn note_not_settled() {
    tracing::warn!("contexts that were saved last are not on disk");
}

#[cfg(test)]
mod tests;
