//! Contexts and saved contexts that may lose pages without asking for them again at once: those that wait for nothing, and
//! those in the queue with pages that they were not admitted for. Those of users of the lowest rank come first; of one rank
//! those that wait for nothing, and of these those whose user has come furthest in virtual time, then session, then guest, by
//! whole seconds of the device; among such as have come as far, the one that was served longest ago: a moment's lead does
//! not undo what was used last.
//!
//! While contexts stand in line, each step asks which others could make room; there may be thousands that wait for
//! nothing. So their order is kept. What changes about a context is only noted, once, and looked at when the order is
//! read, as is how far guests have come: as long as it is not read, it costs nothing. Those that are found to have nothing
//! on the device are put aside until they change, or until a page that several hold comes back.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Bound;

use rustc_hash::{FxHashMap, FxHashSet};

use super::room::Victim;
use super::{ContextState, SavedKey, Scheduler};
use crate::account::{ActorId, GuestId, Owner, SessionId};
use crate::command::ContextId;
use crate::fair::FairQueue;
use crate::kv::Sequence;

/// State of a context whose pages may be taken. Those that wait for nothing lose theirs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Does {
    Nothing,
    Queues,
}

/// A place in the order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Holder {
    /// Of its user: pages of a higher rank go when there are none of a lower.
    pub(super) rank: u8,
    pub(super) does: Does,
    pub(super) come: Reverse<Come>,
    /// The device's step when it was served last.
    pub(super) last_step: u64,
    pub(super) victim: Victim,
}

/// How far a user, its session and its guest have come, in whole seconds of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Come([u64; 3]);

/// Nanoseconds of virtual time within which owners count as having come equally far.
const COME_NS: u64 = 1_000_000_000;

impl Holder {
    /// A place before all of the next rank, where none stands; none if there is no such rank.
    pub(super) fn end_of_rank(&self) -> Option<Self> {
        let (rank, come) = (self.rank.checked_add(1)?, Reverse(Come([u64::MAX; 3])));
        Some(Self { rank, does: Does::Nothing, come, last_step: 0, ..self.clone() })
    }
}

/// A guest, in its session, of its user.
type GuestName = (ActorId, SessionId, GuestId);

/// What a guest holds freely, and how far it had come when the order was read last.
#[derive(Debug, Default)]
struct OfGuest {
    come: Come,
    victims: BTreeSet<Victim>,
}

/// What the order knows of a context.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Listing {
    at: Option<(u8, Does, Come, u64)>,
    /// Whether it may have to stand elsewhere.
    is_changed: bool,
}

/// The contexts whose pages may be taken.
#[derive(Debug, Default)]
pub(super) struct Holders {
    order: BTreeSet<Holder>,
    /// Those that have nothing on the device.
    aside: BTreeSet<Holder>,
    /// Whose they are.
    guests: FxHashMap<GuestName, OfGuest>,
    changed: FxHashSet<Victim>,
}

impl Holders {
    /// A context is queued or taken from the queue, admitted or not any more, in line, served, or new.
    pub(super) fn note_changed(&mut self, id: ContextId, listing: &mut Listing) {
        if !std::mem::replace(&mut listing.is_changed, true) {
            self.changed.insert(Victim::Context(id));
        }
    }

    /// A saved context is new, or was opened.
    pub(super) fn note_saved(&mut self, key: &SavedKey, listing: &mut Listing) {
        if !std::mem::replace(&mut listing.is_changed, true) {
            self.changed.insert(Victim::Saved(key.clone()));
        }
    }

    /// Pages that several hold are on the device again.
    pub(super) fn note_shared_are_back(&mut self) {
        self.order.append(&mut self.aside);
    }

    /// A context is gone.
    pub(super) fn forget(&mut self, victim: Victim, owner: &Owner, listing: Listing) {
        self.changed.remove(&victim);
        self.remove(listing, name_of(owner), victim);
    }

    fn insert(
        &mut self,
        (rank, does, come, last_step): (u8, Does, Come, u64),
        name: GuestName,
        victim: Victim,
    ) {
        let guest = self.guests.entry(name).or_default();
        guest.come = come;
        guest.victims.insert(victim.clone());
        self.order.insert(Holder { rank, does, come: Reverse(come), last_step, victim });
    }

    fn remove(&mut self, listing: Listing, name: GuestName, victim: Victim) {
        let Some((rank, does, come, last_step)) = listing.at else { return };
        if let Some(guest) = self.guests.get_mut(&name) {
            guest.victims.remove(&victim);
            if guest.victims.is_empty() {
                self.guests.remove(&name);
            }
        }
        let holder = Holder { rank, does, come: Reverse(come), last_step, victim };
        let _ = self.order.remove(&holder) || self.aside.remove(&holder);
    }

    /// All of them, those that lose what they have first at the beginning.
    pub(super) fn in_order(&self) -> Vec<Victim> {
        let mut all: Vec<&Holder> = self.order.iter().chain(&self.aside).collect();
        all.sort_unstable();
        all.into_iter().map(|holder| holder.victim.clone()).collect()
    }

    /// The one in the order that follows.
    fn next(&self, after: Option<&Holder>) -> Option<&Holder> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.order.range((from, Bound::Unbounded)).next()
    }
}

impl Scheduler {
    /// Brings the order up to date.
    pub(super) fn put_holders_in_order(&mut self) {
        let mut changed = std::mem::take(&mut self.holders.changed);
        for (&name, guest) in &self.holders.guests {
            if guest.come != come(&self.commons.queue, name) {
                changed.extend(guest.victims.iter().cloned());
            }
        }
        changed.retain(|victim| {
            let (does, last_step) = match victim {
                Victim::Context(id) => match self.contexts.get(id) {
                    Some(context) => (context.does(), context.last_step),
                    // One that is being looked at.
                    None => return true,
                },
                Victim::Saved(key) => (Some(Does::Nothing), self.saved[key].last_step),
            };
            let owner = self.owner_of(victim).expect("who is gone is forgotten");
            let (name, rank) = (name_of(owner), owner.account.priority().rank);
            let at = does.map(|does| (rank, does, come(&self.commons.queue, name), last_step));
            let listing = self.listing(victim).expect("who is gone is forgotten");
            let before = std::mem::replace(listing, Listing { at, is_changed: false });
            self.holders.remove(before, name, victim.clone());
            if let Some(at) = at {
                self.holders.insert(at, name, victim.clone());
            }
            false
        });
        self.holders.changed = changed;
    }

    /// The next in the order that has anything on the device.
    pub(super) fn next_holder(&mut self, after: Option<&Holder>) -> Option<Holder> {
        loop {
            let holder = self.holders.next(after)?.clone();
            if self.kv_of(&holder.victim).is_some_and(|kv| self.has_pages(kv)) {
                return Some(holder);
            }
            self.holders.order.remove(&holder);
            self.holders.aside.insert(holder);
        }
    }

    /// The next of those that hold something and have nothing of it on the device, as far as they may be asked.
    pub(super) fn next_aside(
        &mut self,
        after: Option<&Holder>,
        may_be_asked: impl Fn(&Holder) -> bool,
    ) -> Option<Holder> {
        let mut after = after.cloned();
        loop {
            let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
            let holder = self.holders.aside.range((from, Bound::Unbounded)).next()?;
            if !may_be_asked(holder) {
                return None;
            }
            let holder = holder.clone();
            let holds_any = self.kv_of(&holder.victim).map(|kv| !kv.blocks().is_empty());
            match (holds_any, self.listing(&holder.victim)) {
                (Some(true), _) => return Some(holder),
                // It has given up all.
                (_, Some(listing)) => {
                    let before = std::mem::take(listing);
                    *listing = Listing { at: None, ..before };
                    let name = self.owner_of(&holder.victim).map(name_of).expect("it is there");
                    self.holders.remove(before, name, holder.victim);
                }
                // It is the one that room is made for.
                _ => after = Some(holder),
            }
        }
    }

    pub(super) fn kv_of(&self, victim: &Victim) -> Option<&Sequence> {
        match victim {
            Victim::Context(id) => self.contexts.get(id).map(|context| &context.kv),
            Victim::Saved(key) => self.saved.get(key).map(|saved| &saved.kv),
        }
    }

    fn owner_of(&self, victim: &Victim) -> Option<&Owner> {
        match victim {
            Victim::Context(id) => self.contexts.get(id).map(|context| &context.owner),
            Victim::Saved(key) => self.saved.get(key).map(|saved| &saved.owner),
        }
    }

    fn listing(&mut self, victim: &Victim) -> Option<&mut Listing> {
        match victim {
            Victim::Context(id) => self.contexts.get_mut(id).map(|context| &mut context.listing),
            Victim::Saved(key) => self.saved.get_mut(key).map(|saved| &mut saved.listing),
        }
    }

    fn has_pages(&self, kv: &Sequence) -> bool {
        kv.blocks().iter().any(|&block| self.pages.page(block).is_some())
    }

    /// How many are looked at for pages.
    #[cfg(test)]
    pub(crate) fn n_holders(&self) -> usize {
        self.holders.order.len() + self.holders.changed.len()
    }

    /// That the order holds just the contexts whose pages may be taken, each in its place or known to have changed.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn check_holders(&self) {
        let Holders { order, aside, guests, changed } = &self.holders;
        let contexts = self.contexts.iter().map(|(&id, context)| {
            let at = context.does().map(|does| (does, context.last_step));
            (Victim::Context(id), at, &context.kv, context.listing)
        });
        let saved = self.saved.iter().map(|(key, saved)| {
            let at = Some((Does::Nothing, saved.last_step));
            (Victim::Saved(key.clone()), at, &saved.kv, saved.listing)
        });
        let mut n_listed = 0;
        for (victim, at, kv, listing) in contexts.chain(saved) {
            let of_listing = listing.at.map(|(rank, does, come, last_step)| {
                let victim = victim.clone();
                Holder { rank, does, come: Reverse(come), last_step, victim }
            });
            let guest = guests.get(&name_of(self.owner_of(&victim).expect("it is there")));
            let is_of_guest = guest.is_some_and(|guest| guest.victims.contains(&victim));
            assert_eq!(is_of_guest, listing.at.is_some(), "{victim:?}");
            let is_in =
                |set: &BTreeSet<Holder>| of_listing.as_ref().is_some_and(|holder| set.contains(holder));
            n_listed += usize::from(listing.at.is_some());
            assert_eq!(listing.at.is_some(), is_in(order) != is_in(aside), "{victim:?} has one place");
            assert_eq!(listing.is_changed, changed.contains(&victim), "{victim:?}");
            if listing.is_changed {
                continue;
            }
            let listed_at = listing.at.map(|(_, does, _, last_step)| (does, last_step));
            assert!(listed_at == at || listing.at.is_none() && kv.blocks().is_empty(), "{victim:?}: {at:?}");
            assert!(at.is_none() || !self.has_pages(kv) || is_in(order), "{victim:?} has pages");
        }
        assert_eq!(n_listed, order.len() + aside.len(), "who is gone is forgotten");
    }
}

fn name_of(owner: &Owner) -> GuestName {
    (owner.actor, owner.session, owner.guest)
}

fn come(queue: &FairQueue<ContextId>, (actor, session, guest): GuestName) -> Come {
    Come(queue.vtimes([u64::from(actor.0), session.0, guest.0]).map(|vtime| vtime / COME_NS))
}

impl ContextState {
    /// What it does, if nothing that it was admitted for, or stands in line with.
    fn does(&self) -> Option<Does> {
        match self.is_queued {
            _ if self.is_admitted() || self.is_in_line() => None,
            true => Some(Does::Queues),
            false => Some(Does::Nothing),
        }
    }
}
