//! The models that are loaded, and what it means when a device fails.

use std::sync::{Arc, PoisonError, RwLock};

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use trellis_engine::{EngineFailure, ModelHandle};

/// A device that is lost, and with it every model on it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("model {model:?}: {failure}")]
pub struct DeviceFailure {
    /// A model on it.
    pub model: String,
    /// Why its engine has ended.
    pub failure: EngineFailure,
}

/// The models that are loaded now. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Models(Arc<RwLock<Arc<[ModelHandle]>>>);

impl Models {
    /// These; the first is the default.
    pub(crate) fn new(handles: Vec<ModelHandle>) -> Self {
        Self(Arc::new(RwLock::new(handles.into())))
    }

    /// Those at this moment, the default first.
    pub(crate) fn now(&self) -> Arc<[ModelHandle]> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts others in their place.
    pub(crate) fn replace(&self, handles: Vec<ModelHandle>) {
        self.change(|models| *models = handles);
    }

    /// One more; the default if it is the one of this name.
    pub(crate) fn add(&self, handle: ModelHandle, default: &str) {
        self.change(|models| {
            let idx = if handle.model().name == default { 0 } else { models.len() };
            models.insert(idx, handle);
        });
    }

    /// One less.
    pub(crate) fn remove(&self, name: &str) {
        self.change(|models| models.retain(|handle| handle.model().name != name));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<ModelHandle>)) {
        let mut models = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let mut changed = models.to_vec();
        change(&mut changed);
        *models = changed.into();
    }
}

/// The failure of the first of these models' devices that has failed.
pub(crate) fn failure(models: &[ModelHandle]) -> Option<DeviceFailure> {
    models.iter().find_map(|model| Some(DeviceFailure::of(model, model.failure()?)))
}

/// Waits until the device of one of these models fails; for ever if there are none.
pub(crate) async fn failed(models: &[ModelHandle]) -> DeviceFailure {
    if models.is_empty() {
        return std::future::pending().await;
    }
    let failures =
        models.iter().map(|model| async move { DeviceFailure::of(model, model.failed().await) }.boxed());
    select_all(failures).await.0
}

impl DeviceFailure {
    fn of(model: &ModelHandle, failure: EngineFailure) -> Self {
        Self { model: model.model().name.clone(), failure }
    }
}
