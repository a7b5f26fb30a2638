//! How long a step waits for guests that were just answered and that asked again in time before.

use std::time::{Duration, Instant};

use super::Core;
use crate::scheduler::Privilege;

/// The device stands still for this share of the step before at most, and for no longer than this. Waking a guest's thread
/// takes some tens of microseconds.
const SHARE: u32 = 33;
const MAX: Duration = Duration::from_micros(250);

/// Where guests that are awaited have most of the rows, the step that they would miss is longer than what the others lose:
/// then it may be their part of the rows, divided by this.
const SHARE_OF_ALL: u32 = 4;

/// While the device computes a step, the next is planned after this share of it at the latest.
const SHARE_AHEAD: u32 = 2;

/// What is waited for, since the last step was taken in.
#[derive(Debug, Default)]
pub(super) struct Linger {
    still: Still,
    /// Since when the device computes the oldest step under way, unless enough was waited.
    ahead_since: Option<Instant>,
}

/// How long the device may stand still.
#[derive(Clone, Copy, Debug, Default)]
enum Still {
    /// From the next turn on, when guests know their answers.
    AtMost(Duration),
    Until(Instant),
    #[default]
    Over,
}

impl Linger {
    /// The answers of the last step were given.
    pub(super) fn begin(&mut self, now: Instant) {
        if let Still::AtMost(time) = self.still {
            self.still = Still::Until(now + time);
        }
    }

    /// Whether who asks by now has come too late for a device that stands still.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        match self.still {
            Still::AtMost(_) => false,
            Still::Until(until) => now > until,
            Still::Over => true,
        }
    }

    /// A step was submitted to a device that stood still.
    pub(super) fn note_begun(&mut self, now: Instant) {
        self.ahead_since = Some(now);
    }
}

impl Core {
    /// A step was taken in that had taken so long.
    pub(super) fn note_taken_in(&mut self, now: Instant, elapsed: Duration) {
        let n_awaited = self.n_awaited(Privilege::AtOnce);
        let residents = self.residents.iter().flatten();
        let n_ready: usize = residents.map(|resident| resident.scheduler.n_ready_among(&self.commons)).sum();
        let of_all = n_awaited as f64 / (n_awaited + n_ready).max(1) as f64 / f64::from(SHARE_OF_ALL);
        let time = (elapsed / SHARE).max(elapsed.mul_f64(of_all)).min(MAX);
        self.linger.still = Still::AtMost(time);
        self.linger.ahead_since = (!self.under_way.is_empty()).then_some(now);
    }

    /// Until when the next step is not planned, for guests that were just answered: their rows and everybody's then ride
    /// together.
    pub(super) fn lingers_until(&mut self, now: Instant) -> Option<Instant> {
        if self.under_way.is_empty() { self.stands_still_until(now) } else { self.plans_late_until(now) }
    }

    fn stands_still_until(&mut self, now: Instant) -> Option<Instant> {
        let Still::Until(until) = self.linger.still else { return None };
        if self.n_awaited(Privilege::AtOnce) == 0 {
            return None;
        }
        if now < until {
            return Some(until);
        }
        self.linger.still = Still::Over;
        self.note_late(Privilege::AtOnce);
        None
    }

    fn plans_late_until(&mut self, now: Instant) -> Option<Instant> {
        let since = self.linger.ahead_since?;
        let takes_more = |limit: usize| limit > self.under_way.len();
        let mut residents = self.residents.iter().flatten();
        if !residents.any(|resident| takes_more(resident.backend.limits().n_steps_under_way))
            || self.n_awaited(Privilege::Soon) == 0
        {
            return None;
        }
        let (place, plan) = self.under_way.front().expect("a step is under way");
        let resident = self.residents[*place].as_ref().expect("a model with a step under way is there");
        let expected = resident.scheduler.expected_ns(plan).map_or(Duration::ZERO, Duration::from_nanos);
        let until = since + expected / SHARE_AHEAD;
        if now < until {
            return Some(until);
        }
        self.linger.ahead_since = None;
        self.note_late(Privilege::Soon);
        None
    }

    fn n_awaited(&self, privilege: Privilege) -> usize {
        self.residents.iter().flatten().map(|resident| resident.scheduler.n_guests_awaited(privilege)).sum()
    }

    fn note_late(&mut self, privilege: Privilege) {
        self.residents
            .iter_mut()
            .flatten()
            .for_each(|resident| resident.scheduler.note_late_guests(privilege));
    }
}
