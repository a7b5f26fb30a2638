//! The models as one guest sees them, and how it ends when one of them is lost.

use std::sync::{Mutex, PoisonError};

use trellis_engine::ModelHandle;

use super::error::GuestEnd;
use super::held::{HeldModel, Holds};
use crate::models::{DeviceFailure, DeviceWatch, Models, failed, failure};

/// The loaded models, for one guest.
#[derive(Debug)]
pub(crate) struct GuestModels {
    models: Models,
    /// Those in use when it began.
    devices: Vec<DeviceWatch>,
    /// The name of the model that it gets when it names none, if that was chosen for it.
    default: Option<String>,
    holds: Holds,
    /// The name of a model on its way out of which the guest wanted more.
    refused: Mutex<Option<String>>,
}

/// Why a guest does not get a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotOpened {
    /// There is none of that name.
    Unknown,
    /// It is on its way out.
    Leaving,
}

impl GuestModels {
    pub(crate) fn new(models: Models, default: Option<String>) -> Self {
        let devices = models.listing().devices().to_vec();
        Self { models, devices, default, holds: Holds::new(), refused: Mutex::default() }
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

    /// The model of this name, or the default, which the guest holds from now on.
    ///
    /// # Errors
    /// There is none, or it is on its way out.
    pub(crate) fn open(&self, name: Option<&str>) -> Result<HeldModel, NotOpened> {
        let name = name.or(self.default.as_deref());
        let listing = self.models.listing();
        let mut models = self.in_order(listing.loaded()).into_iter();
        let Some(found) = models.find(|handle| name.is_none_or(|name| handle.model().name == name)) else {
            let Some(name) = name.filter(|name| listing.is_leaving(name)) else {
                return Err(NotOpened::Unknown);
            };
            self.note_refused(name);
            return Err(NotOpened::Leaving);
        };
        // It goes on with this one.
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(self.holds.hold(found))
    }

    /// The guest wanted more of a model that is on its way out: if it gives up, that may be why.
    pub(crate) fn note_refused(&self, name: &str) {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(name.to_owned());
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
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone();
        refused.map(|model| GuestEnd::ModelUnloaded { model })
    }

    /// Waits until a device fails, or until a model that the guest holds something of fails or is unloaded.
    pub(crate) async fn wait_for_loss(&self) {
        tokio::select! {
            _ = failed(&self.devices) => {}
            () = self.holds.wait_for_loss() => {}
        }
    }
}
