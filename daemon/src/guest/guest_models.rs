//! The models as one guest sees them, and which of them it has opened.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use tokio::sync::watch;
use trellis_engine::{ModelHandle, ModelLease};

use crate::models::{DeviceFailure, Models, failure};

/// The loaded models, for one guest.
#[derive(Debug)]
pub(crate) struct GuestModels {
    loaded: Models,
    /// The name of the model that it gets when it names none, if that was chosen for it.
    default: Option<String>,
    opened: watch::Sender<Vec<Arc<ModelLease>>>,
}

impl GuestModels {
    pub(crate) fn new(loaded: Models, default: Option<String>) -> Self {
        Self { loaded, default, opened: watch::Sender::new(Vec::new()) }
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

    /// How the device of a model that the guest has opened failed.
    pub(crate) fn failure(&self) -> Option<DeviceFailure> {
        failure(&self.opened())
    }

    /// One that the guest has opened and that was unloaded since, or is about to be.
    pub(crate) fn unloaded(&self) -> Option<ModelHandle> {
        self.opened().into_iter().find(|handle| handle.is_unloaded() || handle.is_closed())
    }

    /// Waits until one that the guest has opened is unloaded, or its device fails.
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
