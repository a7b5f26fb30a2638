//! How a device comes to have room for one model more: others that nobody uses make place.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::{join_all, select_all};
use tokio::time::Instant;
use trellis_engine::ModelHandle;

use super::residents::Evictable;
use super::{Loader, OpenDevice};
use crate::config::Config;
use crate::leaving::Gone;
use crate::models::names;
use crate::shares::{Needs, divide};

/// What has to happen before there is room.
#[derive(Debug)]
pub(super) enum Room {
    /// These are to go, and nobody uses them.
    Evict(Vec<ModelHandle>),
    /// There would be room without these, of which none may go yet.
    Wait(Awaited),
}

/// Models that are in the way.
#[derive(Debug)]
pub(super) struct Awaited {
    /// What the room has to be for.
    pub(super) needs: Needs,
    /// Those that guests use.
    pub(super) held: Vec<ModelHandle>,
    /// When the first of the others may go that nobody uses.
    pub(super) until: Option<Instant>,
    /// Some without which there would be room, if nobody came to hold them any more; none where others stay for a while yet.
    pub(super) enough: Vec<ModelHandle>,
}

impl Awaited {
    /// Waits until it is worth another look.
    pub(super) async fn over(&self) {
        let idle = async {
            match self.held.is_empty() {
                true => std::future::pending().await,
                false => drop(select_all(self.held.iter().map(|model| model.idle().boxed())).await),
            }
        };
        let until = async {
            match self.until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = idle => {}
            () = until => {}
        }
    }

    /// The names of those in the way that guests use.
    pub(super) fn names(&self) -> Vec<String> {
        names(&self.held)
    }
}

impl OpenDevice {
    /// Whether a model fits that needs so much, beside those that came before, if these are not there.
    pub(super) fn fits_without(
        &self,
        (needs, before): (Needs, &[Needs]),
        gone: &[&ModelHandle],
        config: &Config,
    ) -> bool {
        let is_gone = |handle: &ModelHandle| gone.iter().any(|other| other.is_same(handle));
        let staying =
            self.tenants.iter().filter(|tenant| !is_gone(&tenant.handle)).map(|tenant| tenant.needs);
        let coming = self.coming.iter().map(super::Coming::needs);
        let all: Vec<Needs> = staying.chain(coming).chain(before.iter().copied()).chain([needs]).collect();
        divide(self.kv_bytes(&all, config), &all).is_some()
    }

    /// What makes room for a model that does not fit, if what those need who came before is left for them; nothing does that may be
    /// done if this is `None`.
    pub(super) fn room_for(
        &self,
        (needs, before): (Needs, &[Needs]),
        evictable: &[Evictable],
        config: &Config,
    ) -> Option<Room> {
        if let Some(room) = self.room_beside((needs, before), evictable, config) {
            return Some(room);
        }
        // There is room for one and not for the other: those who came before are waited for. What would have to go for this one is in
        // their way, too, as far as it goes.
        let alone = if before.is_empty() { None } else { self.room_beside((needs, &[]), evictable, config) };
        let enough = match alone? {
            Room::Evict(_) => Vec::new(),
            Room::Wait(awaited) => awaited.enough,
        };
        Some(Room::Wait(Awaited { needs, held: Vec::new(), until: None, enough }))
    }

    fn room_beside(
        &self,
        (needs, before): (Needs, &[Needs]),
        evictable: &[Evictable],
        config: &Config,
    ) -> Option<Room> {
        let now = Instant::now();
        let wanted = (needs, before);
        let mut going: Vec<&ModelHandle> = Vec::new();
        let mut free = evictable.iter().filter(|model| model.is_free(now)).map(|model| &model.handle);
        while !self.fits_without(wanted, &going, config) {
            match free.next() {
                Some(next) => going.push(next),
                None => return self.awaited(wanted, (evictable, going), now, config).map(Room::Wait),
            }
        }
        Some(Room::Evict(self.least(wanted, &[], going, config)))
    }

    /// What is waited for where those that may go now, `going`, are not enough.
    fn awaited<'a>(
        &self,
        wanted: (Needs, &[Needs]),
        (evictable, mut going): (&'a [Evictable], Vec<&'a ModelHandle>),
        now: Instant,
        config: &Config,
    ) -> Option<Awaited> {
        let tenants = self.tenants.iter().map(|tenant| &tenant.handle);
        let leaving: Vec<&ModelHandle> = tenants.filter(|handle| handle.is_closed()).collect();
        let fits_without = |going: &[&ModelHandle]| {
            let gone: Vec<&ModelHandle> = leaving.iter().chain(going).copied().collect();
            self.fits_without(wanted, &gone, config)
        };
        let all: Vec<&ModelHandle> = evictable.iter().map(|model| &model.handle).collect();
        if !fits_without(&all) {
            return None;
        }
        let (held, idle): (Vec<&Evictable>, Vec<&Evictable>) =
            evictable.iter().partition(|model| model.is_held());
        for model in held.iter().filter(|model| model.may_go(now)) {
            if fits_without(&going) {
                break;
            }
            going.push(&model.handle);
        }
        let is_enough = fits_without(&going);
        let enough = if is_enough { self.least(wanted, &leaving, going, config) } else { Vec::new() };
        Some(Awaited {
            needs: wanted.0,
            held: held.into_iter().map(|model| model.handle.clone()).collect(),
            until: idle.iter().filter_map(|model| model.stays_until()).filter(|&at| at > now).min(),
            enough,
        })
    }

    /// Of these, where `gone` go anyway, no more than there is room without: what was used longest ago may have been too small to help.
    fn least(
        &self,
        wanted: (Needs, &[Needs]),
        gone: &[&ModelHandle],
        mut going: Vec<&ModelHandle>,
        config: &Config,
    ) -> Vec<ModelHandle> {
        for idx in (0..going.len()).rev() {
            let others = going.iter().enumerate().filter(|&(other, _)| other != idx).map(|(_, model)| model);
            let without: Vec<&ModelHandle> = gone.iter().chain(others).copied().collect();
            if self.fits_without(wanted, &without, config) {
                going.remove(idx);
            }
        }
        going.into_iter().cloned().collect()
    }
}

impl Loader {
    /// Unloads a model if nobody uses it: its end. A guest that asks for it in this moment has it before that, or waits until
    /// it is loaded again.
    pub(super) fn evict(self: &Arc<Self>, model: &ModelHandle, why: &str) -> Option<Gone> {
        self.leaving.begin(|| {
            let is_closed = model.close_if_idle();
            let model = is_closed.then(|| self.models.send_off_this(model)).flatten()?;
            tracing::info!(model = model.model().name, why, "a model makes room");
            Some(self.see_off(model, Instant::now()))
        })
    }

    /// As [`Self::evict`], all of these; waits until they are gone.
    pub(super) async fn evict_all(self: &Arc<Self>, models: &[ModelHandle], why: &str) {
        let gone: Vec<Gone> = models.iter().filter_map(|model| self.evict(model, why)).collect();
        // One that was not taken off well is seen at the next look.
        drop(join_all(gone).await);
    }
}
