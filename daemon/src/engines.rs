//! The engines of the loaded models, and what it means when one of them fails.

use std::sync::{Arc, PoisonError, RwLock};

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use trellis_engine::{EngineFailure, EngineHandle};

/// A device that is lost: one engine has failed, and those beside it compute on the same device.
#[derive(Clone, Debug, thiserror::Error)]
#[error("model {model:?}: {failure}")]
pub struct DeviceFailure {
    /// The model whose engine found out.
    pub model: String,
    /// Why it ended.
    pub failure: EngineFailure,
}

/// The engines that compute now; others take their place when the device is opened again. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Engines(Arc<RwLock<Arc<[EngineHandle]>>>);

impl Engines {
    /// These engines; the first is that of the default model.
    pub(crate) fn new(handles: Vec<EngineHandle>) -> Self {
        Self(Arc::new(RwLock::new(handles.into())))
    }

    /// The engines at this moment. What is begun with them ends with them.
    pub(crate) fn now(&self) -> Arc<[EngineHandle]> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts others in their place.
    pub(crate) fn replace(&self, handles: Vec<EngineHandle>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = handles.into();
    }
}

/// The failure of the first of these engines that has failed.
pub(crate) fn failure(engines: &[EngineHandle]) -> Option<DeviceFailure> {
    engines.iter().find_map(|engine| Some(DeviceFailure::of(engine, engine.failure()?)))
}

/// Waits until one of these engines fails.
pub(crate) async fn failed(engines: &[EngineHandle]) -> DeviceFailure {
    let failures =
        engines.iter().map(|engine| async move { DeviceFailure::of(engine, engine.failed().await) }.boxed());
    select_all(failures).await.0
}

impl DeviceFailure {
    fn of(engine: &EngineHandle, failure: EngineFailure) -> Self {
        Self { model: engine.model().name.clone(), failure }
    }
}
