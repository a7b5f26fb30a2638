//! One owner in the queue: the service, a user, a session or a guest.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BinaryHeap, VecDeque};
use std::num::NonZeroU32;

use smallvec::SmallVec;

use super::Lane;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NodeId(pub(super) u32);

/// Items that a guest's place keeps room for while none wait: as many as a step has rows, unless it is told otherwise.
const N_ITEMS_KEPT: usize = 1024;

/// Children by virtual time, the furthest behind first. A time may be out of date: it is then too small.
type Heap = BinaryHeap<Reverse<(u64, NodeId)>>;

#[derive(Debug)]
pub(super) struct Node<T> {
    pub(super) parent: NodeId,
    /// Among the children of its parent.
    pub(super) name: u64,
    pub(super) vtime: u64,
    /// Its weight beside the other children of its parent: so much work moves its virtual time on by one.
    pub(super) share: NonZeroU32,
    /// Work that has not moved its virtual time on yet, less than its share.
    left_over: u64,
    /// Items that wait here or below, in all lanes.
    pub(super) n_items: usize,
    /// Whether it stands among its parent's resting children.
    pub(super) is_resting: bool,
    /// Seats, or children that have tenants.
    pub(super) n_tenants: usize,
    /// The virtual time of the child that was served last.
    pub(super) last: u64,
    /// As many as it has had items in; there are two for each model.
    lanes: SmallVec<[Waiting<T>; 2]>,
    /// Children with neither tenants nor items whose virtual time may still be ahead of those that wait, and some that have
    /// any again.
    resting: Heap,
}

/// What waits in one lane.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    /// Items that wait here or below.
    pub(super) n_items: usize,
    /// The rows of those items.
    pub(super) n_rows: usize,
    /// The shares of children with items, together.
    pub(super) busy_shares: u64,
    /// The child that had the last turn out of order.
    pub(super) turned: NodeId,
    /// Whether the node stands in its parent's heap.
    pub(super) is_listed: bool,
    /// What a guest waits for and how many rows each is, first come, first served.
    pub(super) items: VecDeque<(T, usize)>,
    /// Children with items, and some that had any.
    listed: Heap,
}

impl<T> Waiting<T> {
    fn new() -> Self {
        Self {
            n_items: 0,
            n_rows: 0,
            busy_shares: 0,
            turned: NodeId(0),
            is_listed: false,
            items: VecDeque::new(),
            listed: Heap::new(),
        }
    }

    /// Nothing waits any more: of the room that it took no more is kept than most need.
    pub(super) fn let_go_of_room(&mut self) {
        if self.items.capacity() > N_ITEMS_KEPT {
            self.items = VecDeque::new();
        }
    }
}

impl<T> Node<T> {
    pub(super) fn new(parent: NodeId, name: u64, vtime: u64, share: NonZeroU32) -> Self {
        Self {
            parent,
            name,
            vtime,
            share,
            left_over: 0,
            n_items: 0,
            is_resting: false,
            n_tenants: 0,
            last: 0,
            lanes: SmallVec::new(),
            resting: Heap::new(),
        }
    }

    /// Moves its virtual time on by its share's part of so much work.
    pub(super) fn charge(&mut self, cost: u64) {
        let (work, share) = (cost.saturating_add(self.left_over), u64::from(self.share.get()));
        self.vtime = self.vtime.saturating_add(work / share);
        self.left_over = work % share;
    }

    /// What waits in a lane, if anything ever has.
    pub(super) fn lane(&self, lane: Lane) -> Option<&Waiting<T>> {
        self.lanes.get(lane.0)
    }

    #[inline]
    pub(super) fn lane_mut(&mut self, lane: Lane) -> &mut Waiting<T> {
        while self.lanes.len() <= lane.0 {
            self.lanes.push(Waiting::new());
        }
        &mut self.lanes[lane.0]
    }

    /// The lanes in which anything has ever waited.
    pub(super) fn lanes(&self) -> impl Iterator<Item = Lane> + use<T> {
        (0..self.lanes.len()).map(Lane)
    }

    /// Whether it has tenants or items.
    pub(super) fn is_in_use(&self) -> bool {
        self.n_tenants > 0 || self.n_items > 0
    }

    pub(super) fn is_listed(&self) -> bool {
        self.lanes.iter().any(|lane| lane.is_listed)
    }

    /// Forgets what waits in a lane.
    pub(super) fn clear(&mut self, lane: Lane) {
        if let Some(waiting) = self.lanes.get_mut(lane.0) {
            self.n_items -= waiting.n_items;
            *waiting = Waiting::new();
        }
    }

    /// Lets go of all memory; it has neither items nor children.
    pub(super) fn let_go(&mut self) {
        (self.lanes, self.resting) = (SmallVec::new(), Heap::new());
    }

    pub(super) fn list(&mut self, lane: Lane, vtime: u64, child: NodeId) {
        self.lane_mut(lane).listed.push(Reverse((vtime, child)));
    }

    pub(super) fn listed_first(&self, lane: Lane) -> Option<(u64, NodeId)> {
        self.lane(lane)?.listed.peek().map(|&Reverse(first)| first)
    }

    /// Children with items of a lane, and some that had any.
    pub(super) fn listed(&self, lane: Lane) -> impl Iterator<Item = NodeId> + '_ {
        self.lane(lane)
            .into_iter()
            .flat_map(|waiting| waiting.listed.iter().map(|&Reverse((_, child))| child))
    }

    pub(super) fn unlist_first(&mut self, lane: Lane) {
        self.lane_mut(lane).listed.pop();
    }

    /// Puts the first child where this virtual time belongs.
    pub(super) fn relist_first(&mut self, lane: Lane, vtime: u64) {
        if let Some(mut first) = self.lane_mut(lane).listed.peek_mut() {
            first.0.0 = vtime;
        }
    }

    pub(super) fn unlist(&mut self, child: NodeId) {
        for lane in &mut self.lanes {
            lane.listed.retain(|&Reverse((_, listed))| listed != child);
        }
    }

    pub(super) fn rest(&mut self, vtime: u64, child: NodeId) {
        self.resting.push(Reverse((vtime, child)));
    }

    /// Entries of children that rest, or did when they were listed.
    pub(super) fn n_resting(&self) -> usize {
        self.resting.len()
    }

    /// Takes all of these out.
    pub(super) fn take_resting(&mut self) -> Vec<(u64, NodeId)> {
        std::mem::take(&mut self.resting).into_iter().map(|Reverse(entry)| entry).collect()
    }

    /// A resting child that was at or behind this virtual time when it came to rest.
    pub(super) fn pop_rested(&mut self, now: u64) -> Option<NodeId> {
        let first = self.resting.peek_mut()?;
        let Reverse((vtime, child)) = *first;
        (vtime <= now).then(|| {
            PeekMut::pop(first);
            child
        })
    }
}
