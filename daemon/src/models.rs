//! The models that are loaded, those on their way out, the devices under them, and what it means when a device fails.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use tokio::sync::watch;
use trellis_engine::{EngineFailure, EngineWatch, ModelHandle};

use crate::on_demand::{Declared, Opener};

/// A device that is lost, and with it every model on it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{device}: {failure}")]
pub struct DeviceFailure {
    /// The device, as the settings would name it.
    pub device: String,
    /// Why its engine has ended.
    pub failure: EngineFailure,
}

/// Tells whether a device in use works. Nothing of the device is held through this.
#[derive(Clone, Debug)]
pub(crate) struct DeviceWatch {
    /// As the settings would name it.
    pub(crate) device: String,
    pub(crate) engine: EngineWatch,
    pub(crate) past: Arc<DevicePast>,
}

/// What is told of a device and no model on it knows.
#[derive(Debug)]
pub(crate) struct DevicePast {
    opened: Instant,
    /// Bytes that models may take of it, if that is known.
    capacity_bytes: Option<u64>,
    /// How long it has computed for models that are gone, in microseconds.
    busy_us: AtomicU64,
}

impl DevicePast {
    /// That of a device that was opened just now, of which models may take so many bytes.
    pub(crate) fn begin(capacity_bytes: Option<u64>) -> Arc<Self> {
        Arc::new(Self { opened: Instant::now(), capacity_bytes, busy_us: AtomicU64::new(0) })
    }

    /// Bytes that models may take of it, if that is known.
    pub(crate) fn capacity_bytes(&self) -> Option<u64> {
        self.capacity_bytes
    }

    /// Since it was opened.
    pub(crate) fn open_for(&self) -> Duration {
        self.opened.elapsed()
    }

    /// A model goes for which it has computed for so long.
    pub(crate) fn note_busy(&self, busy: Duration) {
        self.busy_us.fetch_add(u64::try_from(busy.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// For how long it has computed for models that are gone.
    pub(crate) fn busy(&self) -> Duration {
        Duration::from_micros(self.busy_us.load(Ordering::Relaxed))
    }
}

/// What is loaded where, at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listing {
    /// Those that guests find, in the order in which they are to be the default.
    loaded: Vec<ModelHandle>,
    /// Those that guests do not find any more and that are not gone.
    leaving: Vec<ModelHandle>,
    /// The devices in use, also one that has no model.
    devices: Vec<DeviceWatch>,
}

/// What is loaded where, as it changes, and what may be loaded. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Models(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    listing: watch::Sender<Listing>,
    declared: Declared,
    /// Loads what is declared, once there is something that does.
    opener: OnceLock<Arc<dyn Opener>>,
}

impl Listing {
    /// Those that guests find, the default first: one that has failed comes after all that work.
    pub(crate) fn loaded(&self) -> Vec<ModelHandle> {
        let mut models = self.loaded.clone();
        models.sort_by_key(|model| model.failure().is_some());
        models
    }

    /// Those on their way out.
    pub(crate) fn leaving(&self) -> &[ModelHandle] {
        &self.leaving
    }

    /// Whether the model of this name is on its way out.
    pub(crate) fn is_leaving(&self, name: &str) -> bool {
        self.leaving.iter().any(|model| model.model().name == name)
    }

    /// Those that guests find, in the order in which they are to be the default.
    pub(crate) fn in_order(&self) -> &[ModelHandle] {
        &self.loaded
    }

    /// The devices in use.
    pub(crate) fn devices(&self) -> &[DeviceWatch] {
        &self.devices
    }
}

impl Models {
    /// These, on these devices; the first is the default.
    pub(crate) fn new(loaded: Vec<ModelHandle>, devices: Vec<DeviceWatch>) -> Self {
        Self::with_declared(loaded, devices, Declared::default())
    }

    /// As [`Self::new`], and these are loaded when a guest asks for them.
    pub(crate) fn with_declared(
        loaded: Vec<ModelHandle>,
        devices: Vec<DeviceWatch>,
        declared: Declared,
    ) -> Self {
        let listing = watch::Sender::new(Listing { loaded, leaving: Vec::new(), devices });
        Self(Arc::new(Inner { listing, declared, opener: OnceLock::new() }))
    }

    /// Those that may be loaded.
    pub(crate) fn declared(&self) -> &Declared {
        &self.0.declared
    }

    /// What loads them.
    pub(crate) fn opener(&self) -> Option<&Arc<dyn Opener>> {
        self.0.opener.get()
    }

    /// They are loaded by this. The first one stays.
    pub(crate) fn open_by(&self, opener: Arc<dyn Opener>) {
        let _ = self.0.opener.set(opener);
    }

    /// The names by which a guest may ask at this moment: those of the loaded models, the default first, and of those that would
    /// be loaded.
    pub(crate) fn known(&self) -> Vec<String> {
        let mut known = names(&self.now());
        let declared = self.declared().models().filter(|name| !known.iter().any(|other| other == name));
        let declared: Vec<String> = declared.map(str::to_owned).collect();
        known.extend(declared);
        known
    }

    /// All at this moment.
    pub(crate) fn listing(&self) -> Listing {
        self.0.listing.borrow().clone()
    }

    /// As it changes.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Listing> {
        self.0.listing.subscribe()
    }

    /// This is what is loaded where.
    pub(crate) fn set(&self, loaded: Vec<ModelHandle>, leaving: Vec<ModelHandle>, devices: Vec<DeviceWatch>) {
        self.0.listing.send_replace(Listing { loaded, leaving, devices });
    }

    /// Those that guests find at this moment, the default first.
    pub(crate) fn now(&self) -> Vec<ModelHandle> {
        self.0.listing.borrow().loaded()
    }

    /// One more; the default if it is the one of this name.
    pub(crate) fn add(&self, model: ModelHandle, default: &str) {
        self.0.listing.send_modify(|listing| {
            let idx = if model.model().name == default { 0 } else { listing.loaded.len() };
            listing.loaded.insert(idx, model);
        });
    }

    /// Sends the model of this name on its way out, if guests find one.
    pub(crate) fn send_off(&self, name: &str) -> Option<ModelHandle> {
        self.send_off_where(|model| model.model().name == name)
    }

    /// As [`Self::send_off`], this very model.
    pub(crate) fn send_off_this(&self, model: &ModelHandle) -> Option<ModelHandle> {
        self.send_off_where(|other| other.is_same(model))
    }

    fn send_off_where(&self, is_it: impl Fn(&ModelHandle) -> bool) -> Option<ModelHandle> {
        let mut sent_off = None;
        self.0.listing.send_if_modified(|listing| {
            let idx = listing.loaded.iter().position(&is_it);
            sent_off = idx.map(|idx| listing.loaded.remove(idx));
            listing.leaving.extend(sent_off.clone());
            sent_off.is_some()
        });
        sent_off
    }

    /// One that was on its way out is gone.
    pub(crate) fn remove(&self, gone: &ModelHandle) {
        self.0.listing.send_modify(|listing| listing.leaving.retain(|model| !model.is_same(gone)));
    }

    /// These are the devices in use.
    pub(crate) fn set_devices(&self, devices: Vec<DeviceWatch>) {
        self.0.listing.send_modify(|listing| listing.devices = devices);
    }

    /// After these devices were opened again: puts models that were loaded again in the place of those that were lost, and guests
    /// find no others. Returns those that are not wanted any more, because what they replace was sent off meanwhile.
    pub(crate) fn renew(
        &self,
        renewed: Vec<(ModelHandle, ModelHandle)>,
        devices: Vec<DeviceWatch>,
    ) -> Vec<ModelHandle> {
        let mut unwanted = Vec::new();
        self.0.listing.send_modify(|listing| {
            let mut loaded = vec![None; listing.loaded.len()];
            for (lost, again) in renewed {
                match listing.loaded.iter().position(|model| model.is_same(&lost)) {
                    Some(idx) => loaded[idx] = Some(again),
                    None => unwanted.push(again),
                }
            }
            listing.loaded = loaded.into_iter().flatten().collect();
            listing.devices = devices;
        });
        unwanted
    }

    /// How a device in use has failed, if one has.
    pub(crate) fn failure(&self) -> Option<DeviceFailure> {
        failure(&self.0.listing.borrow().devices)
    }

    /// Waits until a device fails that is in use then, whether or not a model is on it.
    pub(crate) async fn failed(&self) -> DeviceFailure {
        let mut listings = self.0.listing.subscribe();
        loop {
            let devices = listings.borrow_and_update().devices.clone();
            tokio::select! {
                failure = failed(&devices) => return failure,
                // The sender is held here.
                _ = listings.changed() => {}
            }
        }
    }
}

/// The names of models.
pub(crate) fn names(models: &[ModelHandle]) -> Vec<String> {
    models.iter().map(|handle| handle.model().name.clone()).collect()
}

/// The failure of the first of these devices that has failed.
pub(crate) fn failure(devices: &[DeviceWatch]) -> Option<DeviceFailure> {
    let failed = |DeviceWatch { device, engine, .. }: &DeviceWatch| {
        Some(DeviceFailure { device: device.clone(), failure: engine.failure()? })
    };
    devices.iter().find_map(failed)
}

/// Waits until one of these devices fails; for ever if there are none.
pub(crate) async fn failed(devices: &[DeviceWatch]) -> DeviceFailure {
    if devices.is_empty() {
        return std::future::pending().await;
    }
    let failures = devices.iter().map(|DeviceWatch { device, engine, .. }| {
        async move { DeviceFailure { device: device.clone(), failure: engine.failed().await } }.boxed()
    });
    select_all(failures).await.0
}
