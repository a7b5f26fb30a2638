//! All detached guests of a daemon.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::task::TaskTracker;
use trellis_wire::{ErrorBody, ErrorCode, GuestInfo};

use super::guest::DetachedGuest;
use crate::session::actor::{Actor, Quota, QuotaPermit};

/// Those that run, and those whose ends are kept.
#[derive(Debug)]
pub(crate) struct DetachedGuests {
    places: Arc<Quota>,
    /// In the order in which they started.
    guests: Mutex<BTreeMap<u64, Arc<DetachedGuest>>>,
    /// How many have ended since the daemon started.
    n_ends: AtomicU64,
    /// Tells this daemon from the one before it, whose guests had the same numbers.
    daemon: u64,
    /// Those that run.
    pub(super) keepers: TaskTracker,
}

/// How many detached guests somebody has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DetachedUsed {
    pub(crate) n_running: usize,
    pub(crate) n_ended: usize,
}

impl DetachedGuests {
    /// None yet, with places for so many of each user.
    pub(crate) fn new(n_max: usize) -> Arc<Self> {
        let mut bytes = [0; 8];
        // Where the system has none, daemons are told apart by nothing, and guests by their numbers alone.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        Arc::new(Self {
            places: Quota::new(n_max),
            guests: Mutex::default(),
            n_ends: AtomicU64::new(0),
            daemon: u64::from_le_bytes(bytes),
            keepers: TaskTracker::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<DetachedGuest>>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number that this daemon was given by chance.
    pub(crate) fn daemon(&self) -> u64 {
        self.daemon
    }

    /// Lets each user have so many from now on.
    pub(crate) fn set_n_max(&self, n_max: usize) {
        self.places.set_n_max(n_max);
    }

    /// A place for one more of this user. `limit_of` says how many it may have where each user may have so many.
    ///
    /// # Errors
    /// It has as many as it may have.
    pub(super) fn place(
        &self,
        actor: Actor,
        limit_of: impl FnOnce(usize) -> usize,
    ) -> Result<QuotaPermit, ErrorBody> {
        let n_max = limit_of(usize::try_from(self.places.n_max()).unwrap_or(usize::MAX));
        self.places.take_of(actor, n_max).ok_or_else(|| {
            ErrorBody::over_limit("n_detached", self.places.taken(actor).0 as u64 + 1, n_max as u64)
        })
    }

    /// What this user has, and all together.
    pub(crate) fn used(&self, actor: Actor) -> (DetachedUsed, DetachedUsed) {
        let (n_running, n_running_of_all) = self.places.taken(actor);
        let guests = self.lock();
        let ended = guests.values().filter(|guest| guest.has_ended());
        let (mut n_ended, mut n_ended_of_all) = (0, 0);
        for guest in ended {
            n_ended_of_all += 1;
            n_ended += usize::from(guest.actor.uid == actor.uid);
        }
        let all = DetachedUsed { n_running: n_running_of_all, n_ended: n_ended_of_all };
        (DetachedUsed { n_running, n_ended }, all)
    }

    /// The guest of this number, for the user that started it. `daemon` is the one that the client means, if it says so.
    ///
    /// # Errors
    /// There is none, which is also what another user is told, whatever it may see or stop: what a guest says is its user's alone.
    pub(crate) fn find(
        &self,
        actor: Actor,
        id: u64,
        daemon: Option<u64>,
    ) -> Result<Arc<DetachedGuest>, ErrorBody> {
        let guest = self.lock().get(&id).cloned();
        let is_meant = daemon.is_none_or(|daemon| daemon == self.daemon);
        guest.filter(|guest| is_meant && guest.actor.uid == actor.uid).ok_or_else(|| {
            let message =
                format!("there is no detached guest {id}, or its end was kept for as long as it may be");
            ErrorBody::new(ErrorCode::UnknownGuest, message).with_value(id)
        })
    }

    pub(super) fn insert(&self, guest: Arc<DetachedGuest>) {
        self.lock().insert(guest.id, guest);
    }

    /// Forgets a guest that has ended.
    pub(super) fn forget(&self, id: u64) {
        self.lock().remove(&id);
    }

    /// The number of the next end.
    pub(super) fn next_end(&self) -> u64 {
        self.n_ends.fetch_add(1, Ordering::Relaxed)
    }

    /// Of this user's ends that no client reads, forgets the oldest beyond so many, and what is kept for them with that.
    pub(super) fn forget_oldest(&self, actor: Actor, n_max: usize) {
        let mut guests = self.lock();
        let unread = guests.values().filter(|guest| guest.actor.uid == actor.uid && !guest.is_attached());
        let mut ended: Vec<(u64, u64)> =
            unread.filter_map(|guest| Some((guest.end_number()?, guest.id))).collect();
        ended.sort_unstable();
        for (_, id) in &ended[..ended.len().saturating_sub(n_max)] {
            if let Some(guest) = guests.remove(id) {
                guest.settled.notify_one();
            }
        }
    }

    /// Says of guests which are detached and which of those are read, and adds this user's whose ends are kept. Each is there once.
    pub(crate) fn mark(&self, actor: Actor, infos: &mut Vec<GuestInfo>) {
        let guests = self.lock();
        for info in infos.iter_mut() {
            if let Some(guest) = guests.get(&info.guest_id) {
                info.is_detached = true;
                info.is_attached = guest.is_attached();
            }
        }
        let own = guests.values().filter(|guest| guest.actor.uid == actor.uid);
        let ended: BTreeMap<u64, GuestInfo> =
            own.filter_map(|guest| Some((guest.id, guest.shown()?))).collect();
        // One that has only just ended may be among those that run, too.
        infos.retain(|info| !ended.contains_key(&info.guest_id));
        infos.extend(ended.into_values());
        infos.sort_by_key(|info| info.guest_id);
    }

    /// Waits until none runs any more.
    pub(crate) async fn ended(&self) {
        self.keepers.close();
        self.keepers.wait().await;
    }
}
