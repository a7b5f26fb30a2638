//! The models as one guest sees them, and which of them it has opened.

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use tokio::sync::watch;
use trellis_engine::ModelHandle;

use crate::models::Models;

/// The loaded models, for one guest.
#[derive(Debug)]
pub(crate) struct GuestModels {
    loaded: Models,
    /// The name of the model that it gets when it names none, if that was chosen for it.
    default: Option<String>,
    opened: watch::Sender<Vec<ModelHandle>>,
}

impl GuestModels {
    pub(crate) fn new(loaded: Models, default: Option<String>) -> Self {
        Self { loaded, default, opened: watch::Sender::new(Vec::new()) }
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
            let is_new = !opened.iter().any(|other| other.is_same(&found));
            if is_new {
                opened.push(found.clone());
            }
            is_new
        });
        Some(found)
    }

    /// One that the guest has opened and that was unloaded since.
    pub(crate) fn unloaded(&self) -> Option<ModelHandle> {
        self.opened.borrow().iter().find(|handle| handle.is_unloaded()).cloned()
    }

    /// Waits until one that the guest has opened is unloaded.
    pub(crate) async fn wait_for_unload(&self) {
        let mut opened = self.opened.subscribe();
        loop {
            let models = opened.borrow_and_update().clone();
            if models.is_empty() {
                // The sender is held here.
                let _ = opened.changed().await;
                continue;
            }
            let unloads = select_all(models.iter().map(|handle| handle.unloaded().boxed()));
            tokio::select! {
                _ = unloads => return,
                _ = opened.changed() => {}
            }
        }
    }
}
