//! Which models may make room for others, and which of them first: those of the catalog that are not pinned, the one that was used
//! longest ago.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use trellis_engine::ModelHandle;
use trellis_engine::account::ActorId;

use super::OpenDevice;
use crate::config::Config;

/// Who wants a model loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Who runs the daemon.
    Operator,
    /// A user whose guest has asked for it.
    User(ActorId),
}

/// What is known of models of the catalog that are loaded, by their names.
#[derive(Debug, Default)]
pub(super) struct Residents(Mutex<HashMap<String, Resident>>);

#[derive(Clone, Copy, Debug)]
struct Resident {
    /// When it came in the place of nothing that the same user had loaded.
    came: Instant,
    wish: Wish,
    used: Instant,
}

/// A model that may make room.
#[derive(Debug)]
pub(super) struct Evictable {
    pub(super) handle: ModelHandle,
    is_failed: bool,
    used: Instant,
    /// Until then it stays whatever others wish.
    stays_until: Option<Instant>,
}

impl Evictable {
    /// Whether it may go at this moment.
    pub(super) fn is_free(&self, now: Instant) -> bool {
        !self.is_held() && self.may_go(now)
    }

    /// Whether a guest has something of it.
    pub(super) fn is_held(&self) -> bool {
        *self.handle.holders().borrow() > 0
    }

    /// Whether it would go at this moment if nobody held it.
    pub(super) fn may_go(&self, now: Instant) -> bool {
        self.stays_until.is_none_or(|until| until <= now)
    }

    /// When it may go if nobody comes to hold it.
    pub(super) fn stays_until(&self) -> Option<Instant> {
        self.stays_until
    }
}

impl Residents {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Resident>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A model was loaded, in the place of others that came then for the same wish.
    pub(super) fn note_loaded(&self, name: &str, wish: Wish, came: Option<Instant>) {
        let now = Instant::now();
        self.lock().insert(name.to_owned(), Resident { came: came.unwrap_or(now), wish, used: now });
    }

    /// When the first of these came that was loaded for this wish.
    pub(super) fn came(&self, models: &[ModelHandle], wish: Wish) -> Option<Instant> {
        let residents = self.lock();
        let known = models.iter().filter_map(|model| residents.get(&model.model().name));
        known.filter(|resident| resident.wish == wish).map(|resident| resident.came).min()
    }

    /// A guest has something of a model, or had until now.
    pub(super) fn note_used(&self, name: &str) {
        if let Some(resident) = self.lock().get_mut(name) {
            resident.used = Instant::now();
        }
    }

    /// For how long no guest has had anything of a model.
    pub(super) fn unused_for(&self, model: &ModelHandle) -> Option<Duration> {
        let used = self.lock().get(&model.model().name)?.used;
        Some(if *model.holders().borrow() > 0 { Duration::ZERO } else { used.elapsed() })
    }

    /// Those on a device that may make room for what somebody wishes, and has waited for since then; the first to go first. What has
    /// failed is of no use, and goes before all.
    pub(super) fn evictable(
        &self,
        open: &OpenDevice,
        (wish, since): (Wish, Option<Instant>),
        config: &Config,
    ) -> Vec<Evictable> {
        let residents = self.lock();
        let stays = Duration::from_millis(config.model_resident_ms);
        let evictable = open.tenants.iter().filter_map(|tenant| {
            let name = &tenant.handle.model().name;
            if !is_evictable(name, config) || tenant.handle.is_closed() {
                return None;
            }
            let Resident { came, wish: whose, used } = *residents.get(name)?;
            let is_failed = tenant.handle.failure().is_some();
            let is_free_to = wish == Wish::Operator || wish == whose || is_failed;
            // What its user loads and loads again holds up nobody for longer than that.
            let from = since.map_or(came, |since| since.min(came));
            let stays_until = if is_free_to { None } else { from.checked_add(stays) };
            Some(Evictable { handle: tenant.handle.clone(), is_failed, used, stays_until })
        });
        let mut evictable: Vec<Evictable> = evictable.collect();
        evictable.sort_by_key(|model| (!model.is_failed, model.used));
        evictable
    }
}

/// Whether a model of this name makes room for others.
pub(crate) fn is_evictable(name: &str, config: &Config) -> bool {
    config.catalog.get(name).is_some_and(|model| !model.is_pinned)
}
