//! Which models a guest holds anything of.
#![expect(unreachable_pub, reason = "the generated bindings re-export types that have such a field")]

use std::ops::Deref;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use tokio::sync::watch;
use trellis_engine::{ModelHandle, ModelLease};

use crate::on_demand::Claim;

/// The models that one guest holds something of, as they change. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Holds(Arc<watch::Sender<Holding>>);

#[derive(Debug, Default)]
struct Holding {
    /// In the order in which the guest came to hold them.
    now: Vec<ModelUse>,
    /// Those that were lost while the guest held them, and that it has let go since: maybe because they were.
    lost: Vec<ModelHandle>,
}

#[derive(Debug)]
struct ModelUse {
    lease: ModelLease,
    /// Things of the model: handles, contexts, streams, masks, ...
    n_things: usize,
    /// What keeps the model where it was loaded because the guest asked.
    claim: Option<Box<dyn Claim>>,
}

/// A model, for one thing that a guest has of it. Unloading the model waits for the last of them, if not for ever.
#[derive(Debug)]
pub struct HeldModel {
    model: ModelHandle,
    holds: Holds,
}

impl Deref for HeldModel {
    type Target = ModelHandle;

    fn deref(&self) -> &ModelHandle {
        &self.model
    }
}

impl Clone for HeldModel {
    fn clone(&self) -> Self {
        self.holds.hold(self.model.clone())
    }
}

impl Drop for HeldModel {
    fn drop(&mut self) {
        // The lease, and the claim, go outside the lock, and once the guest is seen to hold nothing: a model that ends because its last
        // holder let go of it is no loss.
        drop(self.holds.let_go(&self.model));
    }
}

/// Whether nothing more is to be had of a model.
fn is_lost(model: &ModelHandle) -> bool {
    model.is_unloaded() || model.failure().is_some()
}

impl Holding {
    fn handles(&self) -> impl Iterator<Item = &ModelHandle> {
        self.now.iter().map(|held| held.lease.handle())
    }

    fn idx_of(&self, model: &ModelHandle) -> Option<usize> {
        self.handles().position(|other| other.is_same(model))
    }
}

impl Holds {
    /// Of a guest that has nothing.
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Holding::default())))
    }

    /// One thing more.
    pub(crate) fn hold(&self, model: ModelHandle) -> HeldModel {
        self.hold_by(model, None)
    }

    /// One thing more, of a model that is there as long as the guest has this; the guest lets go of it with its last thing.
    pub(crate) fn hold_by(&self, model: ModelHandle, mut claim: Option<Box<dyn Claim>>) -> HeldModel {
        self.0.send_if_modified(|holding| match holding.idx_of(&model) {
            Some(idx) => {
                let held = &mut holding.now[idx];
                held.n_things += 1;
                held.claim = held.claim.take().or_else(|| claim.take());
                false
            }
            None => {
                let claim = claim.take();
                holding.now.push(ModelUse { lease: model.lease(), n_things: 1, claim });
                true
            }
        });
        HeldModel { model, holds: self.clone() }
    }

    /// The model of this name, if the guest holds something of it.
    pub(crate) fn held(&self, name: &str) -> Option<HeldModel> {
        // Not within the loan: what is held more is noted in the same place.
        let held = self.0.borrow().handles().find(|model| model.model().name == name).cloned();
        held.map(|model| self.hold(model))
    }

    /// One thing less; the last one gives the lease back.
    fn let_go(&self, model: &ModelHandle) -> Option<ModelUse> {
        let mut lease = None;
        self.0.send_if_modified(|holding| {
            let idx = holding.idx_of(model).expect("it was counted when it was made");
            holding.now[idx].n_things -= 1;
            if holding.now[idx].n_things > 0 {
                return false;
            }
            lease = Some(holding.now.remove(idx));
            if is_lost(model) && !holding.lost.iter().any(|lost| lost.is_same(model)) {
                holding.lost.push(model.clone());
            }
            true
        });
        lease
    }

    /// The names of those that the guest holds something of, in the order in which it came to.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.0.borrow().handles().map(|model| model.model().name.clone()).collect();
        // One that was unloaded and loaded again may be held twice.
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Those of which nothing more is to be had, and of which the guest held something then.
    pub(crate) fn lost(&self) -> Vec<ModelHandle> {
        let holding = self.0.borrow();
        let held = holding.handles().filter(|model| is_lost(model));
        holding.lost.iter().chain(held).cloned().collect()
    }

    /// Waits until there is such a model.
    pub(crate) async fn wait_for_loss(&self) {
        let mut holding = self.0.subscribe();
        loop {
            let models: Vec<ModelHandle> = holding.borrow_and_update().handles().cloned().collect();
            // What ends from here on, the guest may have let go before: it is looked at anew.
            if !self.lost().is_empty() {
                return;
            }
            if models.is_empty() {
                // The sender is held here.
                let _ = holding.changed().await;
                continue;
            }
            let losses = models.iter().map(|model| {
                async move {
                    tokio::select! {
                        () = model.unloaded() => {}
                        _ = model.failed() => {}
                    }
                }
                .boxed()
            });
            tokio::select! {
                _ = select_all(losses) => {}
                _ = holding.changed() => {}
            }
        }
    }
}
