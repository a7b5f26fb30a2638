//! An engine as a process of guests reaches it: the daemon's side.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::customs::{self, Customs};
use super::message::{Answered, Asked, Question};
use super::parts::Parts;
use super::{ModelFacts, Numbers};
use crate::account::{GuestId, Owner};
use crate::batch::Token;
use crate::command::{ModelId, Operation};
use crate::completion::CallerId;
use crate::handle::{EngineWatch, Link, Message, Room};
use crate::mailbox::Postbox;

/// Takes what engines give back to a process of guests. Called on the engines' threads, which it must not hold up.
pub trait Outward: std::fmt::Debug + Send + Sync {
    /// Puts an answer into the queue; returns the waker of whoever empties it.
    fn put(&self, answered: Answered) -> Waker;
}

/// What no guest of ours would have sent: the process that did is not to be trusted any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub(crate) String);

/// How long the thread that reads from a process sleeps while its engine has as many operations unread as a guest may have.
const FULL: Duration = Duration::from_micros(100);

/// Callers of a process at one engine, beside as many as its guests may have contexts. A guest has one, and for a moment another
/// while the one before it leaves.
const N_CALLERS_SPARE: usize = 1 << 14;

/// An engine, for the guests of one process.
#[derive(Debug)]
pub struct NearEngine {
    link: Arc<Link>,
    outward: Arc<dyn Outward>,
    owners: FxHashMap<CallerId, Owner>,
    numbers: Numbers,
    customs: Customs,
    models: FxHashMap<ModelId, customs::ModelFacts>,
    parts: Parts,
    n_contexts_max: u64,
}

/// What the daemon knows of the process.
pub trait Registry {
    /// On whose behalf a guest of it asks.
    fn owner_of(&self, guest: GuestId) -> Option<Owner>;

    /// The models of the engine that it was told of: the last one of each place, which may be gone as well.
    fn models(&self) -> Vec<ModelFacts>;

    /// Whether the process is gone, or is to go.
    fn is_over(&self) -> bool;
}

impl NearEngine {
    /// The engine that is watched, for the process with these ids, whose guests have so many contexts and so much host memory at
    /// most. A process whose guests charge what they have never comes to more.
    #[must_use]
    pub fn new(
        engine: &EngineWatch,
        numbers: Numbers,
        n_contexts_max: u64,
        host_bytes: u64,
        outward: Arc<dyn Outward>,
    ) -> Self {
        Self {
            link: engine.link().clone(),
            outward,
            owners: FxHashMap::default(),
            numbers,
            customs: Customs::new(numbers.range()),
            models: FxHashMap::default(),
            parts: Parts::new(host_bytes, n_contexts_max),
            n_contexts_max,
        }
    }

    /// Passes on what the process asks, in a frame of so many bytes. Waits while a guest has as many operations unread as it may,
    /// or its user as much in them.
    ///
    /// # Errors
    /// What none of our guests would ask.
    pub fn take(&mut self, asked: Asked, n_bytes: usize, registry: &impl Registry) -> Result<(), Violation> {
        match asked.0 {
            Question::Enter { caller, guest } => {
                let owner =
                    registry.owner_of(guest).ok_or_else(|| Violation(format!("no guest {}", guest.0)))?;
                if !self.numbers.range().contains(&caller.0) || self.customs.has(caller) {
                    return Err(Violation(format!("caller {} is not its to name", caller.0)));
                }
                let n_contexts_max = usize::try_from(self.n_contexts_max).unwrap_or(usize::MAX);
                let entered = self.customs.enter(caller, n_contexts_max.saturating_add(N_CALLERS_SPARE));
                entered.map_err(|violation| Violation(violation.to_string()))?;
                self.owners.insert(caller, owner.clone());
                let postbox = Postbox::Far(self.outward.clone());
                // As an operation: who has callers enter and leave without end waits for the engine as well.
                match self.wait_for_room(caller, &owner, 0, registry) {
                    Some(room) => {
                        drop(self.link.post_message_into(room, Message::Enter { caller, owner, postbox }));
                    }
                    None => self.forget(caller),
                }
            }
            Question::Leave { caller } if self.customs.has(caller) => self.leave(caller),
            Question::Leave { caller } => {
                return Err(Violation(format!("caller {} has not entered", caller.0)));
            }
            Question::Operation { caller, operation } => {
                self.pass_on(caller, operation, n_bytes, registry)?
            }
        }
        Ok(())
    }

    fn pass_on(
        &mut self,
        caller: CallerId,
        operation: Operation,
        n_bytes: usize,
        registry: &impl Registry,
    ) -> Result<(), Violation> {
        // What names no model, such as a row, is about the first.
        let model = operation.model();
        if !self.models.contains_key(&model) && !self.is_gone(model) {
            let facts = registry.models();
            self.models =
                facts.iter().map(|facts| (facts.id, customs::ModelFacts::of(&facts.limits))).collect();
            let Self { customs, models, .. } = self;
            customs.forget_numbers(|model| models.contains_key(&model));
        }
        let checked = match self.is_gone(model) {
            true => self.customs.check_gone(caller, operation),
            false => {
                let Self { customs, models, .. } = self;
                customs.check(caller, operation, |model| models.get(&model).cloned())
            }
        };
        let Some(mut operation) = checked.map_err(|violation| Violation(violation.to_string()))? else {
            return Ok(());
        };
        if self.customs.n_contexts() as u64 > self.n_contexts_max {
            return Err(Violation(format!("more than {} contexts", self.n_contexts_max)));
        }
        operation.sampler_mut().map_or(Ok(()), |sampler| self.parts.share(sampler))?;
        let Some(owner) = self.owners.get(&caller) else { return Ok(()) };
        // Whatever it is made of: texts, vectors and lists of samplers count as tokens do.
        let n_tokens = operation.n_tokens().max(n_bytes / size_of::<Token>());
        if let Some(room) = self.wait_for_room(caller, owner, n_tokens, registry) {
            // An engine that has ended says so by itself.
            drop(self.link.post_into(room, operation));
        }
        Ok(())
    }

    /// Whether a model is gone of which nothing is known any more, since another one has its place.
    fn is_gone(&self, model: ModelId) -> bool {
        self.models.keys().any(|known| known.replaces(model))
    }

    /// None where nobody is left who asks: what comes after it of the same user may take all room there is.
    fn wait_for_room(
        &self,
        caller: CallerId,
        owner: &Owner,
        n_tokens: usize,
        registry: &impl Registry,
    ) -> Option<Room> {
        loop {
            let room = self.link.try_room(caller, owner, n_tokens);
            if room.is_some() || registry.is_over() {
                break room;
            }
            std::thread::sleep(FULL);
        }
    }

    /// A caller that no engine has heard of.
    fn forget(&mut self, caller: CallerId) {
        self.owners.remove(&caller);
        self.customs.leave(caller);
    }

    /// Frees what a caller held.
    fn leave(&mut self, caller: CallerId) {
        self.owners.remove(&caller);
        for operation in self.customs.leave(caller) {
            let _ = self.link.post_unbounded(caller, operation);
        }
        // Behind what it has asked: an engine that has ended forgets everything.
        let _ = self.link.post_from(caller, Message::Leave { caller });
    }
}

impl Drop for NearEngine {
    /// The process is gone, and what its guests held with it.
    fn drop(&mut self) {
        let callers: Vec<CallerId> = self.owners.keys().copied().collect();
        callers.into_iter().for_each(|caller| self.leave(caller));
    }
}
