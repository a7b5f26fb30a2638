//! Fair shares for users, then their sessions, then their guests, by virtual time.
//!
//! P. Goyal, H. Vin and H. Cheng, "Start-time Fair Queuing" (1996): each owner carries the work done for it as its
//! virtual time, and who is furthest behind goes first. Who comes back after having had nothing to ask for starts
//! where those are who still wait, so that idleness earns no credit; what it was charged beyond that stays with it.

use std::collections::{BTreeSet, VecDeque};
use std::hash::Hash;

use rustc_hash::FxHashMap;

use crate::account::{ActorId, GuestId, Owner, SessionId};

/// What is waited for. Both classes draw on the same virtual time; a step takes from one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// The next token.
    Decode,
    /// More than one token.
    Prompt,
}

impl Class {
    const ALL: [Self; 2] = [Self::Decode, Self::Prompt];
}

/// Items waiting to be served, in the order that is fair to their owners.
#[derive(Debug)]
pub(crate) struct FairQueue<T> {
    root: Ring<ActorId, Ring<SessionId, Ring<GuestId, Leaf<T>>>>,
    n_items: [usize; 2], // by class
}

/// What one guest waits for, first come, first served.
#[derive(Debug)]
struct Leaf<T>([VecDeque<T>; 2]); // by class

impl<T> Default for Leaf<T> {
    fn default() -> Self {
        Self([VecDeque::new(), VecDeque::new()])
    }
}

/// Children in the order of their virtual times.
#[derive(Debug)]
struct Ring<K, C> {
    /// Children with something of a class to serve.
    order: [BTreeSet<(u64, K)>; 2],
    /// Children with nothing to serve whose virtual time is still ahead of those that wait.
    resting: BTreeSet<(u64, K)>,
    children: FxHashMap<K, Child<C>>,
    /// The virtual time of the child that was served last.
    last: u64,
}

#[derive(Debug)]
struct Child<C> {
    vtime: u64,
    node: C,
}

impl<K, C> Default for Ring<K, C> {
    fn default() -> Self {
        Self {
            order: [BTreeSet::new(), BTreeSet::new()],
            resting: BTreeSet::new(),
            children: FxHashMap::default(),
            last: 0,
        }
    }
}

trait Node<T> {
    type Path: Copy;
    fn push(&mut self, path: Self::Path, class: Class, item: T);
    fn pop(&mut self, class: Class) -> Option<T>;
    fn charge(&mut self, path: Self::Path, cost: u64);
    fn is_empty(&self, class: Class) -> bool;
}

impl<T> Node<T> for Leaf<T> {
    type Path = ();

    fn push(&mut self, (): (), class: Class, item: T) {
        self.0[class as usize].push_back(item);
    }

    fn pop(&mut self, class: Class) -> Option<T> {
        self.0[class as usize].pop_front()
    }

    fn charge(&mut self, (): (), _cost: u64) {}

    fn is_empty(&self, class: Class) -> bool {
        self.0[class as usize].is_empty()
    }
}

impl<K: Copy + Ord + Hash, C> Ring<K, C> {
    /// The virtual time of the service: that of the child served last, or of one that waits and is further behind.
    fn now(&self) -> u64 {
        let firsts = self.order.iter().filter_map(BTreeSet::first);
        firsts.map(|&(vtime, _)| vtime).fold(self.last, u64::min)
    }

    /// Forgets children that rest and are ahead of nobody.
    fn forget_rested(&mut self, now: u64) {
        while let Some(&(vtime, key)) = self.resting.first()
            && vtime <= now
        {
            self.resting.pop_first();
            self.children.remove(&key);
        }
    }
}

impl<T, K: Copy + Ord + Hash, C: Node<T> + Default> Node<T> for Ring<K, C> {
    type Path = (K, C::Path);

    fn push(&mut self, (key, rest): Self::Path, class: Class, item: T) {
        let now = self.now();
        let child = self.children.entry(key).or_insert_with(|| Child { vtime: now, node: C::default() });
        if Class::ALL.iter().all(|&class| child.node.is_empty(class)) {
            self.resting.remove(&(child.vtime, key));
            child.vtime = child.vtime.max(now);
        }
        if child.node.is_empty(class) {
            self.order[class as usize].insert((child.vtime, key));
        }
        child.node.push(rest, class, item);
        self.forget_rested(now);
    }

    fn pop(&mut self, class: Class) -> Option<T> {
        let &(vtime, key) = self.order[class as usize].first()?;
        let child = self.children.get_mut(&key).expect("every child in the order exists");
        self.last = vtime;
        let item = child.node.pop(class);
        if child.node.is_empty(class) {
            self.order[class as usize].pop_first();
            if Class::ALL.iter().all(|&class| child.node.is_empty(class)) {
                self.resting.insert((vtime, key));
            }
        }
        item
    }

    fn charge(&mut self, (key, rest): Self::Path, cost: u64) {
        let now = self.now();
        let resting = &mut self.resting;
        let child = self.children.entry(key).or_insert_with(|| {
            resting.insert((now, key));
            Child { vtime: now, node: C::default() }
        });
        let before = child.vtime;
        child.vtime = before.saturating_add(cost);
        for order in self.order.iter_mut().chain([resting]) {
            if order.remove(&(before, key)) {
                order.insert((child.vtime, key));
            }
        }
        child.node.charge(rest, cost);
    }

    fn is_empty(&self, class: Class) -> bool {
        self.order[class as usize].is_empty()
    }
}

fn path(owner: &Owner) -> (ActorId, (SessionId, (GuestId, ()))) {
    (owner.actor, (owner.session, (owner.guest, ())))
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { root: Ring::default(), n_items: [0; 2] }
    }
}

impl<T> FairQueue<T> {
    pub(crate) fn push(&mut self, owner: &Owner, class: Class, item: T) {
        self.n_items[class as usize] += 1;
        self.root.push(path(owner), class, item);
    }

    /// The next item of a class in the fair order. [`Self::charge`] says afterwards what it cost.
    pub(crate) fn pop(&mut self, class: Class) -> Option<T> {
        let item = self.root.pop(class)?;
        self.n_items[class as usize] -= 1;
        Some(item)
    }

    /// By how much the user whose item of this class comes next is ahead of the user furthest behind.
    pub(crate) fn lead(&self, class: Class) -> u64 {
        self.root.order[class as usize].first().map_or(0, |&(vtime, _)| vtime - self.root.now())
    }

    /// Charges an owner for work.
    pub(crate) fn charge(&mut self, owner: &Owner, cost: u64) {
        self.root.charge(path(owner), cost);
    }

    pub(crate) fn len(&self, class: Class) -> usize {
        self.n_items[class as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::Class::{Decode, Prompt};
    use super::*;
    use crate::account::{Account, Budget};

    fn owner(actor: u32, session: u64, guest: u64) -> Owner {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        Owner { actor: ActorId(actor), session: SessionId(session), guest: GuestId(guest), account }
    }

    /// Serves `n` items, each put back at once, and counts the tokens that each owner got.
    fn serve(owners: &[(Owner, usize)], n: usize) -> Vec<usize> {
        let mut queue = FairQueue::default();
        for (idx, (owner, _)) in owners.iter().enumerate() {
            queue.push(owner, Decode, idx);
        }
        let mut served = vec![0; owners.len()];
        for _ in 0..n {
            let idx = queue.pop(Decode).expect("everybody is put back");
            let (owner, cost) = &owners[idx];
            served[idx] += cost;
            queue.charge(owner, *cost as u64);
            queue.push(owner, Decode, idx);
        }
        served
    }

    #[test]
    fn users_get_equal_shares_whatever_they_run() {
        // One user with one guest, one with three guests in two sessions; items of unlike cost.
        let owners = [(owner(1, 1, 1), 100), (owner(2, 2, 2), 7), (owner(2, 2, 3), 30), (owner(2, 3, 4), 1)];
        let served = serve(&owners, 20_000);
        let (one, other) = (served[0] as f64, (served[1] + served[2] + served[3]) as f64);
        assert!((one / other - 1.0).abs() < 0.05, "users: {one} and {other}");
        let (session_a, session_b) = ((served[1] + served[2]) as f64, served[3] as f64);
        assert!((session_a / session_b - 1.0).abs() < 0.05, "sessions: {session_a} and {session_b}");
        let (guest_a, guest_b) = (served[1] as f64, served[2] as f64);
        assert!((guest_a / guest_b - 1.0).abs() < 0.05, "guests: {guest_a} and {guest_b}");
    }

    #[test]
    fn idleness_earns_no_credit() {
        let (busy, late) = (owner(1, 1, 1), owner(2, 2, 2));
        let mut queue = FairQueue::default();
        for _ in 0..1000 {
            queue.push(&busy, Decode, "busy");
            assert_eq!(queue.pop(Decode), Some("busy"));
            queue.charge(&busy, 16);
        }
        queue.push(&busy, Decode, "busy");
        let mut n_late_in_a_row = 0;
        queue.push(&late, Decode, "late");
        while queue.pop(Decode) == Some("late") {
            queue.charge(&late, 16);
            queue.push(&late, Decode, "late");
            n_late_in_a_row += 1;
        }
        assert!(n_late_in_a_row <= 2, "{n_late_in_a_row} turns before the busy user's");
    }

    #[test]
    fn nothing_is_lost() {
        let owners = [owner(1, 1, 1), owner(1, 2, 2), owner(2, 3, 3)];
        let mut queue = FairQueue::default();
        for idx in 0..300 {
            queue.push(&owners[idx % 3], if idx % 2 == 0 { Decode } else { Prompt }, idx);
        }
        let mut seen: Vec<usize> = std::iter::from_fn(|| {
            let idx = queue.pop(Decode).or_else(|| queue.pop(Prompt))?;
            queue.charge(&owners[idx % 3], idx as u64);
            Some(idx)
        })
        .collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..300).collect::<Vec<_>>());
        assert_eq!((queue.len(Decode), queue.len(Prompt)), (0, 0));
    }

    #[test]
    fn what_was_charged_is_not_forgotten_by_a_pause() {
        let (heavy, light) = (owner(1, 1, 1), owner(2, 2, 2));
        let mut queue = FairQueue::default();
        queue.push(&heavy, Prompt, "heavy");
        queue.push(&light, Prompt, "light");
        assert_eq!(queue.pop(Prompt), Some("heavy"));
        queue.charge(&heavy, 1000);
        // The heavy user pauses while the light one still waits, and comes back.
        for _ in 0..10 {
            queue.push(&heavy, Decode, "heavy");
            assert_eq!(queue.lead(Decode), 1000);
            queue.push(&light, Prompt, "light");
            assert_eq!(queue.pop(Prompt), Some("light"));
            queue.charge(&light, 10);
            assert_eq!(queue.pop(Decode), Some("heavy"));
            queue.charge(&heavy, 10);
        }
    }

    #[test]
    fn both_classes_draw_on_one_time() {
        let (a, b) = (owner(1, 1, 1), owner(2, 2, 2));
        let mut queue = FairQueue::default();
        queue.push(&a, Prompt, "prompt of a");
        queue.push(&a, Decode, "token of a");
        queue.push(&b, Decode, "token of b");
        assert_eq!(queue.pop(Prompt), Some("prompt of a"));
        queue.charge(&a, 5);
        assert_eq!(queue.pop(Decode), Some("token of b"));
        assert_eq!(queue.pop(Decode), Some("token of a"));
    }
}
