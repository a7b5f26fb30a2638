//! What the guests' admitted contexts hold of the pages and may take: whether it is fair that a run which has had its term
//! makes room for the head of the line, or waits behind it.
//!
//! A run is *spared*, and what asks for pages passes the line, where its user holds less than that of the head will with
//! it, and the head fits beside all runs, and all that passed, once all else has come to its end: it can wait for that, for
//! questions and searches, and a guest of few pages does not stand still because others ask for more than there is. Between
//! sessions of one user it is the same, and between guests of one session; what one guest asks takes turns. Runs that do not
//! fit together take turns as well: they have no end to wait for.
//!
//! What users hold is compared by their shares. A run makes room for the head of a user of a higher rank whatever it holds,
//! and for one of a lower rank only where it has to take turns with it.

use std::cmp::Ordering;

use super::admission::Standing;
use super::joint::Members;
use super::{ContextState, Scheduler};
use crate::account::{Owner, Priority};
use crate::command::ContextId;
use crate::fair::Class;
use crate::job::Work;
use crate::kv::PageTable;

/// What each guest holds and may take, as it was counted in one plan.
#[derive(Debug, Default)]
pub(super) struct Held {
    is_counted: bool,
    /// In the order of their names.
    guests: Vec<OfGuest>,
    /// Pages of all runs, and of what passed the line: others may pass in its place.
    n_staying: usize,
    /// What the head of the line was last found to take.
    head: Option<(ContextId, usize)>,
    /// Memory of the count: the admitted contexts, those of one guest side by side.
    admitted: Vec<(Names, ContextId)>,
}

/// Contexts in line that are looked at in one plan, whether they pass.
const N_PASSING_MAX: usize = 64;

/// A user, a session and a guest.
type Names = [u64; 3];

/// What one guest's admitted contexts hold and may take. A page that several of them hold counts once.
#[derive(Clone, Copy, Debug)]
struct OfGuest {
    names: Names,
    n_pages: usize,
}

/// Who asks for pages, or holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Party {
    names: Names,
    priority: Priority,
}

impl Party {
    fn of(owner: &Owner) -> Self {
        Self { names: names(owner), priority: owner.account.priority() }
    }
}

/// The head of the line.
#[derive(Clone, Copy, Debug)]
struct Head {
    of: Party,
    /// Pages that it takes.
    n_pages: usize,
}

impl Held {
    /// What was counted holds for one plan at most.
    pub(super) fn forget(&mut self) {
        self.is_counted = false;
    }

    /// The head of the line takes so many pages.
    pub(super) fn note_head(&mut self, head: Option<ContextId>, n_pages: usize) {
        self.head = head.map(|head| (head, n_pages));
    }

    /// Pages of one user, session or guest, by level.
    fn held_by(&self, names: Names, level: usize) -> usize {
        let from = self.guests.partition_point(|of| of.names[..=level] < names[..=level]);
        let of = self.guests[from..].iter().take_while(|of| of.names[..=level] == names[..=level]);
        of.map(|of| of.n_pages).sum()
    }

    /// Whether a context of this owner is spared, or passes the line, on a device of so many pages, where it is to have so many
    /// beside those that were counted.
    fn spares(&self, of: Party, n_beside: usize, head: Head, n_pages: usize) -> bool {
        let (own, others) = (of.names, head.of.names);
        let Some(level) = (0..own.len()).find(|&level| own[level] != others[level]) else { return false };
        if self.n_staying + n_beside + head.n_pages > n_pages {
            return false;
        }
        // Of what is within one user both sides have the same share.
        let weighed = |n_pages: usize, other: Party| n_pages as u64 * u64::from(other.priority.share.get());
        let n_own = self.held_by(own, level) + n_beside;
        let n_of_head = self.held_by(others, level) + head.n_pages;
        match of.priority.rank.cmp(&head.of.priority.rank) {
            Ordering::Less => false,
            Ordering::Equal => weighed(n_own, head.of) < weighed(n_of_head, of),
            Ordering::Greater => true,
        }
    }

    /// Counts pages of what passes the line beside those that were counted.
    fn add_passing(&mut self, names: Names, n_pages: usize) {
        match self.guests.binary_search_by_key(&names, |of| of.names) {
            Ok(idx) => self.guests[idx].n_pages += n_pages,
            Err(idx) => self.guests.insert(idx, OfGuest { names, n_pages }),
        }
        self.n_staying += n_pages;
    }
}

impl ContextState {
    /// Whether it goes on from token to token, and what comes before the next one is there.
    fn goes_on_decoding(&self) -> bool {
        self.is_run() && self.class() == Class::Decode && !self.is_in_line()
    }

    fn is_run(&self) -> bool {
        self.work.as_ref().is_some_and(Work::goes_on)
    }

    /// Blocks that it was admitted for; none if it is not.
    fn n_blocks_admitted(&self) -> usize {
        if let Standing::Admitted(term) = self.standing { term.n_blocks } else { 0 }
    }

    /// Blocks that it was admitted for and does not hold yet.
    fn n_blocks_to_come(&self) -> usize {
        self.n_blocks_admitted().saturating_sub(self.kv.blocks().len())
    }

    /// Blocks for what its work has to compute, and if it goes on for the next token.
    fn n_blocks_needed(&self) -> usize {
        self.kv.n_blocks_until(self.target()).max(self.kv.blocks().len()) + usize::from(self.is_run())
    }

    fn has_passed(&self) -> bool {
        matches!(self.standing, Standing::Admitted(term) if term.has_passed)
    }

    /// Blocks that it holds and were not counted yet, and those to come.
    fn n_counted(&self, pages: &mut PageTable) -> usize {
        let n_held = self.kv.blocks().iter().filter(|&&block| pages.count_once(block)).count();
        n_held + self.n_blocks_to_come()
    }

    /// Pages that come free at most when its term ends; those in host memory count twice.
    pub(super) fn n_blocks_and_promised(&self) -> usize {
        self.kv.blocks().len() + self.n_promised()
    }
}

fn names(owner: &Owner) -> Names {
    [u64::from(owner.actor.0), owner.session.0, owner.guest.0]
}

impl Scheduler {
    /// Whether a context that asks for pages passes those in line, or goes on before them if it is admitted.
    pub(super) fn passes_line(&mut self, id: ContextId, context: &ContextState) -> bool {
        let n_needed = context.n_blocks_needed();
        let n_beside = n_needed.saturating_sub(context.n_blocks_admitted()).max(1);
        self.is_owner_spared(Party::of(&context.owner), n_beside, Some((id, context)))
    }

    /// Admits contexts that pass the head of the line, for which there is no room, and enqueues them.
    pub(super) fn admit_past_head(&mut self) {
        let mut in_line = self.line.last_first();
        // The head itself comes last.
        in_line.pop();
        for id in in_line.into_iter().rev().take(N_PASSING_MAX) {
            if self.job_of(id).is_some() {
                continue;
            }
            let Some(mut context) = self.contexts.remove(&id) else { continue };
            let need = self.passes_line(id, &context).then(|| self.find_room(&mut context)).flatten();
            if let Some(need) = need {
                self.leave(id, &mut context);
                self.begin_passing(id, &mut context, need);
            }
            self.contexts.insert(id, context);
            if need.is_some() {
                self.enqueue(id);
            }
        }
    }

    /// As [`Self::passes_line`], for a mixture that goes on.
    pub(super) fn is_mixture_spared(&mut self, members: &Members) -> bool {
        let of_run = members.iter().filter_map(|id| self.contexts.get(id));
        if !of_run.clone().all(|member| member.goes_on_decoding()) {
            return false;
        }
        let n_beside =
            of_run.map(|member| if member.is_admitted() { 1 } else { member.kv.blocks().len() + 1 });
        let n_beside = n_beside.sum();
        let Some(first) = members.first().and_then(|id| self.contexts.get(id)) else { return false };
        self.is_owner_spared(Party::of(&first.owner), n_beside, None)
    }

    fn is_owner_spared(
        &mut self,
        of: Party,
        n_beside: usize,
        placed: Option<(ContextId, &ContextState)>,
    ) -> bool {
        let Some(head) = self.head_of_line().filter(|head| head.of.names != of.names) else { return false };
        self.count_held(placed);
        let is_spared = self.held.spares(of, n_beside, head, self.limits.n_pages);
        if is_spared {
            self.held.add_passing(of.names, n_beside);
        }
        is_spared
    }

    /// Of runs that have had their terms, leaves those that make room for the head of the line.
    pub(super) fn leave_out_spared(&mut self, over: &mut Vec<ContextId>) {
        let Some(head) = self.head_of_line() else { return };
        self.count_held(None);
        let Self { held, contexts, limits, .. } = self;
        over.retain(|id| !held.spares(Party::of(&contexts[id].owner), 0, head, limits.n_pages));
    }

    fn head_of_line(&self) -> Option<Head> {
        let (id, n_blocks) = self.line.first_and_its_blocks()?;
        let noted = self.held.head.filter(|&(head, _)| head == id);
        let n_pages = noted.map_or(n_blocks, |(_, n_pages)| n_pages);
        Some(Head { of: Party::of(&self.contexts.get(&id)?.owner), n_pages })
    }

    fn count_held(&mut self, placed: Option<(ContextId, &ContextState)>) {
        let Self { held, contexts, pages, line, .. } = self;
        if std::mem::replace(&mut held.is_counted, true) {
            return;
        }
        let context_of = |id: ContextId| {
            let placed = placed.filter(|&(other, _)| other == id).map(|(_, context)| context);
            placed.or_else(|| contexts.get(&id).map(|context| &**context))
        };
        held.admitted.clear();
        let of = |id| context_of(id).map(|context| (names(&context.owner), id));
        held.admitted.extend(line.admitted.iter().filter_map(|&id| of(id)));
        held.admitted.sort_unstable();
        held.guests.clear();
        for of_guest in held.admitted.chunk_by(|(names, _), (other, _)| names == other) {
            pages.count_anew();
            let contexts = of_guest.iter().filter_map(|&(_, id)| context_of(id));
            let n_pages = contexts.map(|context| context.n_counted(pages)).sum();
            held.guests.push(OfGuest { names: of_guest[0].0, n_pages });
        }
        pages.count_anew();
        let contexts = held.admitted.iter().filter_map(|&(_, id)| context_of(id));
        let staying = contexts.filter(|context| context.is_run() || context.has_passed());
        held.n_staying = staying.map(|context| context.n_counted(pages)).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_spared_where_its_owner_holds_less_than_that_of_the_head_will() {
        let of = |names, n_pages| OfGuest { names, n_pages };
        let guests = vec![
            of([1, 1, 1], 10),
            of([1, 1, 2], 30),
            of([1, 2, 3], 80),
            of([2, 3, 4], 100),
            of([2, 3, 5], 15),
        ];
        let held = Held { is_counted: true, guests, n_staying: 50, ..Held::default() };
        let even = |names| Party { names, priority: Priority::EVEN };
        let spares = |run, names, n_blocks| {
            held.spares(even(run), 0, Head { of: even(names), n_pages: n_blocks }, 250)
        };
        // The first user holds 120 in all, the second 115.
        assert!(spares([1, 1, 1], [2, 3, 4], 10) && !spares([1, 1, 1], [2, 3, 4], 5));
        assert!(spares([2, 3, 5], [1, 1, 1], 1));
        // The first session of the first user holds 40, the second 80.
        assert!(spares([1, 1, 1], [1, 2, 9], 5) && !spares([1, 2, 3], [1, 1, 1], 40));
        // Guests of one session.
        assert!(spares([1, 1, 1], [1, 1, 2], 1) && !spares([1, 1, 2], [1, 1, 1], 20));
        assert!(!spares([1, 1, 1], [1, 1, 1], 100), "one guest");
        // What has nothing yet; and what does not fit beside all runs.
        assert!(spares([1, 1, 1], [3, 4, 6], 200) && !spares([1, 1, 1], [3, 4, 6], 100));
        assert!(!spares([1, 1, 1], [3, 4, 6], 201));
        // One that is not admitted, beside 120 of its user.
        let beside = |n_beside| {
            let head = Head { of: even([3, 4, 6]), n_pages: 150 };
            held.spares(even([1, 1, 1]), n_beside, head, 250)
        };
        assert!(beside(29) && !beside(30));
    }

    #[test]
    fn what_users_hold_is_weighed_by_their_shares_and_a_higher_rank_is_spared_where_all_fit() {
        let of = |names, n_pages| OfGuest { names, n_pages };
        let guests = vec![of([1, 1, 1], 90), of([2, 2, 2], 30)];
        let held = Held { is_counted: true, guests, n_staying: 50, ..Held::default() };
        let party = |names, share, rank| {
            let share = std::num::NonZeroU32::new(share).expect("above 0");
            Party { names, priority: Priority { share, rank } }
        };
        let spares = |of: (u32, u8), head: (u32, u8), n_pages| {
            let head = Head { of: party([2, 2, 2], head.0, head.1), n_pages };
            held.spares(party([1, 1, 1], of.0, of.1), 0, head, 250)
        };
        // 90 pages for three shares, 30 and those of the head for one.
        assert!(spares((3, 0), (1, 0), 1) && !spares((3, 0), (1, 0), 0) && !spares((1, 0), (1, 0), 60));
        assert!(!spares((3, 0), (1, 0), 201), "it does not fit");
        assert!(spares((1, 1), (1, 0), 1) && !spares((1, 1), (1, 0), 201), "a higher rank takes turns too");
        assert!(!spares((1, 0), (1, 1), 200), "a lower rank makes room whatever it holds");
    }
}
