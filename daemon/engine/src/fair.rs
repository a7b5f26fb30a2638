//! Fair shares for users, then their sessions, then their guests, by virtual time.
//!
//! Users have weights, their shares: the virtual time of a user moves on by the work done for it over its share, so that two
//! users with shares of 3 and 1 get work done as 3 to 1 while both have enough to do. Sessions of a user, and guests of a
//! session, share alike.
//!
//! P. Goyal, H. Vin and H. Cheng, "Start-time Fair Queuing" (1996): each owner carries the work done for it as its
//! virtual time, and the owner furthest behind goes first. An owner that comes back after having had nothing to ask for
//! starts where those are that still wait, so that idleness earns no credit; what it was charged beyond that stays with it. So it
//! does with owners that left, until those that still wait have come as far, or too many others that left are further ahead.
//!
//! Owners stand in heaps that are put in order when they are read: an owner's virtual time only grows, so an entry that
//! is out of date comes up too early, is seen, and is put where it belongs. Serving an owner that is put back at once
//! moves one entry of each heap, and nothing is allocated for it.
//!
//! The scheduler of an engine serves by it, and so do the daemon's threads for guests.

mod node;
mod shares;

use std::cmp::Ordering;
use std::num::NonZeroU32;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use self::node::{Node, NodeId};
pub(crate) use self::shares::DuePart;
use crate::account::{ActorId, Owner};

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// The next token.
    Decode,
    /// More than one token.
    Prompt,
}

/// What waits for one class of work of one model. All lanes draw on the same virtual time; a step takes from the two of
/// its model, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane(usize);

impl Lane {
    /// That of a queue whose items are all of one kind.
    pub const ONLY: Self = Self(0);

    /// That of the kind of this number, in a queue whose items are of a few.
    #[must_use]
    pub const fn numbered(number: usize) -> Self {
        Self(number)
    }

    /// The lane of a class of the model that has this place on its device.
    pub(crate) fn of(place: usize, class: Class) -> Self {
        Self(2 * place + class as usize)
    }
}

/// A guest's place in the queue, until it is given back.
#[derive(Debug, PartialEq, Eq)]
pub struct Seat(NodeId);

/// How far a user, a session and a guest have come. In its order as a value, for lists, ties are broken by node id.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VirtualTimes(SmallVec<[(u64, NodeId); 3]>);

impl VirtualTimes {
    /// Which is further behind: the users decide, then the sessions of one user, then the guests of one session.
    pub(crate) fn compare(&self, other: &Self) -> Ordering {
        for ((vtime, id), (other_vtime, other_id)) in self.0.iter().zip(&other.0) {
            let order = vtime.cmp(other_vtime);
            if order.is_ne() || id != other_id {
                return order;
            }
        }
        Ordering::Equal
    }
}

/// Items waiting to be served, in the order that is fair to their owners.
#[derive(Debug)]
pub struct FairQueue<T> {
    /// The service itself, then users, sessions and guests.
    nodes: Vec<Node<T>>,
    free: Vec<NodeId>,
    by_name: FxHashMap<(NodeId, u64), NodeId>,
}

const ROOT: NodeId = NodeId(0);

/// Resting children that a node remembers. Were there no bound, guests of one session that come and go, each of which asks for
/// something once, would all be remembered while the session lasts.
const N_RESTING_MAX: usize = 128;

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self {
            nodes: vec![Node::new(ROOT, 0, 0, NonZeroU32::MIN)],
            free: Vec::new(),
            by_name: FxHashMap::default(),
        }
    }
}

impl<T> FairQueue<T> {
    /// A place for something of this guest's. Each has to be given back with [`Self::vacate`].
    pub fn seat(&mut self, owner: &Owner) -> Seat {
        let user = self.child(ROOT, u64::from(owner.actor.0), owner.account.priority().share);
        let session = self.child(user, owner.session.0, NonZeroU32::MIN);
        let mut id = self.child(session, owner.guest.0, NonZeroU32::MIN);
        // The tenants of a node are seats, or children that have tenants.
        let guest = id;
        while id != ROOT {
            let node = self.node_mut(id);
            node.n_tenants += 1;
            if node.n_tenants > 1 {
                break;
            }
            id = node.parent;
        }
        Seat(guest)
    }

    /// A second place for the same guest.
    pub(crate) fn seat_beside(&mut self, seat: &Seat) -> Seat {
        self.node_mut(seat.0).n_tenants += 1;
        Seat(seat.0)
    }

    /// Gives a place back. What still waits there is served as if it were kept.
    pub fn vacate(&mut self, seat: Seat) {
        let mut id = seat.0;
        while id != ROOT {
            let node = self.node_mut(id);
            node.n_tenants -= 1;
            if node.n_tenants > 0 {
                return;
            }
            let parent = node.parent;
            self.may_rest(id);
            id = parent;
        }
    }

    /// Puts an item of so many rows at the end of what its guest waits for in a lane. Whether nothing of its user waited there.
    pub fn push(&mut self, seat: &Seat, lane: Lane, item: T, n_rows: usize) -> bool {
        self.node_mut(seat.0).lane_mut(lane).items.push_back((item, n_rows));
        self.note_pushed(seat, lane, n_rows)
    }

    /// As [`Self::push`], before all that its guest waits for.
    pub(crate) fn push_first(&mut self, seat: &Seat, lane: Lane, item: T, n_rows: usize) -> bool {
        self.node_mut(seat.0).lane_mut(lane).items.push_front((item, n_rows));
        self.note_pushed(seat, lane, n_rows)
    }

    fn note_pushed(&mut self, seat: &Seat, lane: Lane, n_rows: usize) -> bool {
        let (mut id, mut is_first) = (seat.0, false);
        while id != ROOT {
            self.catch_up(id);
            let node = self.node_mut(id);
            let (parent, vtime, share) = (node.parent, node.vtime, node.share);
            node.n_items += 1;
            let waiting = node.lane_mut(lane);
            let was_busy = waiting.n_items > 0;
            is_first = !was_busy;
            waiting.n_items += 1;
            waiting.n_rows += n_rows;
            let was_listed = std::mem::replace(&mut waiting.is_listed, true);
            let parent_node = self.node_mut(parent);
            parent_node.lane_mut(lane).busy_shares += if was_busy { 0 } else { u64::from(share.get()) };
            if !was_listed {
                parent_node.list(lane, vtime, id);
            }
            id = parent;
        }
        let root = self.node_mut(ROOT);
        root.n_items += 1;
        let waiting = root.lane_mut(lane);
        waiting.n_items += 1;
        waiting.n_rows += n_rows;
        is_first
    }

    /// The next item of a lane in the fair order. [`Self::charge`] says afterwards what it cost.
    pub fn pop(&mut self, lane: Lane) -> Option<T> {
        self.pop_below(ROOT, lane)
    }

    /// As [`Self::pop`], of the items of one user.
    pub(crate) fn pop_of(&mut self, lane: Lane, user: ActorId) -> Option<T> {
        let id = *self.by_name.get(&(ROOT, u64::from(user.0)))?;
        self.pop_below(id, lane)
    }

    /// As [`Self::pop`], of users that are not kept out. Takes time in proportion to those that are.
    pub fn pop_but_of(&mut self, lane: Lane, is_kept_out: impl Fn(ActorId) -> bool) -> Option<T> {
        let mut kept_out: SmallVec<[(u64, NodeId); 4]> = SmallVec::new();
        let found = loop {
            let Some((vtime, user)) = self.first(ROOT, lane) else { break None };
            if !u32::try_from(self.node(user).name).is_ok_and(|name| is_kept_out(ActorId(name))) {
                break Some((vtime, user));
            }
            self.node_mut(ROOT).unlist_first(lane);
            kept_out.push((vtime, user));
        };
        let root = self.node_mut(ROOT);
        kept_out.into_iter().for_each(|(vtime, user)| root.list(lane, vtime, user));
        let (vtime, user) = found?;
        root.last = root.last.max(vtime);
        self.pop_below(user, lane)
    }

    fn pop_below(&mut self, mut id: NodeId, lane: Lane) -> Option<T> {
        while let Some((vtime, child)) = self.first(id, lane) {
            self.node_mut(id).last = vtime;
            id = child;
        }
        self.take(id, lane)
    }

    /// Items of a user that wait in a lane.
    pub(crate) fn len_of(&self, lane: Lane, user: ActorId) -> usize {
        let waiting = self.by_name.get(&(ROOT, u64::from(user.0))).and_then(|&id| self.node(id).lane(lane));
        waiting.map_or(0, |waiting| waiting.n_items)
    }

    /// As [`Self::pop`], of an item that is not served but put back: nobody else counts as having come as far as its owner.
    pub(crate) fn pop_unserved(&mut self, lane: Lane) -> Option<T> {
        let guest = self.next_guest(lane);
        self.take(guest, lane)
    }

    /// The item that [`Self::pop`] would take.
    pub fn peek(&mut self, lane: Lane) -> Option<&T> {
        let guest = self.next_guest(lane);
        self.node(guest).lane(lane)?.items.front().map(|(item, _)| item)
    }

    /// The lane of these whose next item is of those that are furthest behind; of several the first.
    pub fn first_of(&mut self, lanes: impl IntoIterator<Item = Lane>) -> Option<Lane> {
        let firsts = lanes.into_iter().filter_map(|lane| Some((lane, self.virtual_times(lane)?)));
        firsts.min_by(|(_, one), (_, other)| one.compare(other)).map(|(lane, _)| lane)
    }

    /// Whose item comes next: the root, if none does.
    fn next_guest(&mut self, lane: Lane) -> NodeId {
        let mut id = ROOT;
        while let Some((_, child)) = self.first(id, lane) {
            id = child;
        }
        id
    }

    /// The next item of a lane round robin, however far its owners are ahead: users one after the other, and so their
    /// sessions and guests.
    pub(crate) fn pop_in_turn(&mut self, lane: Lane) -> Option<T> {
        let mut id = ROOT;
        loop {
            let turned = self.node(id).lane(lane)?.turned;
            let waits =
                |child: &NodeId| self.node(*child).lane(lane).is_some_and(|waiting| waiting.n_items > 0);
            // The one behind the last, or else the first of all.
            let next =
                self.node(id).listed(lane).filter(waits).min_by_key(|child| (*child <= turned, *child));
            let Some(child) = next else { return self.take(id, lane) };
            self.node_mut(id).lane_mut(lane).turned = child;
            id = child;
        }
    }

    fn take(&mut self, id: NodeId, lane: Lane) -> Option<T> {
        let (item, n_rows) = self.node_mut(id).lane_mut(lane).items.pop_front()?;
        self.note_taken(id, lane, n_rows);
        Some(item)
    }

    /// Takes an item out of what its guest waits for, wherever it stands.
    ///
    /// # Panics
    /// It does not wait there.
    pub(crate) fn withdraw(&mut self, seat: &Seat, lane: Lane, item: &T)
    where
        T: PartialEq,
    {
        let items = &mut self.node_mut(seat.0).lane_mut(lane).items;
        let idx = items.iter().position(|(other, _)| other == item).expect("it waits");
        let (_, n_rows) = items.remove(idx).expect("it was found");
        self.note_taken(seat.0, lane, n_rows);
    }

    fn note_taken(&mut self, mut id: NodeId, lane: Lane, n_rows: usize) {
        loop {
            let node = self.node_mut(id);
            let (parent, share) = (node.parent, node.share);
            node.n_items -= 1;
            let waiting = node.lane_mut(lane);
            waiting.n_items -= 1;
            waiting.n_rows -= n_rows;
            let is_busy = waiting.n_items > 0;
            if !is_busy {
                waiting.let_go_of_room();
            }
            if id == ROOT {
                return;
            }
            self.node_mut(parent).lane_mut(lane).busy_shares -=
                if is_busy { 0 } else { u64::from(share.get()) };
            self.may_rest(id);
            id = parent;
        }
    }

    /// By how much the user whose item of this lane comes next is ahead of the one whose item of another does.
    pub(crate) fn lead(&mut self, lane: Lane, other: Lane) -> u64 {
        let behind = self.vtime(other).unwrap_or(u64::MAX);
        self.vtime(lane).map_or(0, |vtime| vtime.saturating_sub(behind))
    }

    /// Has users with items of another lane come so far that the one whose item of this lane comes next is ahead of them by
    /// this much at most.
    pub(crate) fn bound_lead(&mut self, lane: Lane, other: Lane, most: u64) {
        let Some(vtime) = self.vtime(lane) else { return };
        let least = vtime.saturating_sub(most);
        while let Some((_, child)) = self.first(ROOT, other).filter(|&(vtime, _)| vtime < least) {
            self.node_mut(child).vtime = least;
        }
    }

    /// The virtual time of the user whose item of this lane comes next.
    pub(crate) fn vtime(&mut self, lane: Lane) -> Option<u64> {
        self.first(ROOT, lane).map(|(vtime, _)| vtime)
    }

    /// How far those have come whose item of this lane comes next.
    pub(crate) fn virtual_times(&mut self, lane: Lane) -> Option<VirtualTimes> {
        let (mut id, mut times) = (ROOT, VirtualTimes::default());
        while let Some((vtime, child)) = self.first(id, lane) {
            times.0.push((vtime, child));
            id = child;
        }
        (!times.0.is_empty()).then_some(times)
    }

    /// How far a guest and those above it have come.
    pub(crate) fn virtual_times_of(&self, seat: &Seat) -> VirtualTimes {
        let (mut id, mut times) = (seat.0, VirtualTimes::default());
        while id != ROOT {
            times.0.push((self.node(id).vtime, id));
            id = self.node(id).parent;
        }
        times.0.reverse();
        times
    }

    /// The virtual times of a user, a session and a guest by their names. A forgotten owner was at or behind the current
    /// virtual time, or is one of many that left.
    pub(crate) fn vtimes(&self, names: [u64; 3]) -> [u64; 3] {
        let mut id = Some(ROOT);
        names.map(|name| {
            id = id.and_then(|parent| self.by_name.get(&(parent, name)).copied());
            id.map_or(0, |id| self.node(id).vtime)
        })
    }

    /// Forgets what waits in a lane.
    pub(crate) fn clear(&mut self, lane: Lane) {
        self.nodes.iter_mut().for_each(|node| node.clear(lane));
        // Those that left nothing else behind, guests before their sessions, and those before their users. Places that are free are
        // still called resting.
        for depth in (1..=3).rev() {
            for idx in 1..self.nodes.len() {
                let id = NodeId(idx as u32);
                if !self.node(id).is_resting && self.depth(id) == depth {
                    self.may_rest(id);
                }
            }
        }
    }

    /// How many nodes are above this one.
    fn depth(&self, mut id: NodeId) -> usize {
        let mut n_above = 0;
        while id != ROOT {
            id = self.node(id).parent;
            n_above += 1;
        }
        n_above
    }

    /// Charges an owner for work.
    pub fn charge(&mut self, seat: &Seat, cost: u64) {
        let mut id = seat.0;
        while id != ROOT {
            self.catch_up(id);
            let node = self.node_mut(id);
            node.charge(cost);
            id = node.parent;
        }
    }

    /// How many items wait in a lane.
    pub fn len(&self, lane: Lane) -> usize {
        self.node(ROOT).lane(lane).map_or(0, |waiting| waiting.n_items)
    }

    fn node(&self, id: NodeId) -> &Node<T> {
        &self.nodes[id.0 as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node<T> {
        &mut self.nodes[id.0 as usize]
    }

    fn child(&mut self, parent: NodeId, name: u64, share: NonZeroU32) -> NodeId {
        let now = self.now(parent);
        self.forget_rested(parent, now);
        if let Some(&id) = self.by_name.get(&(parent, name)) {
            return id;
        }
        let node = Node::new(parent, name, now, share);
        let id = match self.free.pop() {
            Some(id) => {
                *self.node_mut(id) = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId(u32::try_from(self.nodes.len() - 1).expect("owners fit 32 bits"))
            }
        };
        self.by_name.insert((parent, name), id);
        id
    }

    /// Idleness earns no credit.
    fn catch_up(&mut self, id: NodeId) {
        let node = self.node(id);
        // An owner at `last` was served just now and was not idle; none is ever beyond it.
        if node.n_items == 0 && node.vtime < self.node(node.parent).last {
            let now = self.now(self.node(id).parent);
            let node = self.node_mut(id);
            node.vtime = node.vtime.max(now);
        }
    }

    /// The child of a node that is furthest behind among those with items of a lane.
    fn first(&mut self, id: NodeId, lane: Lane) -> Option<(u64, NodeId)> {
        loop {
            let (vtime, child_id) = self.node(id).listed_first(lane)?;
            let child = self.node_mut(child_id);
            // Also one without items, which was served a moment ago: most have items again before they would be served.
            if child.vtime > vtime {
                let vtime = child.vtime;
                self.node_mut(id).relist_first(lane, vtime);
            } else if child.lane(lane).is_none_or(|waiting| waiting.n_items == 0) {
                child.lane_mut(lane).is_listed = false;
                self.node_mut(id).unlist_first(lane);
            } else {
                return Some((vtime, child_id));
            }
        }
    }

    /// The virtual time of a node's children: that of the child served last, or of one that waits and is further behind.
    fn now(&mut self, id: NodeId) -> u64 {
        let mut now = self.node(id).last;
        for lane in self.node(id).lanes() {
            if let Some((vtime, _)) = self.first(id, lane) {
                now = now.min(vtime);
            }
        }
        now
    }

    /// Has a node rest that has neither tenants nor items. What it was charged stays with it.
    fn may_rest(&mut self, id: NodeId) {
        let node = self.node_mut(id);
        if node.is_in_use() || node.is_resting {
            return;
        }
        node.is_resting = true;
        let (parent, vtime) = (node.parent, node.vtime);
        self.node_mut(parent).rest(vtime, id);
        if self.node(parent).n_resting() > N_RESTING_MAX {
            self.forget_nearest(parent);
        }
    }

    /// Forgets resting children that are at or behind `now`.
    fn forget_rested(&mut self, id: NodeId, now: u64) {
        while let Some(child_id) = self.node_mut(id).pop_rested(now) {
            let child = self.node_mut(child_id);
            if child.is_in_use() {
                child.is_resting = false;
            } else if child.vtime > now {
                // It was back in between, and came to rest once more.
                let vtime = child.vtime;
                self.node_mut(id).rest(vtime, child_id);
            } else {
                self.remove(child_id);
            }
        }
    }

    /// Forgets the resting children that are least ahead, so many that half of the most are left.
    fn forget_nearest(&mut self, id: NodeId) {
        let mut resting = self.node_mut(id).take_resting();
        resting.retain_mut(|(vtime, child_id)| {
            let child = self.node_mut(*child_id);
            (*vtime, child.is_resting) = (child.vtime, !child.is_in_use());
            child.is_resting
        });
        resting.sort_unstable();
        let n_forgotten = resting.len().saturating_sub(N_RESTING_MAX / 2);
        resting.drain(..n_forgotten).for_each(|(_, child_id)| self.remove(child_id));
        let node = self.node_mut(id);
        resting.into_iter().for_each(|(vtime, child_id)| node.rest(vtime, child_id));
    }

    /// Removes a node that no longer stands among those that rest, and its children, which all rest.
    fn remove(&mut self, id: NodeId) {
        let node = self.node(id);
        if node.is_listed() {
            let parent = node.parent;
            self.node_mut(parent).unlist(id);
        }
        self.free_with_children(id);
    }

    fn free_with_children(&mut self, id: NodeId) {
        for (_, child) in self.node_mut(id).take_resting() {
            self.free_with_children(child);
        }
        let node = self.node(id);
        let name = (node.parent, node.name);
        self.by_name.remove(&name);
        // Its place is kept for another, and not the memory of what once waited there.
        self.node_mut(id).let_go();
        self.free.push(id);
    }
}

#[cfg(test)]
mod tests;
