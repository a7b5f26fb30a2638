//! Saved contexts on a simulated disk.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use trellis_engine::account::Account;
use trellis_engine::backend::Backend;
use trellis_engine::model::Model;
use trellis_engine::{Archive, SavedContext, SavedName};

use super::SimulatedDisk;
use crate::saved::{Keepers, OfModel, Store, StoreLimits};

/// A model that is computed by a backend, as files on any disk name it.
#[derive(Clone, Debug)]
pub struct KnownModel(OfModel);

impl KnownModel {
    /// Reads all weights that are compiled in.
    pub fn of(model: &Arc<Model>, backend: &mut dyn Backend) -> Self {
        Self(OfModel::known(model, backend))
    }
}

/// What keeps saved contexts, as the daemon has it, without threads.
#[derive(Clone, Debug)]
pub struct SavedKeepers(Arc<Keepers>);

impl SavedKeepers {
    /// Over a disk, with room for so many bytes of a user and of all.
    #[must_use]
    pub fn over(disk: SimulatedDisk, of_user: u64, of_all: u64) -> Self {
        let store = Store::on(Box::new(disk), PathBuf::from("contexts"), StoreLimits { of_user, of_all });
        Self(Arc::new(Keepers::without_threads(store, Vec::new())))
    }

    /// The archive of a model.
    #[must_use]
    pub fn of(&self, model: &KnownModel) -> Arc<dyn Archive> {
        self.0.of_model(&model.0)
    }

    /// Waits until something is asked, and does it after so much time; not if the future is dropped before.
    pub async fn turn(&self, takes: impl FnOnce() -> Duration) {
        self.0.turn(takes).await;
    }

    /// Whether something is to be done still, for the model of a name or for any.
    #[must_use]
    pub fn is_busy(&self, of: Option<&str>) -> bool {
        self.0.is_busy(of)
    }

    /// What is kept under a name for a model.
    #[must_use]
    pub fn look_up(
        &self,
        model: &KnownModel,
        name: &SavedName,
        account: &Arc<Account>,
    ) -> Option<SavedContext> {
        self.0.look_up(&model.0, name, account)
    }
}
