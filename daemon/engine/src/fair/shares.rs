//! What part of the device each guest is due.

use smallvec::SmallVec;

use super::node::NodeId;
use super::{FairQueue, Lane, ROOT};

/// A guest that waits, and what it is due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DuePart {
    guest: NodeId,
    /// It is due one part in so many: users have theirs by their shares, the sessions of one user, and the guests of one
    /// session, share alike.
    pub(crate) n_parts: f64,
    /// What it waits for in a lane.
    pub(crate) n_rows: usize,
}

impl<T> FairQueue<T> {
    /// Rows of all items of a lane.
    pub(crate) fn n_rows(&self, lane: Lane) -> usize {
        self.node(ROOT).lane(lane).map_or(0, |waiting| waiting.n_rows)
    }

    /// What each guest is due that waits in a lane. Takes time in proportion to them.
    pub(crate) fn shares(&self, lane: Lane) -> impl Iterator<Item = DuePart> + '_ {
        let mut above: SmallVec<[_; 3]> = SmallVec::new();
        above.push((1.0, self.node(ROOT).listed(lane)));
        std::iter::from_fn(move || {
            loop {
                let (n_parts, children) = above.last_mut()?;
                let n_parts = *n_parts;
                let Some(id) = children.next() else {
                    above.pop();
                    continue;
                };
                let node = self.node(id);
                let Some(waiting) = node.lane(lane).filter(|waiting| waiting.n_items > 0) else { continue };
                let n_parts = n_parts * self.n_parts_of(id, self.busy_shares(node.parent, lane));
                if waiting.items.is_empty() {
                    above.push((n_parts, node.listed(lane)));
                } else {
                    return Some(DuePart { guest: id, n_parts, n_rows: waiting.n_rows });
                }
            }
        })
    }

    /// What a guest would be due that waited a moment ago, if it does not wait now.
    pub(crate) fn share_if_back(&self, share: DuePart, lane: Lane) -> Option<DuePart> {
        let (mut id, mut n_parts) = (share.guest, 1.0);
        let n_items = |id| self.node(id).lane(lane).map_or(0, |waiting| waiting.n_items);
        if n_items(id) > 0 {
            return None;
        }
        while id != ROOT {
            let parent = self.node(id).parent;
            let own = if n_items(id) == 0 { u64::from(self.node(id).share.get()) } else { 0 };
            n_parts *= self.n_parts_of(id, self.busy_shares(parent, lane) + own);
            id = parent;
        }
        Some(DuePart { n_parts, ..share })
    }

    /// In how many parts a child has one, where those with items have so much of shares together.
    fn n_parts_of(&self, id: NodeId, shares: u64) -> f64 {
        shares as f64 / f64::from(self.node(id).share.get())
    }

    fn busy_shares(&self, id: NodeId, lane: Lane) -> u64 {
        self.node(id).lane(lane).map_or(0, |waiting| waiting.busy_shares)
    }
}
