//! How long an end looks by itself before it sleeps.
//!
//! To wake a thread takes as long as many answers do, and longer on a virtual machine: so an end looks for a while before it sleeps,
//! [`LEAST`] (20 µs) at first. Where it slept, and what it waited for came within [`MOST`] (160 µs) of the beginning of that wait, it would
//! have been cheaper to look on: it looks twice as long the next time, up to `MOST`. Where that came later, as for a step of
//! the device, it does not look at all the next time: it would take processors from those who compute. One answer within `MOST` has it
//! look for `LEAST` again. After each look the processor is offered to others, one of which may be what is
//! waited for. Where the offer is taken up for long there are more threads than processors: then an end sleeps at once, since
//! who sleeps has a processor sooner again than who offers it.

use std::thread;
use std::time::{Duration, Instant};

/// Looks between two offers, about a microsecond.
pub(super) const N_LOOKS: u32 = 16;

/// How long an end looks that knows nothing of what it waits for, or whose last sleep was a short one after long ones.
const LEAST: Duration = Duration::from_micros(20);
/// What came within this was worth waiting for awake. The longest look; only after sleeps that ended within it.
const MOST: Duration = Duration::from_micros(160);

/// An offer that lasts longer went to a thread that computes.
const LATE: Duration = Duration::from_micros(300);

/// How long an end does not look after that.
const CROWDED: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    time: Duration,
    /// When the wait began that goes on asleep.
    asleep_since: Option<Instant>,
    /// Until when it does not look, since there are others who have to compute.
    crowded_until: Option<Instant>,
}

/// A wait that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    begun: Instant,
    /// At the last offer.
    offered: Instant,
}

impl Default for Patience {
    fn default() -> Self {
        Self { time: LEAST, asleep_since: None, crowded_until: None }
    }
}

impl Patience {
    pub(super) fn begin(&self) -> Wait {
        let begun = Instant::now();
        Wait { begun, offered: begun }
    }

    /// Whether to look again, after others have had the processor.
    pub(super) fn goes_on(&mut self, wait: &mut Wait) -> bool {
        let now = Instant::now();
        let was_late = now - wait.offered >= LATE;
        if was_late {
            self.crowded_until = Some(now + CROWDED);
        }
        let is_crowded = self.crowded_until.is_some_and(|until| now < until);
        if is_crowded || now - wait.begun >= self.time {
            self.asleep_since = Some(wait.begun);
            return false;
        }
        thread::yield_now();
        wait.offered = now;
        true
    }

    /// What was waited for has come.
    pub(super) fn note_come(&mut self) {
        let Some(since) = self.asleep_since.take() else { return };
        self.time = if since.elapsed() <= MOST { (self.time * 2).clamp(LEAST, MOST) } else { Duration::ZERO };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slept(patience: &mut Patience, time: Duration) {
        patience.asleep_since = Some(Instant::now() - time);
        patience.note_come();
    }

    #[test]
    fn who_slept_in_vain_looks_for_longer_and_who_sleeps_long_does_not() {
        let mut patience = Patience::default();
        patience.note_come();
        assert_eq!(patience.time, LEAST);
        slept(&mut patience, MOST / 4);
        assert_eq!(patience.time, 2 * LEAST);
        for _ in 0..10 {
            slept(&mut patience, MOST / 4);
        }
        assert_eq!(patience.time, MOST);
        slept(&mut patience, 2 * MOST);
        assert_eq!(patience.time, Duration::ZERO);
        slept(&mut patience, MOST / 4);
        assert_eq!(patience.time, LEAST);
    }

    #[test]
    fn where_others_compute_it_sleeps_at_once() {
        let mut patience = Patience::default();
        let mut wait = patience.begin();
        assert!(patience.goes_on(&mut wait));
        wait.offered -= LATE;
        assert!(!patience.goes_on(&mut wait));
        let mut wait = patience.begin();
        assert!(!patience.goes_on(&mut wait), "the next time too");
        patience.crowded_until = Some(Instant::now());
        wait = patience.begin();
        assert!(patience.goes_on(&mut wait));
    }
}
