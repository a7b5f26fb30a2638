//! How long a step waits for guests that were just answered and that asked again in time before.

use std::time::{Duration, Instant};

use super::Core;
use crate::account::ActorId;
use crate::backend::OldestStep;
use crate::scheduler::{Privilege, Scheduler};

/// The device stands still for one part in so many of the step before at most, and for no longer than this. Waking a
/// guest's thread takes some tens of microseconds.
const PARTS: u32 = 33;
const MAX: Duration = Duration::from_micros(250);

/// And for one part in so many, which is more, where every row belongs to such a guest: each gains from the wait, since the
/// others are waited for as well.
const PARTS_AMONG: u32 = 4;

/// While the device computes a step, the next is planned after one part in so many of it at the latest.
const PARTS_AHEAD: u32 = 2;

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

    /// Whether the time to return to a device that stands still is over.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        match self.still {
            Still::AtMost(_) => false,
            Still::Until(until) => now > until,
            Still::Over => true,
        }
    }

    /// The device has nothing more to do while the next step is not planned.
    pub(super) fn note_done(&mut self) {
        self.ahead_since = None;
    }

    /// A step was submitted to a device that stood still.
    pub(super) fn note_begun(&mut self, now: Instant) {
        self.ahead_since = Some(now);
    }
}

impl Core {
    /// A step was taken in that had taken so long.
    pub(super) fn note_taken_in(&mut self, now: Instant, elapsed: Duration) {
        let schedulers = || self.residents.iter().flatten().map(|resident| &resident.scheduler);
        let n_ready: usize = schedulers().map(|scheduler| scheduler.n_ready_among(&self.commons)).sum();
        let n_back: usize = schedulers().map(Scheduler::n_guests_back).sum();
        // Who has rows kept is back with the draw from them.
        let n_ready = n_ready.saturating_sub(self.commons.kept.n_wanted());
        let n_parts = if n_ready <= n_back { PARTS_AMONG } else { PARTS };
        self.linger.still = Still::AtMost((elapsed / n_parts).min(MAX));
        self.linger.ahead_since = (!self.under_way.is_empty()).then_some(now);
    }

    /// Until when the next step is not planned, for guests that were just answered: their rows and all others then ride
    /// together.
    pub(super) fn lingers_until(&mut self, now: Instant) -> Option<Instant> {
        if self.under_way.is_empty() { self.stands_still_until(now) } else { self.plans_late_until(now) }
    }

    fn stands_still_until(&mut self, now: Instant) -> Option<Instant> {
        let Still::Until(until) = self.linger.still else { return None };
        if self.n_awaited(Privilege::AtOnce) == 0 {
            return None;
        }
        if self.next_kept_for().is_some() {
            // Nobody else's row would ride with it.
            self.linger.still = Still::Over;
            return None;
        }
        if now < until {
            return Some(until);
        }
        self.linger.still = Still::Over;
        self.note_late(Privilege::AtOnce);
        None
    }

    /// The user whose rows alone the next step is likely to have, if all of them wait.
    pub(super) fn next_kept_for(&self) -> Option<ActorId> {
        let places = (0..self.residents.len()).filter(|&place| self.residents[place].is_some());
        let mut late = places.filter_map(|place| self.commons.latest_at(place).map(|latest| (place, latest)));
        late.next().and_then(|(place, latest)| self.commons.next_kept_for(place, latest))
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
        let until = since + expected / PARTS_AHEAD;
        if now < until {
            return Some(until);
        }
        self.linger.ahead_since = None;
        self.note_late(Privilege::Soon);
        None
    }

    /// Whether the oldest step under way is done: then the next one is planned, whichever guests are awaited.
    pub(in crate::engine) fn is_done(&mut self) -> bool {
        let is_done = self.oldest_step() == Some(OldestStep::Done);
        if is_done {
            self.linger.note_done();
        }
        is_done
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
