//! KV that questions have left past the ends of contexts, for guests that append what they asked about.
//!
//! It is on its guest's account like all else, and goes before anything of that user's is refused for want of pages.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::{ContextState, Scheduler};
use crate::account::ActorId;
use crate::command::ContextId;

/// Contexts that hold more than their own tokens.
#[derive(Debug, Default)]
pub(super) struct Spares {
    contexts: FxHashMap<ContextId, Spare>,
    by_actor: BTreeSet<(ActorId, ContextId)>,
}

#[derive(Clone, Copy, Debug)]
struct Spare {
    actor: ActorId,
    /// Tokens of the context itself.
    n_own: usize,
}

impl Spares {
    /// A context has been answered that has `n_own` tokens itself.
    pub(super) fn note(&mut self, id: ContextId, context: &ContextState, n_own: usize) {
        if context.kv.tokens.len() > n_own {
            let actor = context.owner.actor;
            self.contexts.insert(id, Spare { actor, n_own });
            self.by_actor.insert((actor, id));
        }
    }

    /// A context has only its own tokens from now on, or is gone.
    pub(super) fn remove(&mut self, id: ContextId) {
        if let Some(spare) = self.contexts.remove(&id) {
            self.by_actor.remove(&(spare.actor, id));
        }
    }

    fn pop(&mut self, actor: ActorId) -> Option<(ContextId, Spare)> {
        let &(of, id) = self.by_actor.range((actor, ContextId::LEAST)..).next()?;
        if of != actor {
            return None;
        }
        self.by_actor.remove(&(actor, id));
        self.contexts.remove_entry(&id)
    }
}

impl Scheduler {
    /// Lets go of what a user's contexts hold past their own tokens; returns whether there was anything.
    pub(super) fn forget_spares(&mut self, actor: ActorId) -> bool {
        let mut has_found = false;
        while let Some((id, spare)) = self.spares.pop(actor) {
            has_found = true;
            if let Some(context) = self.contexts.get_mut(&id) {
                context.kv.truncate(spare.n_own, &mut self.pages);
            }
        }
        has_found
    }
}
