//! More pages, or fewer: a device's memory follows what is asked of its models.

use super::admission::PageCount;
use super::{Move, Plan, Scheduler};
use crate::backend::Limits;
use crate::command::ContextId;

/// What pages may be taken of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taking {
    /// Whatever admitted contexts neither hold nor were promised.
    Spare,
    /// Anything: contexts that are admitted have to ask again.
    Any,
}

impl Scheduler {
    /// There are so many pages from now on, and all of them have memory.
    pub(crate) fn grow(&mut self, n_pages: usize) {
        assert!(n_pages >= self.limits.n_pages, "pages that are in use have to be vacated");
        self.set_n_pages(n_pages);
    }

    /// There are only so many pages from now on. What is on others moves to those that stay, as far as there is room;
    /// for the rest the cache and then the least deserving give up room as for any other want of it. Once the moves are
    /// made, nothing reads or writes the others. No step may be under way.
    ///
    /// # Panics
    /// Only what is spare is to be taken, and there is not as much.
    pub(crate) fn vacate(&mut self, n_pages: usize, taking: Taking) -> Plan {
        assert!(self.steps_under_way.is_empty(), "rows find their pages where they were");
        let mut plan = self.spare_plans.pop().unwrap_or_default();
        plan.step = self.step;
        self.set_n_pages(n_pages);
        let marking = match taking {
            Taking::Spare => {
                let PageCount { n_left, marking, .. } = self.count(None);
                assert!(n_left >= 0, "what admitted contexts have stays with them");
                marking
            }
            Taking::Any => {
                self.dismiss_all();
                self.n_markings += 1;
                self.n_markings
            }
        };
        let mut victims = None;
        let mut from = 0;
        while let Some((block, next)) = self.pages.next_stray(from) {
            from = next;
            while self.pages.is_stray(block) {
                if let Some((page, to)) = self.pages.move_within(block) {
                    plan.moves.push(Move::Within(page, to));
                } else if !self.pages.reclaim_one() {
                    let victims = victims.get_or_insert_with(|| self.victims());
                    let has_room = self.free_one(victims, marking, &mut plan);
                    assert!(has_room, "whatever is held is held by somebody who can let go of it");
                }
            }
        }
        plan
    }

    /// What was promised is not there any more. Contexts that still need pages ask again.
    fn dismiss_all(&mut self) {
        let admitted: Vec<ContextId> = self.admitted().map(|(id, _)| id).collect();
        for id in admitted {
            self.leave_by_id(id);
            self.enqueue(id);
        }
    }

    fn set_n_pages(&mut self, n_pages: usize) {
        self.limits = Limits { n_pages, ..self.limits.clone() };
        self.pages.resize(n_pages);
        self.n_pages_most = n_pages;
        self.line.forget_count();
    }
}
