//! The models as one guest sees them, and which of them it has opened.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use tokio::sync::watch;
use trellis_engine::{ModelHandle, ModelLease};

use super::error::GuestEnd;
use crate::models::{DeviceFailure, Models, failure};

/// The loaded models, for one guest.
#[derive(Debug)]
pub(crate) struct GuestModels {
    loaded: Models,
    /// Those that were loaded when it began.
    at_first: Arc<[ModelHandle]>,
    /// The name of the model that it gets when it names none, if that was chosen for it.
    default: Option<String>,
    opened: watch::Sender<Vec<Arc<ModelLease>>>,
}

impl GuestModels {
    pub(crate) fn new(loaded: Models, default: Option<String>) -> Self {
        let at_first = loaded.now();
        Self { loaded, at_first, default, opened: watch::Sender::new(Vec::new()) }
    }

    /// The model that was chosen for the guest, should it name none.
    pub(crate) fn default_name(&self) -> Option<String> {
        self.default.clone()
    }

    /// Those that are loaded, the guest's default first.
    pub(crate) fn now(&self) -> Vec<ModelHandle> {
        let mut models = self.loaded.now().to_vec();
        if let Some(name) = &self.default {
            models.sort_by_key(|handle| handle.model().name != *name);
        }
        models
    }

    /// The model of this name, or the default, from now on among those that the guest has opened.
    pub(crate) fn open(&self, name: Option<&str>) -> Option<ModelHandle> {
        let name = name.or(self.default.as_deref());
        let found =
            self.now().into_iter().find(|handle| name.is_none_or(|name| handle.model().name == name))?;
        self.opened.send_if_modified(|opened| {
            let is_new = !opened.iter().any(|lease| lease.handle().is_same(&found));
            if is_new {
                opened.push(Arc::new(found.lease()));
            }
            is_new
        });
        Some(found)
    }

    fn opened(&self) -> Vec<ModelHandle> {
        self.opened.borrow().iter().map(|lease| lease.handle().clone()).collect()
    }

    /// What has become of models so that the guest cannot go on: a device failed, or one that the guest has opened has
    /// failed or was unloaded since, or is about to be.
    pub(crate) fn loss(&self) -> Option<GuestEnd> {
        let opened = self.opened();
        if let Some(DeviceFailure { model, failure }) = failure(&self.at_first).or(failure(&opened)) {
            return Some(GuestEnd::DeviceFailed { model, reason: failure.to_string() });
        }
        let failed = |model: &ModelHandle| {
            let (reason, model) = (model.failure()?.to_string(), model.model().name.clone());
            Some(GuestEnd::ModelFailed { model, reason })
        };
        if let Some(end) = opened.iter().find_map(failed) {
            return Some(end);
        }
        let unloaded = opened.iter().find(|handle| handle.is_unloaded() || handle.is_closed())?;
        Some(GuestEnd::ModelUnloaded { model: unloaded.model().name.clone() })
    }

    /// Waits until one that the guest has opened is unloaded or fails, or its device does.
    pub(crate) async fn wait_for_loss(&self) {
        let mut opened = self.opened.subscribe();
        loop {
            let models: Vec<ModelHandle> =
                opened.borrow_and_update().iter().map(|lease| lease.handle().clone()).collect();
            if models.is_empty() {
                // The sender is held here.
                let _ = opened.changed().await;
                continue;
            }
            let losses = models.iter().map(|handle| {
                async move {
                    tokio::select! {
                        () = handle.unloaded() => {}
                        _ = handle.failed() => {}
                    }
                }
                .boxed()
            });
            tokio::select! {
                _ = select_all(losses) => return,
                _ = opened.changed() => {}
            }
        }
    }
}
