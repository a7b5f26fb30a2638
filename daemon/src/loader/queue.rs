//! Loads that wait for room on a device, in the order in which they came: who came later takes no room that an earlier one of
//! another user needs, so that nobody is passed for ever. The first of a device may have gates closed ([`super::gate`]), or where gates
//! rest for the loads of all before it, the next one: whoever has the room first by that.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use trellis_engine::ModelHandle;

use super::Loader;
use super::gate::{Cause, Closing, Pace};
use super::residents::Wish;
use crate::config::Device;
use crate::models::names;
use crate::shares::Needs;

/// A load that is the last again looks anew, which is not to be all that it does.
const TURN_MIN: Duration = Duration::from_secs(1);

/// Those that wait, the first to come first.
#[derive(Debug, Default)]
pub(super) struct Queue(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    n_come: u64,
    waiting: Vec<Waiting>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    number: u64,
    device: Device,
    wish: Wish,
    needs: Needs,
    came: Instant,
    /// From when on it has been the first of its device.
    first_since: Option<Instant>,
}

impl Inner {
    /// Some have come or gone.
    fn note_first(&mut self) {
        let now = Instant::now();
        for idx in 0..self.waiting.len() {
            let device = self.waiting[idx].device;
            let is_first = self.waiting[..idx].iter().all(|other| !other.device.is_same(device));
            let waiting = &mut self.waiting[idx];
            waiting.first_since = waiting.first_since.filter(|_| is_first).or(is_first.then_some(now));
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What those need who came before this number, for others than who wishes this. The operator goes before all.
    fn before(&self, number: Option<u64>, device: Device, wish: Wish) -> Vec<Needs> {
        if wish == Wish::Operator {
            return Vec::new();
        }
        let inner = self.lock();
        let is_before = |other: &&Waiting| {
            other.device.is_same(device)
                && other.wish != wish
                && number.is_none_or(|number| other.number < number)
        };
        let before = inner.waiting.iter().filter(is_before);
        before.map(|other| other.needs.with_just(other.needs.n_pages_least())).collect()
    }

    /// From when on nobody has been before this one, but for those for whom gates rest. The operator goes before all.
    fn first_since(&self, number: u64, rests_for: impl Fn(Cause) -> bool) -> Option<Instant> {
        let inner = self.lock();
        let idx = inner.waiting.iter().position(|other| other.number == number)?;
        let waiting = inner.waiting[idx];
        let cause = |other: &Waiting| Cause { wish: other.wish, device: other.device };
        let mut before = inner.waiting[..idx].iter().filter(|other| other.device.is_same(waiting.device));
        match waiting.first_since {
            _ if waiting.wish == Wish::Operator => Some(waiting.came),
            None if before.all(|other| rests_for(cause(other))) => Some(waiting.came),
            first_since => first_since,
        }
    }

    fn leave(&self, number: u64) {
        let mut inner = self.lock();
        inner.waiting.retain(|other| other.number != number);
        inner.note_first();
    }
}

/// A load that may have to wait, until this is dropped.
pub(super) struct Ticket<'a> {
    loader: &'a Loader,
    device: Device,
    wish: Wish,
    /// From when on it has waited.
    since: Option<Instant>,
    /// Its number, and until when it has that.
    number: Option<(u64, Option<Instant>)>,
    /// Gates that are closed for it.
    closing: Option<Closing>,
    /// When gates may close for it, or have to open.
    due: Option<Instant>,
}

impl<'a> Ticket<'a> {
    pub(super) fn new(loader: &'a Loader, device: Device, wish: Wish) -> Self {
        Self { loader, device, wish, since: None, number: None, closing: None, due: None }
    }

    /// From when on it has waited, if it has.
    pub(super) fn since(&self) -> Option<Instant> {
        self.since
    }

    /// What those need who came before.
    pub(super) fn before(&self) -> Vec<Needs> {
        let number = self.number.map(|(number, _)| number);
        self.loader.queue.before(number, self.device, self.wish)
    }

    /// It waits for room for so much. After the time that anybody waits it is the last again: what it waits for may never come free,
    /// and others are not to wait for it as long.
    pub(super) fn wait(&mut self, needs: Needs) {
        let now = Instant::now();
        self.since.get_or_insert(now);
        let is_over = self.number.is_some_and(|(_, until)| until.is_some_and(|until| until <= now));
        if is_over {
            self.leave();
        }
        let mut inner = self.loader.queue.lock();
        match self.number {
            Some((number, _)) => {
                let known = inner.waiting.iter_mut().find(|other| other.number == number);
                known.expect("it leaves by itself").needs = needs;
            }
            None => {
                let number = inner.n_come;
                inner.n_come += 1;
                let Self { device, wish, .. } = *self;
                inner.waiting.push(Waiting { number, device, wish, needs, came: now, first_since: None });
                inner.note_first();
                let waits_for = Duration::from_millis(self.loader.config.model_wait_ms).max(TURN_MIN);
                self.number = Some((number, now.checked_add(waits_for)));
            }
        }
    }

    /// It waits until these would go, which is not to be for ever: once it was the first for a turn, they take no new guests, for as
    /// long as that may be.
    pub(super) fn press(&mut self, in_the_way: &[ModelHandle]) {
        let now = Instant::now();
        let rests_for = |cause| self.loader.gates.may_close_from(cause, now) > now;
        let first_since =
            self.number.and_then(|(number, _)| self.loader.queue.first_since(number, rests_for));
        if first_since.is_none() || self.closing.as_ref().is_some_and(|closing| closing.until() <= now) {
            let is_over = self.closing.take().is_some();
            if is_over {
                // Those behind it may be the next to press.
                self.loader.changes.send_modify(|n_changes| *n_changes += 1);
            }
        }
        let Pace { turn, closed } = Pace::of(&self.loader.config);
        self.due = match (&self.closing, first_since) {
            (Some(closing), _) => Some(closing.until()),
            (None, Some(since)) if !in_the_way.is_empty() && !closed.is_zero() => {
                let cause = Cause { wish: self.wish, device: self.device };
                let from = self.loader.gates.may_close_from(cause, now).max(since + turn);
                if from <= now {
                    let models = names(in_the_way);
                    tracing::info!(?models, ?cause.wish, "models take no new guests: a load waits for their room");
                    self.closing = Some(self.loader.gates.close(cause, models, now, closed));
                    // Those behind it come to know that gates rest for it from then on, and when they may close for them.
                    self.loader.changes.send_modify(|n_changes| *n_changes += 1);
                }
                Some(if from <= now { now + closed } else { from })
            }
            (None, _) => None,
        };
    }

    /// Waits until it is to be the last again, or to press.
    pub(super) async fn over(&self) {
        let until = self.number.and_then(|(_, until)| until);
        match until.into_iter().chain(self.due).min() {
            Some(until) => tokio::time::sleep_until(until).await,
            None => std::future::pending().await,
        }
    }

    fn leave(&mut self) {
        (self.closing, self.due) = (None, None);
        if let Some((number, _)) = self.number.take() {
            self.loader.queue.leave(number);
            // Those behind it look again.
            self.loader.changes.send_modify(|n_changes| *n_changes += 1);
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests;
