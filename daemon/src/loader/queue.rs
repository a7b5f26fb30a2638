//! Loads that wait for room on a device, in the order in which they came: who came later takes no room that an earlier one of
//! another user needs, so that nobody is passed for ever.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Loader;
use super::residents::Wish;
use crate::config::Device;
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

    fn leave(&self, number: u64) {
        self.lock().waiting.retain(|other| other.number != number);
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
}

impl<'a> Ticket<'a> {
    pub(super) fn new(loader: &'a Loader, device: Device, wish: Wish) -> Self {
        Self { loader, device, wish, since: None, number: None }
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
                inner.waiting.push(Waiting { number, device: self.device, wish: self.wish, needs });
                let waits_for = Duration::from_millis(self.loader.config.model_wait_ms).max(TURN_MIN);
                self.number = Some((number, now.checked_add(waits_for)));
            }
        }
    }

    /// Waits until it is to be the last again.
    pub(super) async fn over(&self) {
        match self.number {
            Some((_, Some(until))) => tokio::time::sleep_until(until).await,
            _ => std::future::pending().await,
        }
    }

    fn leave(&mut self) {
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
