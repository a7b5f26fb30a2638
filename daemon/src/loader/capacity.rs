//! Whether models fit a device together, of which no more is known than what it has.

use trellis_engine::backend::PAGE_LEN;

use super::{Candidate, N_POSITIONS_LEAST};
use crate::config::{Config, Device};
use crate::daemon::DaemonError;
use crate::shares::{Needs, divide};

/// What a device has for models, and what of that is taken.
pub(super) struct Capacity {
    pub(super) device: Device,
    pub(super) n_bytes: u64,
    /// Those of the models that are there, or are coming already.
    pub(super) taken: Vec<Needs>,
}

impl Capacity {
    /// The most KV memory that any model may ever have.
    pub(super) fn kv_bytes_max(&self, config: &Config) -> u64 {
        config.kv_bytes.map_or(self.n_bytes, |kv_bytes| kv_bytes.min(self.n_bytes))
    }

    /// KV memory of all models together, when these are the ones.
    pub(super) fn kv_bytes(&self, models: &[Needs], config: &Config) -> u64 {
        let fixed = models.iter().fold(0u64, |sum, needs| sum.saturating_add(needs.fixed_bytes));
        let rest = self.n_bytes.saturating_sub(fixed);
        config.kv_bytes.map_or(rest, |kv_bytes| kv_bytes.min(rest))
    }

    /// Pages for each model that is there and for those that come, if they fit as they are.
    pub(super) fn divided(&self, coming: &[Candidate], config: &Config) -> Option<Vec<usize>> {
        let coming = coming.iter().map(|candidate| candidate.needs);
        let needs: Vec<Needs> = self.taken.iter().copied().chain(coming).collect();
        divide(self.kv_bytes(&needs, config), &needs)
    }

    /// As [`Self::divided`]. A context of one that comes may be shorter than the model's longest, if there is no room for that.
    ///
    /// # Errors
    /// They do not fit: the first that does not, with the numbers.
    pub(super) fn shares(
        &self,
        coming: &mut [Candidate],
        config: &Config,
    ) -> Result<Vec<usize>, DaemonError> {
        if let Some(shares) = self.divided(coming, config) {
            return Ok(shares);
        }
        for candidate in &mut *coming {
            let Candidate { model, needs, .. } = candidate;
            let n_positions = model.config.n_positions;
            if config.kv_bytes.is_some() || self.device.is_cpu() {
                continue;
            }
            needs.n_pages_min = n_positions.min(N_POSITIONS_LEAST).div_ceil(PAGE_LEN);
        }
        if let Some(shares) = self.divided(coming, config) {
            return Ok(shares);
        }
        let fits = |n: &usize| self.divided(&coming[..*n], config).is_some();
        let n_fitting = (0..coming.len()).take_while(fits).last().unwrap_or(0);
        Err(self.does_not_fit(&coming[..n_fitting + 1], config))
    }

    /// Why the last of those that come does not fit beside the others.
    fn does_not_fit(&self, coming: &[Candidate], config: &Config) -> DaemonError {
        let Candidate { model, needs, .. } = coming.last().expect("what is there fits");
        let before = coming[..coming.len() - 1].iter().map(|candidate| candidate.needs);
        let others: Vec<Needs> = self.taken.iter().copied().chain(before).collect();
        let kv_bytes_of_others: u64 = others.iter().map(Needs::kv_bytes_min).sum();
        let with_it: Vec<Needs> = others.iter().copied().chain([*needs]).collect();
        let fixed_bytes: u64 = with_it.iter().map(|needs| needs.fixed_bytes).sum();
        if config.kv_bytes.is_some() && fixed_bytes < self.n_bytes {
            let kv_bytes = self.kv_bytes(&with_it, config).saturating_sub(kv_bytes_of_others);
            return DaemonError::KvTooSmall {
                name: model.name.clone(),
                n_positions: model.config.n_positions,
                needed_bytes: needs.kv_bytes_min(),
                kv_bytes,
            };
        }
        let taken: u64 = others.iter().map(|needs| needs.fixed_bytes).sum::<u64>() + kv_bytes_of_others;
        DaemonError::NoRoom {
            name: model.name.clone(),
            needed_bytes: needs.fixed_bytes + needs.kv_bytes_min(),
            weight_bytes: needs.fixed_bytes,
            kv_bytes: needs.kv_bytes_min(),
            free_bytes: self.n_bytes.saturating_sub(taken),
            capacity_bytes: self.n_bytes,
        }
    }
}
