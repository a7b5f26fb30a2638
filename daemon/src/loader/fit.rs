//! What would become of a load, before it is tried.

use std::sync::Arc;

use super::residents::Wish;
use super::room::Room;
use super::{Candidate, Loader};
use crate::config::Device;
use crate::daemon::{DaemonError, open_model};
use crate::models::names;
use crate::shares::Needs;
use crate::tasks::blocking;

/// Whether there is room for a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// Its name.
    pub(crate) name: String,
    /// The device that it would run on.
    pub(crate) device: String,
    pub(crate) needs: Needs,
    /// What all models may have of the device.
    pub(crate) capacity_bytes: u64,
    /// What of that the models do not need that are there.
    pub(crate) free_bytes: u64,
    pub(crate) verdict: Verdict,
    /// Positions of its longest context, where it has room for as many.
    pub(crate) n_positions: usize,
}

/// What a load would come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is loaded.
    Loaded,
    /// It fits.
    Fits,
    /// It fits once these are unloaded, which nobody uses.
    Evicts(Vec<String>),
    /// It would wait: for these, which guests use, or for those that have just been loaded.
    Waits(Vec<String>),
    /// There is no room.
    No,
}

impl Loader {
    /// Says whether a model fits. Its files are looked at as for a load; nothing of it is loaded, and nothing unloaded.
    ///
    /// # Errors
    /// The model or the device cannot be used.
    pub(crate) async fn fit(
        self: &Arc<Self>,
        choice: String,
        device: Option<Device>,
    ) -> Result<Fit, DaemonError> {
        let device = self.device_of(&choice, device);
        let (config, path) = (self.config.clone(), choice.clone());
        let model = blocking(move || open_model(&path, &config)).await?;
        let (name, n_positions) = (model.name.clone(), model.config.n_positions);
        let mut devices = self.devices.lock().await;
        let idx = self.open(&mut devices, device).await?;
        let open = &devices[idx];
        let needs = open.chosen.needs(&model, &self.config, open.kv_bytes_max(&self.config));
        let fit = needs.map(|needs| {
            let others: u64 = open.needs().map(|other| other.fixed_bytes + other.kv_bytes_min()).sum();
            let mut candidates = [Candidate { choice, model, needs }];
            let evictable = self.residents.evictable(open, (Wish::Operator, None), &self.config);
            let room = |needs| open.room_for((needs, &[]), &evictable, &self.config);
            let is_there = names(&self.models.now()).contains(&name);
            let verdict = if is_there {
                Verdict::Loaded
            } else if open.divided(&candidates, &self.config).is_some() {
                Verdict::Fits
            } else if let Some(Room::Evict(models)) = room(needs) {
                Verdict::Evicts(names(&models))
            } else if open.shares(&mut candidates, &self.config).is_ok() {
                Verdict::Fits
            } else {
                match room(candidates[0].needs) {
                    Some(Room::Evict(models)) => Verdict::Evicts(names(&models)),
                    Some(Room::Wait(awaited)) => Verdict::Waits(awaited.names()),
                    None => Verdict::No,
                }
            };
            Fit {
                name,
                device: String::from(open.device),
                needs: candidates[0].needs,
                capacity_bytes: open.capacity_bytes,
                free_bytes: open.capacity_bytes.saturating_sub(others),
                verdict,
                n_positions: n_positions.min(candidates[0].needs.n_pages_min * super::PAGE_LEN),
            }
        });
        self.close_idle(&mut devices).await;
        fit
    }
}
