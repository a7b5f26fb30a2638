//! Deficit round robin over users, then their sessions, then their guests.
//!
//! M. Shreedhar and G. Varghese, "Efficient Fair Queueing using Deficit Round Robin" (1995), with the cost
//! charged after the service, since it is known only then: who has a debt is passed over until its quanta
//! have paid it.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use crate::account::{ActorId, GuestId, Owner, SessionId};

/// Items waiting to be served, in the order that is fair to their owners.
#[derive(Debug)]
pub(crate) struct FairQueue<T> {
    root: Ring<ActorId, Ring<SessionId, Ring<GuestId, Leaf<T>>>>,
    quantum: i64,
    n_items: usize,
}

#[derive(Debug)]
struct Leaf<T>(VecDeque<T>);

impl<T> Default for Leaf<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

/// Children with something to serve take turns; each turn adds a quantum to the child's credit.
#[derive(Debug)]
struct Ring<K, C> {
    turns: VecDeque<K>,
    children: HashMap<K, Child<C>>,
}

#[derive(Debug)]
struct Child<C> {
    credit: i64,
    node: C,
}

impl<K, C> Default for Ring<K, C> {
    fn default() -> Self {
        Self { turns: VecDeque::new(), children: HashMap::new() }
    }
}

trait Node<T> {
    type Path: Copy;
    fn push(&mut self, path: Self::Path, item: T);
    fn pop(&mut self, quantum: i64) -> Option<T>;
    fn charge(&mut self, path: Self::Path, cost: i64);
}

impl<T> Node<T> for Leaf<T> {
    type Path = ();

    fn push(&mut self, (): (), item: T) {
        self.0.push_back(item);
    }

    fn pop(&mut self, _quantum: i64) -> Option<T> {
        self.0.pop_front()
    }

    fn charge(&mut self, (): (), _cost: i64) {}
}

impl<T, K: Copy + Eq + Hash, C: Node<T> + Default> Node<T> for Ring<K, C> {
    type Path = (K, C::Path);

    fn push(&mut self, (key, rest): Self::Path, item: T) {
        let child = self.children.entry(key).or_insert_with(|| {
            self.turns.push_back(key);
            Child { credit: 0, node: C::default() }
        });
        child.node.push(rest, item);
    }

    fn pop(&mut self, quantum: i64) -> Option<T> {
        // Whole rounds in which everybody is in debt are skipped in one go.
        let best = self.turns.iter().map(|key| self.children[key].credit).max()?;
        let n_rounds_skipped = if best <= 0 { -best / quantum } else { 0 };
        for child in self.children.values_mut() {
            child.credit += n_rounds_skipped * quantum;
        }
        while let Some(&key) = self.turns.front() {
            let child = self.children.get_mut(&key).expect("every turn has its child");
            if child.credit <= 0 {
                child.credit += quantum;
                self.turns.rotate_left(1);
                continue;
            }
            match child.node.pop(quantum) {
                Some(item) => return Some(item),
                None => {
                    // Who has nothing to ask for keeps neither turn nor credit.
                    self.children.remove(&key);
                    self.turns.pop_front();
                }
            }
        }
        None
    }

    fn charge(&mut self, (key, rest): Self::Path, cost: i64) {
        if let Some(child) = self.children.get_mut(&key) {
            child.credit -= cost;
            child.node.charge(rest, cost);
        }
    }
}

fn path(owner: &Owner) -> (ActorId, (SessionId, (GuestId, ()))) {
    (owner.actor, (owner.session, (owner.guest, ())))
}

impl<T> FairQueue<T> {
    /// An empty queue. `quantum` is the work, in tokens, that one turn is worth.
    pub(crate) fn new(quantum: usize) -> Self {
        Self { root: Ring::default(), quantum: quantum.max(1) as i64, n_items: 0 }
    }

    pub(crate) fn push(&mut self, owner: &Owner, item: T) {
        self.n_items += 1;
        self.root.push(path(owner), item);
    }

    /// The next item in the fair order; [`Self::charge`] says afterwards what it cost.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let item = self.root.pop(self.quantum)?;
        self.n_items -= 1;
        Some(item)
    }

    /// Charges an owner for tokens computed.
    pub(crate) fn charge(&mut self, owner: &Owner, n_tokens: usize) {
        self.root.charge(path(owner), n_tokens as i64);
    }

    pub(crate) fn len(&self) -> usize {
        self.n_items
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::{Account, Budget};

    fn owner(actor: u32, session: u64, guest: u64) -> Owner {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        Owner { actor: ActorId(actor), session: SessionId(session), guest: GuestId(guest), account }
    }

    /// Serves `n` items, each put back at once, and counts the tokens that each owner got.
    fn serve(owners: &[(Owner, usize)], n: usize) -> Vec<usize> {
        let mut queue = FairQueue::new(16);
        for (idx, (owner, _)) in owners.iter().enumerate() {
            queue.push(owner, idx);
        }
        let mut served = vec![0; owners.len()];
        for _ in 0..n {
            let idx = queue.pop().expect("everybody is put back");
            let (owner, cost) = &owners[idx];
            served[idx] += cost;
            queue.charge(owner, *cost);
            queue.push(owner, idx);
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
        let mut queue = FairQueue::new(16);
        for _ in 0..1000 {
            queue.push(&busy, "busy");
            assert_eq!(queue.pop(), Some("busy"));
            queue.charge(&busy, 16);
        }
        queue.push(&busy, "busy");
        let mut n_late_in_a_row = 0;
        queue.push(&late, "late");
        while queue.pop() == Some("late") {
            queue.charge(&late, 16);
            queue.push(&late, "late");
            n_late_in_a_row += 1;
        }
        assert!(n_late_in_a_row <= 2, "{n_late_in_a_row} turns before the busy user's");
    }

    #[test]
    fn nothing_is_lost() {
        let owners = [owner(1, 1, 1), owner(1, 2, 2), owner(2, 3, 3)];
        let mut queue = FairQueue::new(4);
        for idx in 0..300 {
            queue.push(&owners[idx % 3], idx);
        }
        let mut seen: Vec<usize> = std::iter::from_fn(|| {
            let idx = queue.pop()?;
            queue.charge(&owners[idx % 3], idx);
            Some(idx)
        })
        .collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..300).collect::<Vec<_>>());
        assert_eq!(queue.len(), 0);
    }
}
