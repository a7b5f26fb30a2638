//! The models that are loaded, and what it means when a device fails.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use tokio::sync::watch;
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
pub(crate) struct Models(Arc<watch::Sender<Arc<[ModelHandle]>>>);

impl Models {
    /// These; the first is the default.
    pub(crate) fn new(handles: Vec<ModelHandle>) -> Self {
        Self(Arc::new(watch::Sender::new(handles.into())))
    }

    /// Those at this moment, the default first.
    pub(crate) fn now(&self) -> Arc<[ModelHandle]> {
        self.0.borrow().clone()
    }

    /// Puts others in their place, the one of this name first.
    pub(crate) fn replace(&self, mut handles: Vec<ModelHandle>, default: &str) {
        handles.sort_by_key(|handle| handle.model().name != default);
        self.0.send_replace(handles.into());
    }

    /// One more; the default if it is the one of this name.
    pub(crate) fn add(&self, handle: ModelHandle, default: &str) {
        self.change(|models| {
            let idx = if handle.model().name == default { 0 } else { models.len() };
            models.insert(idx, handle);
        });
    }

    /// One less.
    pub(crate) fn remove(&self, gone: &ModelHandle) {
        self.change(|models| models.retain(|handle| !handle.is_same(gone)));
    }

    /// Waits until the device of a model fails that is loaded then.
    pub(crate) async fn failed(&self) -> DeviceFailure {
        let mut models = self.0.subscribe();
        loop {
            let now = models.borrow_and_update().clone();
            tokio::select! {
                failure = failed(&now) => return failure,
                // The sender is held here.
                _ = models.changed() => {}
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Vec<ModelHandle>)) {
        self.0.send_modify(|models| {
            let mut changed = models.to_vec();
            change(&mut changed);
            *models = changed.into();
        });
    }
}

/// The names of models.
pub(crate) fn names(models: &[ModelHandle]) -> Vec<String> {
    models.iter().map(|handle| handle.model().name.clone()).collect()
}

/// The failure of the first of these models' devices that has failed.
pub(crate) fn failure(models: &[ModelHandle]) -> Option<DeviceFailure> {
    models.iter().find_map(|model| Some(DeviceFailure::of(model, model.device_failure()?)))
}

/// Waits until the device of one of these models fails; for ever if there are none.
pub(crate) async fn failed(models: &[ModelHandle]) -> DeviceFailure {
    if models.is_empty() {
        return std::future::pending().await;
    }
    let failures = models
        .iter()
        .map(|model| async move { DeviceFailure::of(model, model.device_failed().await) }.boxed());
    select_all(failures).await.0
}

impl DeviceFailure {
    fn of(model: &ModelHandle, failure: EngineFailure) -> Self {
        Self { model: model.model().name.clone(), failure }
    }
}
