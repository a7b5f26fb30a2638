//! The line of contexts that wait for pages: fair to users, then their sessions, then their guests, by virtual time over the
//! pages that they were given out of it.

use rustc_hash::{FxHashMap, FxHashSet};

use super::admission::PageCount;
use crate::account::Owner;
use crate::command::ContextId;
use crate::fair::{FairQueue, Lane, Seat, VirtualTimes};

/// A context's place in the line.
#[derive(Debug)]
struct Waiter {
    seat: Seat,
    /// What its owners' places in the line move on by once it is admitted.
    n_blocks: u64,
    /// Those of one guest come in the order in which they came.
    number: u64,
}

/// Contexts that wait to be admitted, and what those that are have been promised.
#[derive(Debug, Default)]
pub(super) struct Line {
    queue: FairQueue<ContextId>,
    waiting: FxHashMap<ContextId, Waiter>,
    first: Option<ContextId>,
    n_numbers: u64,
    /// Pages promised to contexts that are admitted.
    pub(super) n_promised: usize,
    pub(super) admitted: FxHashSet<ContextId>,
    /// The count of pages, once it was made for the step being planned.
    pub(super) count: Option<PageCount>,
}

impl Line {
    /// A number that is above all earlier ones.
    pub(super) fn next_number(&mut self) -> u64 {
        self.n_numbers += 1;
        self.n_numbers
    }

    /// A place for a context that will hold so many blocks.
    pub(super) fn enter(&mut self, id: ContextId, owner: &Owner, n_blocks: usize) {
        let seat = self.queue.seat(owner);
        self.queue.push(&seat, Lane::ONLY, id, 1);
        let (n_blocks, number) = (n_blocks.max(1) as u64, self.next_number());
        let earlier = self.waiting.insert(id, Waiter { seat, n_blocks, number });
        assert!(earlier.is_none(), "a context has one place in line");
        self.note_first();
    }

    /// A place is given up without its pages.
    pub(super) fn give_up(&mut self, id: ContextId) {
        let Waiter { seat, .. } = self.waiting.remove(&id).expect("it stands in line");
        self.queue.withdraw(&seat, Lane::ONLY, &id);
        self.queue.vacate(seat);
        self.note_first();
    }

    /// The first in line has been admitted.
    pub(super) fn leave(&mut self, id: ContextId) {
        assert_eq!(self.queue.pop(Lane::ONLY), Some(id), "the first in line is admitted");
        let Waiter { seat, n_blocks, .. } = self.waiting.remove(&id).expect("it stands in line");
        self.queue.charge(&seat, n_blocks);
        self.queue.vacate(seat);
        self.note_first();
    }

    fn note_first(&mut self) {
        self.first = self.queue.peek(Lane::ONLY).copied();
    }

    /// Contexts in line.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The first in line.
    pub(super) fn first(&self) -> Option<ContextId> {
        self.first
    }

    /// The first in line, and how many blocks it will hold.
    pub(super) fn first_and_its_blocks(&self) -> Option<(ContextId, usize)> {
        let first = self.first?;
        Some((first, self.waiting[&first].n_blocks as usize))
    }

    /// Those in line, the last first.
    pub(super) fn last_first(&self) -> Vec<ContextId> {
        let place = |(&id, waiter): (&ContextId, &Waiter)| {
            let times: VirtualTimes = self.queue.virtual_times_of(&waiter.seat);
            (times, waiter.number, id)
        };
        let mut places: Vec<_> = self.waiting.iter().map(place).collect();
        places.sort_unstable_by(|a, b| b.cmp(a));
        places.into_iter().map(|(.., id)| id).collect()
    }

    /// What was counted holds for the plan of one step.
    pub(super) fn forget_count(&mut self) {
        self.count = None;
    }
}
