//! Guests that ask again as soon as they are answered.
//!
//! A step that is planned while another runs would leave without them, and so would the one behind it: they would be
//! served in every third step. A guest earns two privileges by coming back in time, and loses them by coming late:
//!
//! - [`Privilege::Soon`]: while the device computes a step, the next one is not planned before such guests have asked. That
//!   costs no time: they are served in every second step.
//! - [`Privilege::AtOnce`]: behind a step that answers such guests none is planned ahead, and the next one is held for a
//!   moment. The device stands still meanwhile: they are served in every step.

use rustc_hash::FxHashMap;

use super::{Plan, Scheduler};
use crate::account::GuestId;
use crate::job::Work;

/// Times in a row that a guest has to come back in time before it is waited for.
const N_IN_TIME_MIN: u8 = 2;

/// Cap on the count of timely returns: a guest at the cap may be late once.
const N_IN_TIME_MAX: u8 = 8;

/// What a guest is waited for with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Privilege {
    /// A device that stands still.
    AtOnce,
    /// The plan of a step while the device computes the one before.
    Soon,
}

/// How guests came back after they were answered.
#[derive(Debug, Default)]
pub(super) struct Returns {
    guests: FxHashMap<GuestId, Habit>,
    /// Guests that are awaited with a privilege.
    n_awaited: [usize; 2],
}

/// How a guest came back.
#[derive(Clone, Copy, Debug, Default)]
struct Habit {
    /// Times in time, by privilege.
    n_in_time: [u8; 2],
    /// Answers that it got and has not followed by a question. Rows that were kept count as neither: who has one kept asks
    /// again when the draw from it is answered. A guest that asks about many contexts at once is back when it
    /// has asked about all of them.
    n_out: u32,
    /// Whether it has asked since it was answered.
    has_asked: bool,
}

impl Habit {
    fn has(self, privilege: Privilege) -> bool {
        self.n_in_time[privilege as usize] >= N_IN_TIME_MIN
    }

    fn note_in_time(&mut self, privilege: Privilege) {
        let n = &mut self.n_in_time[privilege as usize];
        *n = (*n + 1).min(N_IN_TIME_MAX);
    }

    fn is_awaited(self, privilege: Privilege) -> bool {
        self.n_out > 0 && self.has(privilege)
    }

    /// Waiting for it was in vain. A guest that has asked anything since it was answered is not late.
    fn note_late(&mut self, privilege: Privilege) {
        if !self.has_asked {
            let n = &mut self.n_in_time[privilege as usize];
            *n = (*n / 2).saturating_sub(1);
        }
    }
}

impl Returns {
    fn change(&mut self, guest: GuestId, change: impl FnOnce(&mut Habit)) {
        let habit = self.guests.entry(guest).or_default();
        let before = *habit;
        change(habit);
        let after = *habit;
        self.count(before, |n| n - 1);
        self.count(after, |n| n + 1);
    }

    fn count(&mut self, habit: Habit, counted: impl Fn(usize) -> usize) {
        for privilege in [Privilege::AtOnce, Privilege::Soon] {
            if habit.is_awaited(privilege) {
                let n = &mut self.n_awaited[privilege as usize];
                *n = counted(*n);
            }
        }
    }

    /// A guest asked something; `is_late` if the device would have had to stand still for too long.
    pub(super) fn note_asked(&mut self, guest: GuestId, is_late: bool) {
        if self.guests.get(&guest).is_none_or(|habit| habit.n_out == 0) {
            return;
        }
        self.change(guest, |habit| {
            habit.n_out -= 1;
            if std::mem::replace(&mut habit.has_asked, true) {
                return;
            }
            habit.note_in_time(Privilege::Soon);
            if !is_late {
                habit.note_in_time(Privilege::AtOnce);
            }
        });
    }

    /// A guest got its answer.
    pub(super) fn note_answered(&mut self, guest: GuestId) {
        self.change(guest, |habit| {
            habit.n_out += 1;
            habit.has_asked = false;
        });
    }

    /// Guests that were answered and did not ask again were waited for with a privilege, in vain.
    pub(super) fn note_late(&mut self, privilege: Privilege) {
        for habit in self.guests.values_mut().filter(|habit| habit.is_awaited(privilege)) {
            habit.note_late(privilege);
            if habit.has_asked {
                habit.n_out = 0;
            }
        }
        self.count_anew();
    }

    /// Guests that were answered and did not ask again have missed the step that is being taken in.
    pub(super) fn note_missed(&mut self) {
        self.guests.retain(|_, habit| {
            if std::mem::take(&mut habit.n_out) > 0 {
                [Privilege::AtOnce, Privilege::Soon]
                    .into_iter()
                    .for_each(|privilege| habit.note_late(privilege));
            }
            habit.n_in_time != [0, 0]
        });
        self.n_awaited = [0, 0];
    }

    fn count_anew(&mut self) {
        let n = |privilege| self.guests.values().filter(|habit| habit.is_awaited(privilege)).count();
        self.n_awaited = [n(Privilege::AtOnce), n(Privilege::Soon)];
    }

    /// A guest has gone.
    pub(super) fn forget(&mut self, guest: GuestId) {
        if let Some(habit) = self.guests.remove(&guest) {
            self.count(habit, |n| n - 1);
        }
    }

    fn has(&self, guest: GuestId, privilege: Privilege) -> bool {
        self.guests.get(&guest).is_some_and(|habit| habit.has(privilege))
    }
}

impl Scheduler {
    /// A guest has gone.
    pub(crate) fn forget_guest(&mut self, guest: GuestId) {
        self.returns.forget(guest);
    }

    /// Whether a step will answer guests that ask again at once.
    pub(crate) fn has_returning_guests(&self, plan: Option<&Plan>) -> bool {
        let is_question = |work: &Work| work.is_question() && !work.keeps_row();
        plan.is_some_and(|plan| self.answers_returning(plan, is_question))
    }

    /// Whether a step will answer such questions of guests that ask again at once.
    pub(super) fn answers_returning(&self, plan: &Plan, is_such: impl Fn(&Work) -> bool) -> bool {
        let answers = |row: &super::plan::PlannedRow| {
            let context = self.contexts.get(&row.id).filter(|context| context.epoch == row.epoch);
            let Some(context) = context else { return false };
            // Of a job that rides in parts the last one answers.
            let is_part = context.job().is_some_and(|job| plan.jobs_in_parts.contains(&job));
            context.work.as_ref().is_some_and(&is_such)
                && !is_part
                && context.n_pending() == 0
                && self.returns.has(context.owner.guest, Privilege::AtOnce)
        };
        // Mostly no guest does.
        !self.returns.guests.is_empty() && plan.rows.iter().any(answers)
    }

    /// Guests that were just answered, have a privilege, and have not asked again.
    pub(crate) fn n_guests_awaited(&self, privilege: Privilege) -> usize {
        self.returns.n_awaited[privilege as usize]
    }

    /// Guests that would be waited for while the device stands still, and have asked.
    pub(crate) fn n_guests_back(&self) -> usize {
        let habits = self.returns.guests.values();
        habits.filter(|habit| habit.n_out == 0 && habit.has(Privilege::AtOnce)).count()
    }

    /// Those were waited for in vain.
    pub(crate) fn note_late_guests(&mut self, privilege: Privilege) {
        if self.n_guests_awaited(privilege) > 0 {
            self.returns.note_late(privilege);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: GuestId = GuestId(1);

    #[test]
    fn a_guest_is_waited_for_once_it_has_come_back_in_time_twice() {
        let mut returns = Returns::default();
        for n_in_time in 0..4 {
            let awaited = usize::from(n_in_time >= 2);
            assert_eq!(returns.has(GUEST, Privilege::AtOnce), n_in_time >= 2, "{n_in_time} times");
            returns.note_missed();
            returns.note_answered(GUEST);
            assert_eq!(returns.n_awaited, [awaited; 2]);
            returns.note_asked(GUEST, false);
            assert_eq!(returns.n_awaited, [0, 0]);
        }
        // It does not come, and has to begin anew.
        returns.note_answered(GUEST);
        returns.note_late(Privilege::AtOnce);
        assert_eq!(returns.n_awaited, [0, 1]);
        returns.note_missed();
        assert!(!returns.has(GUEST, Privilege::Soon));
    }

    #[test]
    fn who_asks_about_many_contexts_is_there_when_it_has_asked_about_all() {
        let mut returns = Returns::default();
        let answer = |returns: &mut Returns, n: usize| (0..n).for_each(|_| returns.note_answered(GUEST));
        for _ in 0..2 {
            answer(&mut returns, 3);
            (0..3).for_each(|_| returns.note_asked(GUEST, false));
            returns.note_missed();
        }
        answer(&mut returns, 3);
        for n_asked in 1..=3 {
            assert_eq!(returns.n_awaited, [1, 1], "{n_asked}");
            returns.note_asked(GUEST, false);
        }
        assert_eq!(returns.n_awaited, [0, 0]);
        // It asks about fewer of them: it is waited for to the end once, and loses nothing by it.
        returns.note_missed();
        answer(&mut returns, 3);
        returns.note_asked(GUEST, false);
        returns.note_late(Privilege::AtOnce);
        assert_eq!(returns.n_awaited, [0, 0]);
        answer(&mut returns, 1);
        assert_eq!(returns.n_awaited, [1, 1]);
    }

    #[test]
    fn who_comes_soon_and_not_at_once_keeps_one_privilege() {
        let mut returns = Returns::default();
        for _ in 0..10 {
            returns.note_answered(GUEST);
            returns.note_late(Privilege::AtOnce);
            returns.note_asked(GUEST, true);
        }
        assert!(returns.has(GUEST, Privilege::Soon) && !returns.has(GUEST, Privilege::AtOnce));
    }

    #[test]
    fn who_has_come_in_time_for_long_may_be_late_once() {
        let mut returns = Returns::default();
        let in_time = |returns: &mut Returns| {
            returns.note_answered(GUEST);
            returns.note_asked(GUEST, false);
        };
        (0..20).for_each(|_| in_time(&mut returns));
        for is_waited_for in [true, false] {
            returns.note_answered(GUEST);
            returns.note_late(Privilege::AtOnce);
            returns.note_asked(GUEST, true);
            assert_eq!(returns.has(GUEST, Privilege::AtOnce), is_waited_for);
        }
        returns.forget(GUEST);
        assert!(returns.guests.is_empty());
    }
}
