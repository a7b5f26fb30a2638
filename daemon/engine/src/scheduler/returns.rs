//! Guests that ask again as soon as they are answered.
//!
//! A step that is planned while another runs would leave without them, so that they could be served in every second
//! step only. For who has come back in time twice in a row the next step is not planned ahead, and is held for a moment;
//! who is late has to earn that again.

use rustc_hash::FxHashMap;

use super::{Plan, Scheduler};
use crate::account::GuestId;
use crate::job::Work;

/// Times in a row that a guest has to come back in time before it is waited for.
const N_IN_TIME_MIN: u8 = 2;

/// How guests came back after they were answered.
#[derive(Debug, Default)]
pub(super) struct Returns {
    guests: FxHashMap<GuestId, Return>,
    n_awaited: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Return {
    n_in_time: u8,
    /// Whether it was answered and has not asked since.
    is_out: bool,
}

impl Return {
    fn is_awaited(self) -> bool {
        self.is_out && self.n_in_time >= N_IN_TIME_MIN
    }
}

impl Returns {
    /// A guest asked something.
    pub(super) fn note_asked(&mut self, guest: GuestId) {
        if let Some(entry) = self.guests.get_mut(&guest).filter(|entry| entry.is_out) {
            self.n_awaited -= usize::from(entry.is_awaited());
            *entry = Return { n_in_time: (entry.n_in_time + 1).min(N_IN_TIME_MIN), is_out: false };
        }
    }

    /// A guest got its answer.
    pub(super) fn note_answered(&mut self, guest: GuestId) {
        let entry = self.guests.entry(guest).or_default();
        if !entry.is_out {
            entry.is_out = true;
            self.n_awaited += usize::from(entry.is_awaited());
        }
    }

    /// Forgets those that were answered before the step that is being taken in, and have not asked since.
    pub(super) fn forget_late(&mut self) {
        self.guests.retain(|_, entry| !entry.is_out);
        self.n_awaited = 0;
    }

    /// One of a guest's contexts is gone, and the guest perhaps with it: what it earned is forgotten.
    pub(super) fn forget(&mut self, guest: GuestId) {
        if self.guests.remove(&guest).is_some_and(Return::is_awaited) {
            self.n_awaited -= 1;
        }
    }

    fn comes_back(&self, guest: GuestId) -> bool {
        self.guests.get(&guest).is_some_and(|entry| entry.n_in_time >= N_IN_TIME_MIN)
    }
}

impl Scheduler {
    /// Whether a step will answer guests that ask again at once.
    pub(crate) fn has_returning_guests(&self, plan: Option<&Plan>) -> bool {
        let answers = |row: &super::plan::PlannedRow| {
            let Some(context) = self.contexts.get(&row.id) else { return false };
            context.work.as_ref().is_some_and(Work::is_question)
                && context.n_pending() == 0
                && self.returns.comes_back(context.owner.guest)
        };
        // Mostly nobody does.
        !self.returns.guests.is_empty() && plan.is_some_and(|plan| plan.rows.iter().any(answers))
    }

    /// Guests that were just answered and are expected to ask again at once.
    pub(crate) fn n_guests_awaited(&self) -> usize {
        self.returns.n_awaited
    }

    /// Those that did not come have lost their privilege.
    pub(crate) fn forget_late_guests(&mut self) {
        if self.returns.n_awaited > 0 {
            self.returns.forget_late();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_waited_for_once_it_has_come_back_in_time_twice() {
        let (mut returns, guest) = (Returns::default(), GuestId(1));
        for n_in_time in 0..4 {
            assert_eq!(returns.comes_back(guest), n_in_time >= 2, "{n_in_time} times");
            returns.forget_late();
            returns.note_answered(guest);
            assert_eq!(returns.n_awaited, usize::from(n_in_time >= 2));
            returns.note_asked(guest);
            assert_eq!(returns.n_awaited, 0);
        }
        // It does not come, and has to begin anew.
        returns.note_answered(guest);
        returns.forget_late();
        assert!(!returns.comes_back(guest) && returns.guests.is_empty());
    }
}
