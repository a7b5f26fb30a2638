//! Contexts and saved contexts that wait for nothing and hold pages of the device, whoever was served longest ago first.
//!
//! While somebody stands in line it is asked at each step who could make room; there may be thousands who wait for
//! nothing. So their order is kept. Whatever changes about a context is only noted, once, and looked at when the order is
//! read: as long as nobody reads it, it costs nothing. Those that are found to have nothing on the device are put aside
//! until they change, or until a page that several hold comes back.

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;

use super::room::Victim;
use super::{ContextState, SavedKey, Scheduler};
use crate::command::ContextId;
use crate::kv::Sequence;

/// Where the order has a context.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Listing {
    /// The device's step under which it stands in the order.
    at: Option<u64>,
    /// Whether it may have to stand elsewhere.
    is_changed: bool,
}

/// Who waits for nothing.
#[derive(Debug, Default)]
pub(super) struct Idle {
    /// By the device's steps in which they were served last.
    order: BTreeSet<(u64, Victim)>,
    changed: FxHashSet<Victim>,
    /// Those that have nothing on the device.
    aside: FxHashSet<Victim>,
}

impl Idle {
    /// A context is queued or taken from the queue, admitted or not any more, in line, served, or new.
    pub(super) fn note_changed(&mut self, id: ContextId, listing: &mut Listing) {
        if !std::mem::replace(&mut listing.is_changed, true) {
            self.changed.insert(Victim::Context(id));
        }
    }

    /// As above, of a saved context.
    pub(super) fn note_saved(&mut self, key: &SavedKey, listing: &mut Listing) {
        if !std::mem::replace(&mut listing.is_changed, true) {
            self.changed.insert(Victim::Saved(key.clone()));
        }
    }

    /// A page that several hold is on the device again.
    pub(super) fn note_shared_is_back(&mut self) {
        self.changed.extend(self.aside.drain());
    }

    /// A context is gone.
    pub(super) fn forget(&mut self, victim: Victim, listing: Listing) {
        self.changed.remove(&victim);
        self.aside.remove(&victim);
        if let Some(at) = listing.at {
            self.order.remove(&(at, victim));
        }
    }
}

impl Scheduler {
    /// Marks what contexts that wait for nothing hold on the device, the longest idle first, until that is `n_pages` that no
    /// marking had reached; returns how many it was, and the step in which the last of them was served.
    pub(super) fn mark_idle(&mut self, n_pages: usize, marking: u64) -> (usize, Option<u64>) {
        self.put_idle_in_order();
        let order = std::mem::take(&mut self.idle.order);
        let (mut n_found, mut last) = (0, None);
        let mut without: Vec<(u64, Victim)> = Vec::new();
        for (step, victim) in &order {
            if !self.has_pages(victim) {
                without.push((*step, victim.clone()));
                continue;
            }
            n_found += self.mark_held(victim, marking);
            last = Some(*step);
            if n_found >= n_pages {
                break;
            }
        }
        self.idle.order = order;
        for place in without {
            self.idle.order.remove(&place);
            if let Some(listing) = self.listing(&place.1) {
                listing.at = None;
            }
            self.idle.aside.insert(place.1);
        }
        (n_found, last)
    }

    fn put_idle_in_order(&mut self) {
        let mut changed = std::mem::take(&mut self.idle.changed);
        for victim in changed.drain() {
            let is_idle = match &victim {
                Victim::Context(id) => self.contexts.get(id).is_some_and(|context| context.is_idle()),
                Victim::Saved(_) => true,
            };
            let last_step = match &victim {
                Victim::Context(id) => self.contexts.get(id).map(|context| context.last_step),
                Victim::Saved(key) => self.saved.get(key).map(|saved| saved.last_step),
            };
            let at = last_step.filter(|_| is_idle);
            let Some(listing) = self.listing(&victim) else { continue };
            let before = std::mem::replace(listing, Listing { at, is_changed: false }).at;
            if let Some(before) = before {
                self.idle.order.remove(&(before, victim.clone()));
            }
            self.idle.aside.remove(&victim);
            if let Some(at) = at {
                self.idle.order.insert((at, victim));
            }
        }
        self.idle.changed = changed;
    }

    fn listing(&mut self, victim: &Victim) -> Option<&mut Listing> {
        match victim {
            Victim::Context(id) => self.contexts.get_mut(id).map(|context| &mut context.listing),
            Victim::Saved(key) => self.saved.get_mut(key).map(|saved| &mut saved.listing),
        }
    }

    /// Whether a victim holds anything on the device.
    fn has_pages(&self, victim: &Victim) -> bool {
        let kv = match victim {
            Victim::Context(id) => self.contexts.get(id).map(|context| &context.kv),
            Victim::Saved(key) => self.saved.get(key).map(|saved| &saved.kv),
        };
        let blocks = kv.map(Sequence::blocks).unwrap_or_default();
        blocks.iter().any(|&block| self.pages.page(block).is_some())
    }

    /// That everybody who waits for nothing and holds something on the device stands in the order, or is known to have
    /// changed; and nobody else does.
    #[cfg(test)]
    pub(super) fn check_idle(&self) {
        let Idle { order, changed, .. } = &self.idle;
        let listed =
            |step, victim: &Victim| order.contains(&(step, victim.clone())) || changed.contains(victim);
        for (step, victim) in self.idle_victims() {
            assert!(!self.has_pages(&victim) || listed(step, &victim), "{victim:?} is left out");
        }
        for (_, victim) in order.iter().filter(|(_, victim)| !changed.contains(victim)) {
            let is_idle = match victim {
                Victim::Context(id) => self.contexts[id].is_idle(),
                Victim::Saved(key) => self.saved.contains_key(key),
            };
            assert!(is_idle, "{victim:?} waits for something");
        }
        let gone = changed.iter().filter(|victim| match victim {
            Victim::Context(id) => !self.contexts.contains_key(id),
            Victim::Saved(key) => !self.saved.contains_key(key),
        });
        assert_eq!(gone.count(), 0, "who is gone is forgotten");
    }
}

impl ContextState {
    fn is_idle(&self) -> bool {
        !self.is_queued && !self.is_admitted() && !self.is_in_line()
    }
}
