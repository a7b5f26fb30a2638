//! The models as one guest sees them, and how it ends when one of them is lost.

use std::sync::{Mutex, PoisonError};

use trellis_engine::ModelHandle;
use trellis_engine::account::{ActorId, GuestId};

use super::error::GuestEnd;
use super::held::{HeldModel, Holds};
use crate::models::{DeviceFailure, DeviceWatch, Models, failed, failure};
use crate::on_demand::{self, Asker, LoadListener};

/// The loaded models, for one guest.
#[derive(Debug)]
pub(crate) struct GuestModels {
    models: Models,
    /// Those in use when it began.
    devices: Vec<DeviceWatch>,
    /// The name of the model that it gets when it names none, if that was chosen for it.
    default: Option<String>,
    holds: Holds,
    /// Who asks for models that are not loaded yet.
    asker: Asker,
    /// The end that it comes to if it gives up because of the model that it was refused last.
    refused: Mutex<Option<GuestEnd>>,
}

/// Why a guest does not get a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotOpened {
    /// There is none of that name.
    Unknown,
    /// It is on its way out.
    Leaving,
    /// It was to be loaded for the guest, and was not, for this reason.
    NotLoaded(String),
}

impl GuestModels {
    pub(crate) fn new(models: Models, default: Option<String>) -> Self {
        let devices = models.listing().devices().to_vec();
        let asker = Asker { guest: GuestId(0), user: ActorId(0), loads: LoadListener::default() };
        Self { models, devices, default, holds: Holds::new(), asker, refused: Mutex::default() }
    }

    /// The same of this guest, which may ask for models that are not loaded yet.
    pub(crate) fn asking(self, asker: Asker) -> Self {
        Self { asker, ..self }
    }

    /// The model that was chosen for the guest, should it name none.
    pub(crate) fn default_name(&self) -> Option<String> {
        self.default.clone()
    }

    /// Those that are loaded, the guest's default first.
    pub(crate) fn now(&self) -> Vec<ModelHandle> {
        self.in_order(self.models.now())
    }

    fn in_order(&self, mut models: Vec<ModelHandle>) -> Vec<ModelHandle> {
        if let Some(name) = &self.default {
            models.sort_by_key(|handle| handle.model().name != *name);
        }
        models
    }

    /// The names of those that the guest holds something of.
    pub(crate) fn names_held(&self) -> Vec<String> {
        self.holds.names()
    }

    /// The names that the guest may ask for.
    pub(crate) fn known(&self) -> Vec<String> {
        self.models.known()
    }

    /// The model of this name, or the default, which the guest holds from now on. One that may be loaded on demand is waited for.
    ///
    /// # Errors
    /// There is none, or it is on its way out, or it was not loaded.
    pub(crate) async fn open(&self, name: Option<&str>) -> Result<HeldModel, NotOpened> {
        let declared = self.models.declared();
        let name = name.or(self.default.as_deref());
        let name = name.or_else(|| declared.default_model());
        match name.and_then(|name| declared.resolve(name)) {
            Some(name) => self.open_declared(name).await,
            None => self.open_loaded(name).await,
        }
    }

    async fn open_declared(&self, name: &str) -> Result<HeldModel, NotOpened> {
        if let Some(held) = self.holds.held(name) {
            // It would wait for itself.
            if held.is_closed() {
                self.note_refused(name);
                return Err(NotOpened::Leaving);
            }
            return Ok(held);
        }
        let opener = self.models.opener().ok_or(NotOpened::Unknown)?;
        match opener.open(name, self.asker.clone()).await {
            Ok(on_demand::Opened { model, claim }) => {
                self.note(None);
                Ok(self.holds.hold_by(model, Some(claim)))
            }
            Err(on_demand::NotLoaded { reason, again }) => {
                let (model, why) = (name.to_owned(), reason.clone());
                self.note(Some(GuestEnd::ModelNotLoaded { model, reason: why, again }));
                Err(NotOpened::NotLoaded(reason))
            }
        }
    }

    async fn open_loaded(&self, name: Option<&str>) -> Result<HeldModel, NotOpened> {
        let listing = self.models.listing();
        let mut models = self.in_order(listing.loaded()).into_iter();
        let Some(found) = models.find(|handle| name.is_none_or(|name| handle.model().name == name)) else {
            let Some(name) = name.filter(|name| listing.is_leaving(name)) else {
                return Err(NotOpened::Unknown);
            };
            self.note_refused(name);
            return Err(NotOpened::Leaving);
        };
        // Whoever names none waits for it, and keeps it, as whoever names it.
        let found_name = found.model().name.clone();
        if name.is_none()
            && self.models.opener().is_some()
            && self.models.declared().resolve(&found_name).is_some()
        {
            return self.open_declared(&found_name).await;
        }
        // It goes on with this one.
        self.note(None);
        Ok(self.holds.hold(found))
    }

    /// The guest wanted more of a model that is on its way out: if it gives up, that may be why.
    pub(crate) fn note_refused(&self, name: &str) {
        self.note(Some(GuestEnd::ModelUnloaded { model: name.to_owned() }));
    }

    /// Forgets what the guest's user has saved under a name of models that are not loaded; whether there was anything.
    pub(crate) async fn forget(&self, name: &str) -> bool {
        match self.models.opener() {
            Some(opener) => opener.forget(name, self.asker.clone()).await,
            None => false,
        }
    }

    fn note(&self, refused: Option<GuestEnd>) {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = refused;
    }

    /// How the guest has ended, given what it looks like: a guest that was stopped, or gave up over an error, may have done
    /// so because a device failed, or because a model that it held failed, was unloaded, or refused it more.
    pub(crate) fn cause_of(&self, end: GuestEnd) -> GuestEnd {
        let loss = match end {
            GuestEnd::Failed { .. } | GuestEnd::Exited { .. } => self.loss().or_else(|| self.refusal()),
            // To be refused something stops no guest, and makes none go wrong. A daemon whose device failed hangs up.
            GuestEnd::Trapped { .. } | GuestEnd::Stopped | GuestEnd::ClientGone => self.loss(),
            _ => None,
        };
        loss.unwrap_or(end)
    }

    fn loss(&self) -> Option<GuestEnd> {
        if let Some(DeviceFailure { device, failure }) = failure(&self.devices) {
            return Some(GuestEnd::DeviceFailed { device, reason: failure.to_string() });
        }
        let lost = self.holds.lost();
        // One that was opened since.
        if let Some((model, failure)) = lost.iter().find_map(|model| Some((model, model.device_failure()?))) {
            let listing = self.models.listing();
            let device = listing.devices().iter().find(|device| device.engine.is_of(model));
            let device = device.map_or_else(|| model.device().to_owned(), |device| device.device.clone());
            return Some(GuestEnd::DeviceFailed { device, reason: failure.to_string() });
        }
        let failed = |model: &ModelHandle| {
            let (reason, model) = (model.failure()?.to_string(), model.model().name.clone());
            Some(GuestEnd::ModelFailed { model, reason })
        };
        if let Some(end) = lost.iter().find_map(failed) {
            return Some(end);
        }
        let unloaded = lost.iter().find(|handle| handle.is_unloaded())?;
        Some(GuestEnd::ModelUnloaded { model: unloaded.model().name.clone() })
    }

    fn refusal(&self) -> Option<GuestEnd> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until a device fails, or until a model that the guest holds something of fails or is unloaded.
    pub(crate) async fn wait_for_loss(&self) {
        tokio::select! {
            _ = failed(&self.devices) => {}
            () = self.holds.wait_for_loss() => {}
        }
    }
}
