//! What the guests' admitted contexts hold of the pages and may take: whether it is fair that a run which has had its term
//! makes room for the first in line.
//!
//! A run is *spared* where its user holds less than the first one's user will with it, and the first fits beside all runs
//! that have had their terms once everything else has ended: it can wait for questions, which do, and a stream of few pages
//! does not stand still because others ask for more than there is. Between sessions of one user it is the same, and between
//! guests of one session; what one guest asks takes turns.

use super::{ContextState, Scheduler};
use crate::account::Owner;
use crate::command::ContextId;

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

    /// Whether a run of this owner, which has had its term, is spared on a device of so many pages.
    fn spares(&self, run: Names, first: First, n_pages: usize) -> bool {
        let Some(level) = (0..run.len()).find(|&level| run[level] != first.names[level]) else {
            return false;
        };
        let held_by = |names: Names| -> usize {
            let of = self.guests.iter().filter(|of| of.names[..=level] == names[..=level]);
            of.map(|of| of.n_pages).sum()
        };
        self.n_over + first.n_blocks <= n_pages && held_by(run) < held_by(first.names) + first.n_blocks
    }
}

fn names(owner: &Owner) -> Names {
    [u64::from(owner.actor.0), owner.session.0, owner.guest.0]
}

impl Scheduler {
    /// Whether an admitted run that is being placed keeps its pages when it has had its term, though there are none for the
    /// first in line.
    pub(super) fn is_spared(&mut self, id: ContextId, run: &ContextState) -> bool {
        let Some(first) = self.first_to_make_room_for() else { return false };
        if names(&run.owner) == first.names {
            return false;
        }
        self.count_held(Some((id, run)));
        self.held.spares(names(&run.owner), first, self.limits.n_pages)
    }

    /// Of runs that have had their terms, leaves those that make room for the first in line.
    pub(super) fn leave_out_spared(&mut self, over: &mut Vec<ContextId>) {
        let Some(first) = self.first_to_make_room_for() else { return };
        self.count_held(None);
        let Self { held, contexts, limits, .. } = self;
        over.retain(|id| !held.spares(names(&contexts[id].owner), first, limits.n_pages));
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
        let spares = |run, names, n_blocks| held.spares(run, First { names, n_blocks }, 250);
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
    }
}
