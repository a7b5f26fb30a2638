//! Models that take no new guests for a while, because a load has waited long enough for the room that they have: short guests that
//! come one after the other without a gap keep nobody out for ever.
//!
//! - Comes in: that a load presses, for whom and where, and which models would have to go; which guest holds which model.
//! - Goes out: whether a guest may have a model now, and when it may otherwise.
//! - Who holds one of the models that are to go may have the others of them: it would be waited for otherwise, and wait itself.
//! - Must not happen: that somebody who asks for loads again and again stops the starts of others. Gates are closed for the loads of one
//!   user for at most a quarter of the time, and on one device for at most half of it, whoever it is for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use trellis_engine::ModelLease;
use trellis_engine::account::GuestId;

use super::residents::Wish;
use crate::config::{Config, Device};
use crate::on_demand::Claim;

/// A load waits for so long at most as the first of its device before gates close for it.
const TURN_MAX: Duration = Duration::from_secs(3);

/// The most for which gates are closed at a stretch: guests that take longer are not waited for.
const CLOSED_MAX: Duration = Duration::from_secs(10);

/// After gates were closed for somebody's load, they stay open for those of the same for so many times as long.
const RESTS_OF_WISH: u32 = 3;

/// As [`RESTS_OF_WISH`], on the same device for anybody's.
const RESTS_OF_DEVICE: u32 = 1;

/// How long loads wait for gates to close, and gates for guests to go. Both end well before the patience of who waits does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) turn: Duration,
    pub(super) closed: Duration,
}

impl Pace {
    pub(super) fn of(config: &Config) -> Self {
        let waits_for = Duration::from_millis(config.model_wait_ms);
        Self { turn: TURN_MAX.min(waits_for / 4), closed: CLOSED_MAX.min(waits_for / 2) }
    }
}

/// Which gates are closed.
#[derive(Debug, Default)]
pub(super) struct Gates {
    inner: Mutex<Inner>,
    /// How often one has closed or opened.
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    n_closings: u64,
    closed: Vec<Closed>,
    rests: Vec<Rest>,
    /// What guests hold that was loaded on demand, by its names.
    held: HashMap<GuestId, Vec<String>>,
}

/// For whose load gates close, and where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cause {
    pub(super) wish: Wish,
    pub(super) device: Device,
}

#[derive(Debug)]
struct Closed {
    number: u64,
    cause: Cause,
    /// The names of those that are to go.
    models: Vec<String>,
    since: Instant,
    until: Instant,
}

/// When gates may close again.
#[derive(Clone, Copy, Debug)]
struct Rest {
    cause: Cause,
    for_wish: Instant,
    on_device: Instant,
}

impl Rest {
    /// What follows a closing that ends at this moment.
    fn after(closed: &Closed, end: Instant) -> Self {
        let end = end.min(closed.until);
        let took = end.saturating_duration_since(closed.since);
        Self {
            cause: closed.cause,
            for_wish: end + took * RESTS_OF_WISH,
            on_device: end + took * RESTS_OF_DEVICE,
        }
    }

    fn over_for(&self, cause: Cause) -> Option<Instant> {
        let for_wish = (self.cause.wish == cause.wish).then_some(self.for_wish);
        let on_device = self.cause.device.is_same(cause.device).then_some(self.on_device);
        for_wish.max(on_device)
    }
}

impl Gates {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_change(&self) {
        self.changes.send_modify(|n_changes| *n_changes += 1);
    }

    /// From when on gates may close for this, as far as is known now.
    pub(super) fn may_close_from(&self, cause: Cause, now: Instant) -> Instant {
        let inner = self.lock();
        let under_way = inner.closed.iter().map(|closed| Rest::after(closed, closed.until));
        let rests = under_way.chain(inner.rests.iter().copied());
        rests.filter_map(|rest| rest.over_for(cause)).fold(now, Instant::max)
    }

    /// These take no new guests for so long, or until what is returned is dropped. It may be asked for from
    /// [`Self::may_close_from`] on.
    pub(super) fn close(
        self: &Arc<Self>,
        cause: Cause,
        models: Vec<String>,
        now: Instant,
        at_most: Duration,
    ) -> Closing {
        let until = now + at_most;
        let number = self.shut(cause, models, (now, until));
        Closing { gates: self.clone(), number, until }
    }

    fn shut(&self, cause: Cause, models: Vec<String>, (since, until): (Instant, Instant)) -> u64 {
        let mut inner = self.lock();
        inner.n_closings += 1;
        let number = inner.n_closings;
        inner.closed.push(Closed { number, cause, models, since, until });
        drop(inner);
        self.note_change();
        number
    }

    fn open(&self, number: u64, now: Instant) {
        let mut inner = self.lock();
        inner.rests.retain(|rest| rest.for_wish.max(rest.on_device) > now);
        if let Some(idx) = inner.closed.iter().position(|closed| closed.number == number) {
            let closed = inner.closed.swap_remove(idx);
            inner.rests.push(Rest::after(&closed, now));
        }
        drop(inner);
        self.note_change();
    }

    /// Until when a guest does not get a model, if it does not now. The gate may open before.
    pub(super) fn shut_until(&self, name: &str, guest: GuestId, now: Instant) -> Option<Instant> {
        let inner = self.lock();
        let held = inner.held.get(&guest).map_or(&[][..], Vec::as_slice);
        let is_shut = |closed: &&Closed| {
            let is_to_go = |name: &str| closed.models.iter().any(|model| model == name);
            now < closed.until && is_to_go(name) && !held.iter().any(|held| is_to_go(held))
        };
        inner.closed.iter().filter(is_shut).map(|closed| closed.until).max()
    }

    /// Waits until a guest gets a model.
    pub(super) async fn opened(&self, name: &str, guest: GuestId) {
        let mut changes = self.changes.subscribe();
        while let Some(until) = self.shut_until(name, guest, Instant::now()) {
            tokio::select! {
                // The sender is held here.
                _ = changes.changed() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    /// A guest holds a model for as long as this is there.
    pub(super) fn hold(self: &Arc<Self>, guest: GuestId, lease: ModelLease) -> HeldOnDemand {
        let name = lease.handle().model().name.clone();
        self.lock().held.entry(guest).or_default().push(name);
        HeldOnDemand { gates: self.clone(), guest, lease }
    }

    fn let_go(&self, guest: GuestId, name: &str) {
        let mut inner = self.lock();
        let Some(held) = inner.held.get_mut(&guest) else { return };
        if let Some(idx) = held.iter().position(|held| held == name) {
            held.swap_remove(idx);
        }
        if held.is_empty() {
            inner.held.remove(&guest);
        }
    }

    /// How many gates are closed at this moment.
    #[cfg(test)]
    pub(super) fn n_closed(&self, now: Instant) -> usize {
        self.lock().closed.iter().filter(|closed| now < closed.until).count()
    }
}

/// Gates that are closed until this is dropped, or the time is over.
#[derive(Debug)]
pub(super) struct Closing {
    gates: Arc<Gates>,
    number: u64,
    until: Instant,
}

impl Closing {
    /// When they open at the latest.
    pub(super) fn until(&self) -> Instant {
        self.until
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.gates.open(self.number, Instant::now());
    }
}

/// A model that a guest holds.
#[derive(Debug)]
pub(super) struct HeldOnDemand {
    gates: Arc<Gates>,
    guest: GuestId,
    lease: ModelLease,
}

impl Claim for HeldOnDemand {}

impl Drop for HeldOnDemand {
    fn drop(&mut self) {
        self.gates.let_go(self.guest, &self.lease.handle().model().name);
    }
}

#[cfg(test)]
mod tests;
