//! Answers that wait for a step.
//!
//! Where the engine's thread computes steps itself, guests that run meanwhile take processor time and memory bandwidth from
//! it. So while it computes a step that is kept for one user ([`Plan::kept_for`]), one guest of each other user has its answer,
//! and the answers to the rest, who could do nothing more with the device before the end of that step, wait for it. They wait
//! for one step, however many follow. Tokens of runs, which guests take when they like, do not wait.
//!
//! Which step comes next is foreseen ([`Core::next_kept_for`]) and may turn out otherwise: then they are given after it.

use std::time::Instant;

use rustc_hash::FxHashMap;

use super::{Core, Next};
use crate::account::ActorId;
use crate::backend::OldestStep;
use crate::completion::{CallerId, Completion, Done};
use crate::error::EngineFailure;
use crate::scheduler::Plan;

/// What is held back, and beside which step.
#[derive(Debug, Default)]
pub(super) struct Held {
    answers: Vec<Completion>,
    /// The user for whose step they wait.
    beside: Option<ActorId>,
    /// The guest of each other user that has its answer.
    answered: FxHashMap<ActorId, CallerId>,
    /// Whether they have waited for a step.
    have_waited: bool,
    /// Whether the engine's thread computed the last step.
    is_by_caller: bool,
    /// The user for which that was kept.
    kept_for: Option<ActorId>,
    /// Memory for what is given back.
    given: Vec<Completion>,
}

impl Held {
    /// A step is about to be collected.
    pub(super) fn note_step(&mut self, plan: &Plan, oldest: OldestStep) {
        (self.kept_for, self.is_by_caller) = (plan.kept_for(), oldest == OldestStep::ByCaller);
        self.have_waited = true;
    }
}

impl Core {
    /// Keeps the answers of a turn that have to wait, and gives back those that have waited enough.
    pub(super) fn hold_back(
        &mut self,
        next: &Result<Next, EngineFailure>,
        completions: &mut Vec<Completion>,
    ) {
        let user = match (self.under_way.front(), next) {
            (_, Err(_) | Ok(Next::Stop)) => None,
            // Guests of a model that goes hear of it before whoever had it go.
            _ if !self.departed.is_empty() || !self.held.is_by_caller => None,
            (Some((_, plan)), _) => plan.kept_for(),
            (None, Ok(Next::Turn)) => self.next_kept_for(),
            (None, _) => None,
        };
        let Self { held, commons, under_way, .. } = self;
        let Held { answers, beside, answered, have_waited, given, .. } = held;
        if std::mem::take(have_waited) || under_way.is_empty() || *beside != user {
            answered.clear();
            std::mem::swap(answers, given);
        }
        *beside = user;
        if let Some(user) = user {
            let waits = |completion: &mut Completion| match commons.user_of(completion.caller) {
                Some(other) if other != user && matches!(completion.done, Done::Answer(_)) => {
                    *answered.entry(other).or_insert(completion.caller) != completion.caller
                }
                _ => false,
            };
            answers.extend(completions.extract_if(.., waits));
        }
        if !given.is_empty() {
            given.append(completions);
            std::mem::swap(given, completions);
        }
    }

    /// The user for which the device does nothing else: its step has just been computed, it is about to ask for the next, or it
    /// has.
    pub(in crate::engine) fn favoured(&self, now: Instant) -> Option<ActorId> {
        match (self.under_way.front(), &self.collected) {
            (Some((_, plan)), Some(_)) if self.under_way.len() == 1 => plan.kept_for(),
            (Some(_), _) => None,
            (None, _) => {
                let user = self.held.kept_for.filter(|_| !self.linger.is_over(now));
                user.filter(|&user| self.commons.is_very_late(user)).or_else(|| self.next_kept_for())
            }
        }
    }
}
