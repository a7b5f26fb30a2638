//! Archives without threads, for simulations: a caller does what is asked, one thing at a time, and says how long it takes.

use std::sync::Arc;
use std::time::Duration;

use trellis_engine::account::Account;
use trellis_engine::backend::Backend;
use trellis_engine::model::Model;
use trellis_engine::{Archive, SavedContext, SavedName};

use super::{Asked, Begun, Job, Keepers, OfModel, Shared};
use crate::saved::Store;

impl Keepers {
    /// As [`Self::over`], with nobody who does what is asked but [`Self::turn`].
    pub(crate) fn without_threads(store: Store, on_demand: Vec<String>) -> Self {
        Self::with_threads(store, on_demand, 0)
    }

    /// Waits until something is asked, and does it after so much time. If the future is dropped meanwhile, it is not done, as where
    /// the daemon is killed.
    pub(crate) async fn turn(&self, takes: impl FnOnce() -> Duration) {
        let shared = &self.shared;
        let Begun { actor, number, job } = loop {
            let begun = shared.lock().begin_next();
            match begun {
                Some(begun) => break begun,
                None => shared.asked.notified().await,
            }
        };
        tokio::time::sleep(takes()).await;
        if let Some(job) = job {
            shared.carry_out_by_turns(job).await;
        }
        shared.lock().end(actor, number);
    }

    /// The archive of a model that is known.
    pub(crate) fn of_model(&self, model: &OfModel) -> Arc<dyn Archive> {
        self.of_known(model.clone())
    }

    /// What is kept under a name for a model.
    pub(crate) fn look_up(
        &self,
        model: &OfModel,
        name: &SavedName,
        account: &Arc<Account>,
    ) -> Option<SavedContext> {
        self.shared.store.get(model.kind(), name, account)
    }

    /// Whether something is to be done still, for the model of a name or for any.
    pub(crate) fn is_busy(&self, of: Option<&str>) -> bool {
        self.shared.lock().has_jobs_of(of, u64::MAX)
    }
}

impl OfModel {
    /// A model that is computed by a backend, for any disk. Reads all weights that are compiled in.
    pub(crate) fn known(model: &Arc<Model>, backend: &mut dyn Backend) -> Self {
        let of = Self::of(model, backend);
        of.kind();
        of
    }
}

impl Shared {
    async fn carry_out_by_turns(&self, job: Job) {
        match job {
            Job { model: Some(model), name, asked: Asked::Save(kept), .. } => {
                self.keep(&model, &name, kept.taken().await);
            }
            job => self.carry_out(job),
        }
    }
}
