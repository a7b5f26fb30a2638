//! What the guests' admitted contexts hold of the pages and may take: whether it is fair that a run which has had its term
//! makes room for the first in line, or waits behind it.
//!
//! A run is *spared* where its user holds less than the first one's user will with it, and the first fits beside all runs
//! that have had their terms once everything else has ended: it can wait for questions, which do, and a stream of few pages
//! does not stand still because others ask for more than there is. Between sessions of one user it is the same, and between
//! guests of one session; what one guest asks takes turns.

use super::admission::Standing;
use super::fair::Class;
use super::joint::Members;
use super::{ContextState, Scheduler};
use crate::account::Owner;
use crate::command::ContextId;
use crate::job::Work;

/// What each guest holds and may take, as it was counted in one plan.
#[derive(Debug, Default)]
pub(super) struct Held {
    is_counted: bool,
    guests: Vec<OfGuest>,
    /// Pages of runs that have had their terms.
    n_over: usize,
    /// Memory of the count: the admitted contexts, those of one guest side by side.
    order: Vec<(Names, ContextId)>,
}

/// A user, a session and a guest.
type Names = [u64; 3];

/// What one guest's admitted contexts hold and may take. A page that several of them hold counts once.
#[derive(Clone, Copy, Debug)]
struct OfGuest {
    names: Names,
    n_pages: usize,
}

/// The first in line.
#[derive(Clone, Copy, Debug)]
struct First {
    names: Names,
    n_blocks: usize,
}

impl Held {
    /// What was counted holds for one plan.
    pub(super) fn forget(&mut self) {
        self.is_counted = false;
    }

    /// Whether a run of this owner that has had its term is spared on a device of so many pages, where it holds, or is to
    /// have, so many beside those that were counted.
    fn spares(&self, run: Names, n_beside: usize, first: First, n_pages: usize) -> bool {
        let Some(level) = (0..run.len()).find(|&level| run[level] != first.names[level]) else {
            return false;
        };
        let held_by = |names: Names| -> usize {
            let of = self.guests.iter().filter(|of| of.names[..=level] == names[..=level]);
            of.map(|of| of.n_pages).sum()
        };
        self.n_over + n_beside + first.n_blocks <= n_pages
            && held_by(run) + n_beside < held_by(first.names) + first.n_blocks
    }
}

impl ContextState {
    /// Whether it goes on from token to token, and what comes before the next one is there.
    fn goes_on_decoding(&self) -> bool {
        self.work.as_ref().is_some_and(Work::goes_on) && self.class() == Class::Decode && !self.is_in_line()
    }

    /// Blocks that it was admitted for and does not hold yet.
    fn n_blocks_to_come(&self) -> usize {
        match self.standing {
            Standing::Admitted(term) => term.n_blocks.saturating_sub(self.kv.blocks().len()),
            _ => 0,
        }
    }

    /// Pages that come free at most when its term ends.
    pub(super) fn n_blocks_and_promised(&self) -> usize {
        self.kv.blocks().len() + self.n_promised()
    }
}

fn names(owner: &Owner) -> Names {
    [u64::from(owner.actor.0), owner.session.0, owner.guest.0]
}

impl Scheduler {
    /// Whether a run goes on before those in line; if so, it counts as one that has had its term. It is being placed, and may
    /// be admitted.
    pub(super) fn is_spared(&mut self, id: ContextId, run: &ContextState) -> bool {
        // Its next page, and what it holds already.
        let n_beside = if run.is_admitted() { 1 } else { run.kv.blocks().len() + 1 };
        run.goes_on_decoding() && self.is_owner_spared(names(&run.owner), n_beside, Some((id, run)))
    }

    /// As [`Self::is_spared`], for a mixture.
    pub(super) fn is_mixture_spared(&mut self, members: &Members) -> bool {
        let of_run = members.iter().filter_map(|id| self.contexts.get(id));
        if !of_run.clone().all(|member| member.goes_on_decoding()) {
            return false;
        }
        let n_beside =
            of_run.map(|member| if member.is_admitted() { 1 } else { member.kv.blocks().len() + 1 });
        let n_beside = n_beside.sum();
        let Some(first) = members.first().and_then(|id| self.contexts.get(id)) else { return false };
        self.is_owner_spared(names(&first.owner), n_beside, None)
    }

    fn is_owner_spared(
        &mut self,
        names: Names,
        n_beside: usize,
        placed: Option<(ContextId, &ContextState)>,
    ) -> bool {
        let Some(first) = self.first_to_make_room_for().filter(|first| first.names != names) else {
            return false;
        };
        self.count_held(placed);
        let is_spared = self.held.spares(names, n_beside, first, self.limits.n_pages);
        if is_spared {
            self.held.guests.push(OfGuest { names, n_pages: n_beside });
            self.held.n_over += n_beside;
        }
        is_spared
    }

    /// Of runs that have had their terms, leaves those that make room for the first in line.
    pub(super) fn leave_out_spared(&mut self, over: &mut Vec<ContextId>) {
        let Some(first) = self.first_to_make_room_for() else { return };
        self.count_held(None);
        let Self { held, contexts, limits, .. } = self;
        over.retain(|id| !held.spares(names(&contexts[id].owner), 0, first, limits.n_pages));
    }

    fn first_to_make_room_for(&self) -> Option<First> {
        let (id, n_blocks) = self.line.first_and_its_blocks()?;
        Some(First { names: names(&self.contexts.get(&id)?.owner), n_blocks })
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
        held.guests.clear();
        held.n_over = 0;
        held.order.clear();
        // Others that are out of the table are members of a job that is being placed.
        let of = |id| context_of(id).map(|context| (names(&context.owner), id));
        held.order.extend(line.admitted.iter().filter_map(|&id| of(id)));
        held.order.sort_unstable();
        for &(names, id) in &held.order {
            if held.guests.last().is_none_or(|of| of.names != names) {
                held.guests.push(OfGuest { names, n_pages: 0 });
                pages.count_anew();
            }
            let Some(context) = context_of(id) else { continue };
            let n_held = context.kv.blocks().iter().filter(|&&block| pages.count_once(block)).count();
            let n_pages = n_held + context.n_blocks_to_come();
            held.guests.last_mut().expect("one was pushed").n_pages += n_pages;
            held.n_over += if context.has_had_its_term() { context.n_blocks_and_promised() } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_spared_where_its_owner_holds_less_than_the_first_ones_will() {
        let of = |names, n_pages| OfGuest { names, n_pages };
        let guests = vec![
            of([1, 1, 1], 10),
            of([1, 1, 2], 30),
            of([1, 2, 3], 80),
            of([2, 3, 4], 100),
            of([2, 3, 5], 15),
        ];
        let held = Held { is_counted: true, guests, n_over: 50, order: Vec::new() };
        let spares = |run, names, n_blocks| held.spares(run, 0, First { names, n_blocks }, 250);
        // The first user holds 120 in all, the second 115.
        assert!(spares([1, 1, 1], [2, 3, 4], 10) && !spares([1, 1, 1], [2, 3, 4], 5));
        assert!(spares([2, 3, 5], [1, 1, 1], 1));
        // The first session of the first user holds 40, the second 80.
        assert!(spares([1, 1, 1], [1, 2, 9], 5) && !spares([1, 2, 3], [1, 1, 1], 40));
        // Guests of one session.
        assert!(spares([1, 1, 1], [1, 1, 2], 1) && !spares([1, 1, 2], [1, 1, 1], 20));
        assert!(!spares([1, 1, 1], [1, 1, 1], 100), "one guest");
        // What has nothing yet; and what does not fit beside those that have had their terms.
        assert!(spares([1, 1, 1], [3, 4, 6], 200) && !spares([1, 1, 1], [3, 4, 6], 100));
        assert!(!spares([1, 1, 1], [3, 4, 6], 201));
        // One that is not admitted, beside 120 of its user.
        let beside = |n_beside| {
            let first = First { names: [3, 4, 6], n_blocks: 150 };
            held.spares([1, 1, 1], n_beside, first, 250)
        };
        assert!(beside(29) && !beside(30));
    }
}
