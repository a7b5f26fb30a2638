//! One owner in the queue: the service, a user, a session or a guest.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BinaryHeap, VecDeque};

use super::Class;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NodeId(pub(super) u32);

/// Children by virtual time, the furthest behind first. A time may be out of date: it is then too small.
type Heap = BinaryHeap<Reverse<(u64, NodeId)>>;

#[derive(Debug)]
pub(super) struct Node<T> {
    pub(super) parent: NodeId,
    /// Among the children of its parent.
    pub(super) name: u64,
    pub(super) vtime: u64,
    /// Items that wait here or below, by class.
    pub(super) n_items: [usize; 2],
    /// Whether it stands in its parent's heap of a class.
    pub(super) is_listed: [bool; 2],
    /// Whether it stands among its parent's resting children.
    pub(super) is_resting: bool,
    /// Seats, or children that have tenants.
    pub(super) n_tenants: usize,
    /// What a guest waits for, first come, first served, by class.
    pub(super) items: [VecDeque<T>; 2],
    /// The virtual time of the child that was served last.
    pub(super) last: u64,
    /// Children with items of a class, and some that had any.
    listed: [Heap; 2],
    /// Children without tenants whose virtual time may still be ahead of those that wait.
    resting: Heap,
}

impl<T> Node<T> {
    pub(super) fn new(parent: NodeId, name: u64, vtime: u64) -> Self {
        Self {
            parent,
            name,
            vtime,
            n_items: [0; 2],
            is_listed: [false; 2],
            is_resting: false,
            n_tenants: 0,
            items: [VecDeque::new(), VecDeque::new()],
            last: 0,
            listed: [Heap::new(), Heap::new()],
            resting: Heap::new(),
        }
    }

    pub(super) fn list(&mut self, class: Class, vtime: u64, child: NodeId) {
        self.listed[class as usize].push(Reverse((vtime, child)));
    }

    pub(super) fn listed_first(&self, class: Class) -> Option<(u64, NodeId)> {
        self.listed[class as usize].peek().map(|&Reverse(first)| first)
    }

    pub(super) fn unlist_first(&mut self, class: Class) {
        self.listed[class as usize].pop();
    }

    /// Puts the first child where this virtual time belongs.
    pub(super) fn relist_first(&mut self, class: Class, vtime: u64) {
        if let Some(mut first) = self.listed[class as usize].peek_mut() {
            first.0.0 = vtime;
        }
    }

    pub(super) fn unlist(&mut self, child: NodeId) {
        for heap in &mut self.listed {
            heap.retain(|&Reverse((_, listed))| listed != child);
        }
    }

    pub(super) fn rest(&mut self, vtime: u64, child: NodeId) {
        self.resting.push(Reverse((vtime, child)));
    }

    /// A resting child that was ahead of nobody at this time when it came to rest.
    pub(super) fn pop_rested(&mut self, now: u64) -> Option<NodeId> {
        let first = self.resting.peek_mut()?;
        let Reverse((vtime, child)) = *first;
        (vtime <= now).then(|| {
            PeekMut::pop(first);
            child
        })
    }
}
