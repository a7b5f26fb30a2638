//! Slots of contexts on the device, and who has one of those for which it keeps hidden states.
//!
//! There are fewer of these than there may be contexts. One that is asked and has none takes that of a context that has
//! waited for nothing for some steps, which computes a row more when it is asked again. Who that is a hand tells that goes
//! round, a few places for each who wants one: whoever comes back sooner than the hand keeps what it has.

use super::{ContextState, Scheduler};
use crate::batch::SlotId;
use crate::command::ContextId;

/// Steps of the device for which a context keeps a state at least, once it waits for nothing.
pub(super) const N_STEPS_KEPT: u64 = 32;

/// Slots that are looked at for one who wants a state.
const N_LOOKED_AT: usize = 8;

#[derive(Debug)]
pub(super) struct Slots {
    /// The first so many keep states.
    n_states: usize,
    n_slots: u32,
    /// Whose the slots with states are, as far as they were ever taken.
    holders: Vec<Option<ContextId>>,
    /// Those that nobody has, with states and without.
    free: [Vec<SlotId>; 2],
    hand: usize,
}

impl Slots {
    pub(super) fn new(n_states: usize) -> Self {
        Self { n_states, n_slots: 0, holders: Vec::new(), free: [Vec::new(), Vec::new()], hand: 0 }
    }

    pub(super) fn keeps_state(&self, slot: SlotId) -> bool {
        (slot.0 as usize) < self.n_states
    }

    /// A slot for a context: one with a state, if there is any.
    pub(super) fn take(&mut self, id: ContextId) -> SlotId {
        let [kept, others] = &mut self.free;
        let slot = match kept.pop() {
            Some(slot) => slot,
            None if (self.n_slots as usize) < self.n_states => self.add(),
            None => others.pop().unwrap_or_else(|| self.add()),
        };
        if self.keeps_state(slot) {
            self.holders[slot.0 as usize] = Some(id);
        }
        slot
    }

    fn add(&mut self) -> SlotId {
        let slot = SlotId(self.n_slots);
        self.n_slots += 1;
        if self.keeps_state(slot) {
            self.holders.push(None);
        }
        slot
    }

    pub(super) fn give(&mut self, slot: SlotId) {
        let keeps_state = self.keeps_state(slot);
        if keeps_state {
            self.holders[slot.0 as usize] = None;
        }
        self.free[usize::from(!keeps_state)].push(slot);
    }

    /// The next slot with a state, and whose it is.
    fn look(&mut self) -> Option<(SlotId, ContextId)> {
        self.hand = (self.hand + 1) % self.holders.len().max(1);
        let holder = *self.holders.get(self.hand)?;
        Some((SlotId(self.hand as u32), holder?))
    }
}

impl Scheduler {
    /// Sees to it that the device keeps the state of a context that is about to have its only row, if that is possible.
    pub(super) fn lend_state(&mut self, id: ContextId, context: &mut ContextState) {
        if self.slots.keeps_state(context.slot) {
            return;
        }
        if let Some(slot) = self.slots.free[0].pop() {
            self.slots.give(std::mem::replace(&mut context.slot, slot));
            self.slots.holders[slot.0 as usize] = Some(id);
            return context.kv.forget_told();
        }
        let longest_ago = self.commons.step.saturating_sub(N_STEPS_KEPT);
        for _ in 0..N_LOOKED_AT.min(self.slots.holders.len()) {
            let Some((slot, holder)) = self.slots.look() else { continue };
            let is_idle =
                |holder: &&mut Box<ContextState>| holder.work.is_none() && holder.last_step < longest_ago;
            let Some(holder) = self.contexts.get_mut(&holder).filter(is_idle) else { continue };
            holder.slot = std::mem::replace(&mut context.slot, slot);
            holder.kv.set_state(None);
            holder.kv.forget_told();
            context.kv.forget_told();
            self.slots.holders[slot.0 as usize] = Some(id);
            return;
        }
    }
}
