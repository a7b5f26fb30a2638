//! Answers that wait for a step.
//!
//! Where the engine's thread computes steps itself, guests have the processors and the memory's time from it that they use
//! meanwhile. So while it computes a step that is kept for one user ([`Plan::kept_for`]), one guest of each other user is
//! answered, and the answers to the rest, which could do nothing more with the device before the end of that step, wait for
//! it. They wait for one step, however many follow.

use std::time::Instant;

use rustc_hash::FxHashMap;

use super::{Core, Next};
use crate::account::ActorId;
use crate::backend::OldestStep;
use crate::completion::{CallerId, Completion};
use crate::error::EngineFailure;
use crate::scheduler::Plan;

/// What is held back, and beside which step.
#[derive(Debug, Default)]
pub(super) struct Held {
    completions: Vec<Completion>,
    /// The guest of each other user that is answered.
    answered: FxHashMap<ActorId, CallerId>,
    /// Whether the engine's thread computed the last step.
    is_by_caller: bool,
    /// The user for which it was kept.
    kept_for: Option<ActorId>,
}

impl Held {
    /// A step is about to be collected.
    pub(super) fn note_step(&mut self, plan: &Plan, oldest: OldestStep) {
        (self.kept_for, self.is_by_caller) = (plan.kept_for(), oldest == OldestStep::ByCaller);
    }
}

impl Core {
    /// Keeps of what a turn brought what has to wait, and adds what has waited enough, in the order of each guest.
    pub(super) fn hold_back(
        &mut self,
        next: &Result<Next, EngineFailure>,
        completions: &mut Vec<Completion>,
    ) {
        let user = match (self.under_way.front(), next) {
            (_, Err(_) | Ok(Next::Stop)) => None,
            (Some((_, plan)), _) if self.held.is_by_caller => plan.kept_for(),
            (None, Ok(Next::Turn)) if self.held.is_by_caller => self.next_kept_for(),
            _ => None,
        };
        let Self { held: Held { completions: waiting, answered, .. }, commons, under_way, .. } = self;
        let mut ripe = Vec::new();
        if user.is_none() || under_way.is_empty() {
            answered.clear();
            std::mem::swap(waiting, &mut ripe);
        }
        if let Some(user) = user {
            let waits = |completion: &mut Completion| match commons.user_of(completion.caller) {
                Some(other) if other != user => {
                    *answered.entry(other).or_insert(completion.caller) != completion.caller
                }
                // The daemon itself asks, or whoever asked has gone.
                _ => false,
            };
            waiting.extend(completions.extract_if(.., waits));
        }
        if !ripe.is_empty() {
            ripe.append(completions);
            *completions = ripe;
        }
    }

    /// The user for which the device does nothing else: its step has just been computed, or it is about to ask for the next.
    pub(in crate::engine) fn favoured(&self, now: Instant) -> Option<ActorId> {
        match (self.under_way.front(), &self.collected) {
            (Some((_, plan)), Some(_)) if self.under_way.len() == 1 => plan.kept_for(),
            (Some(_), _) => None,
            (None, _) if !self.linger.is_over(now) => self.held.kept_for.or_else(|| self.next_kept_for()),
            (None, _) => self.next_kept_for(),
        }
    }
}
