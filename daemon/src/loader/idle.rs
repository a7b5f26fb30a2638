//! Models of the catalog that nobody has used for a while go by themselves. Nothing looks round for them: each is followed as it
//! comes to be held and let go, and there is a timer where it is due.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use trellis_engine::ModelHandle;

use super::Loader;
use super::demand::OnDemand;
use crate::models::{Listing, Models};

const WHY: &str = "nobody has used it";

impl Loader {
    /// Guests find models that are loaded on demand from now on, and in a runtime those are followed.
    pub(crate) fn open_catalog(self: &Arc<Self>) {
        self.models.open_by(Arc::new(OnDemand(Arc::downgrade(self))));
        if let Ok(runtime) = Handle::try_current() {
            self.follow_catalog(&runtime);
        }
    }

    /// Follows the models of the catalog in this runtime, unless one does already.
    pub(crate) fn follow_catalog(self: &Arc<Self>, runtime: &Handle) {
        if !self.demand.go_on_in(runtime) {
            return;
        }
        for (name, model) in &self.config.catalog {
            let idle = model.idle_unload_ms.map(Duration::from_millis);
            let following = follow(Arc::downgrade(self), self.models.clone(), name.clone(), idle);
            let ending = self.ending.clone();
            runtime.spawn(async move {
                tokio::select! {
                    () = following => {}
                    () = ending.cancelled() => {}
                }
            });
        }
    }
}

/// The model of this name that guests find.
fn listed(listing: &Listing, name: &str) -> Option<ModelHandle> {
    listing.in_order().iter().find(|model| model.model().name == name).cloned()
}

/// Follows a model each time that it is there.
async fn follow(loader: Weak<Loader>, models: Models, name: String, idle: Option<Duration>) {
    let mut listings = models.subscribe();
    while loader.strong_count() > 0 {
        let Some(model) = listed(&listings.borrow_and_update(), &name) else {
            // The sender is held by `models`.
            let _ = listings.changed().await;
            continue;
        };
        let mut used = pin!(follow_use(&loader, &model, idle));
        loop {
            tokio::select! {
                () = &mut used => break,
                _ = listings.changed() => {
                    let now = listed(&listings.borrow_and_update(), &name);
                    if !now.is_some_and(|now| now.is_same(&model)) {
                        break;
                    }
                }
            }
        }
    }
}

/// Notes when a model is used, until it is unloaded because it was not for so long.
async fn follow_use(loader: &Weak<Loader>, model: &ModelHandle, idle: Option<Duration>) {
    let mut holders = model.holders();
    loop {
        let n_holders = *holders.borrow_and_update();
        let Some(there) = loader.upgrade() else { return };
        there.residents.note_used(&model.model().name);
        drop(there);
        let due = async {
            match idle.filter(|_| n_holders == 0) {
                Some(idle) => tokio::time::sleep(idle).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // The sender is held by the model.
            _ = holders.changed() => {}
            () = due => {
                let gone = loader.upgrade().and_then(|loader| loader.evict(model, WHY));
                if let Some(gone) = gone {
                    let _ = gone.await;
                    return;
                }
            }
        }
    }
}
