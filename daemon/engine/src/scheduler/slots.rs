//! Slots of contexts on the device, and which contexts have one of those for which it keeps hidden states.
//!
//! There are fewer of these than there may be contexts. A context that is asked and has none takes that of one that has
//! waited for nothing for some steps, which computes a row more when it is asked again. Which one, the clock algorithm says:
//! a hand goes round, a few slots for each state that is wanted, and of the contexts that it passes the one that was served
//! longest ago gives its state up.

use super::{ContextState, Scheduler};
use crate::batch::SlotId;
use crate::command::ContextId;
use crate::job::Work;

/// Steps of the device for which a context keeps a state at least, once it waits for nothing.
pub(super) const N_STEPS_KEPT: u64 = 32;

/// Slots that are looked at for a context that wants a state.
const N_LOOKED_AT: usize = 8;

#[derive(Debug)]
pub(super) struct Slots {
    /// The first so many keep states.
    n_states: usize,
    n_slots: u32,
    /// Whose the slots with states are, as far as they were ever taken.
    holders: Vec<Option<ContextId>>,
    /// Those without a context, with states and without.
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
        let mut idlest: Option<(u64, SlotId, ContextId)> = None;
        for _ in 0..N_LOOKED_AT.min(self.slots.holders.len()) {
            let Some((slot, holder)) = self.slots.look() else { continue };
            let idle = self.contexts.get(&holder).filter(|holder| holder.is_idle_since(longest_ago));
            if let Some(idle) = idle {
                let found = (idle.last_step, slot, holder);
                idlest = Some(idlest.map_or(found, |idlest| idlest.min(found)));
            }
        }
        let Some((_, slot, holder)) = idlest else { return };
        let holder = self.contexts.get_mut(&holder).expect("it was looked at");
        holder.slot = std::mem::replace(&mut context.slot, slot);
        holder.kv.set_state(None);
        holder.kv.forget_told();
        context.kv.forget_told();
        self.slots.holders[slot.0 as usize] = Some(id);
    }
}

impl ContextState {
    /// Whether it was served last before this step and waits for nothing: neither asked, nor a run that could go on. A run
    /// whose guest does not pull is as far ahead as it may be.
    fn is_idle_since(&self, step: u64) -> bool {
        let waits = self.is_queued || self.is_in_line() || self.under_way.is_some();
        let is_asked = self.work.as_ref().is_some_and(Work::is_question);
        !waits && !is_asked && self.last_step < step
    }
}
