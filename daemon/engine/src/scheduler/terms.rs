//! The terms of runs: for how long a run keeps its pages while others wait for them, and which make room first.

use super::admission::Standing;
use super::{ContextState, Scheduler};
use crate::command::ContextId;
use crate::job::Work;

/// Tokens that a run decodes at least before it makes room for others.
pub(super) const N_TERM_TOKENS: usize = 32;

/// What a context was admitted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Term {
    /// Blocks that it may hold.
    pub(super) n_blocks: usize,
    /// Pages that are kept for it and that it has not taken yet.
    pub(super) n_promised: usize,
    /// Tokens that a run decodes in it.
    pub(super) n_tokens: usize,
    /// Tokens that a run may still decode before it makes room.
    pub(super) n_tokens_left: usize,
    /// Terms that a run has had in a row, with this one.
    pub(super) n_terms: u32,
    /// The context that was admitted first makes room first.
    pub(super) number: u64,
    /// Whether it was admitted before others in line.
    pub(super) has_passed: bool,
    /// Pages that the device had when what it lacks was counted last. If it has more since, a context may want a copy that it
    /// was not promised: then it asks again when it gets there.
    pub(super) n_pages_then: usize,
}

impl ContextState {
    /// Tokens that it may still decode before it makes room; none for a question.
    pub(super) fn n_term_tokens_left(&self) -> usize {
        match (self.standing, &self.work) {
            (Standing::Admitted(term), Some(work)) if work.goes_on() => term.n_tokens_left,
            _ => 0,
        }
    }

    /// The term of a run that is not through with it.
    pub(super) fn term_under_way(&self) -> Option<Term> {
        match self.standing {
            Standing::Admitted(term) if self.n_term_tokens_left() > 0 => Some(term),
            _ => None,
        }
    }

    /// Whether it has decoded what it was admitted for; a question is never done before its answer.
    pub(super) fn has_had_its_term(&self) -> bool {
        let Standing::Admitted(term) = self.standing else { return false };
        self.work.as_ref().is_some_and(Work::goes_on)
            && term.n_tokens_left == 0
            && self.kv.n_computed + 1 >= self.kv.tokens.len()
    }
}

impl Term {
    /// Counts pages that were let go of and may be needed again.
    pub(super) fn note_let_go(&mut self, n_pages: usize) {
        self.n_promised += n_pages;
    }

    /// Counts a decoded token.
    pub(super) fn note_decoded(&mut self) {
        self.n_tokens_left = self.n_tokens_left.saturating_sub(1);
    }
}

impl Scheduler {
    /// A run that has had its term has another, if its user's share is larger than that of the head's for as many terms as it
    /// has had; returns whether it has.
    pub(super) fn renew_term(&self, context: &mut ContextState) -> bool {
        let Some(head) = self.line.first().and_then(|id| Some(&**self.contexts.get(&id)?)) else {
            return false;
        };
        let [own, of_head] = [&*context, head].map(|of| u64::from(of.owner.account.priority().share.get()));
        let is_over = context.has_had_its_term();
        match &mut context.standing {
            Standing::Admitted(term)
                if is_over && !term.has_passed && u64::from(term.n_terms) * of_head < own =>
            {
                (term.n_terms, term.n_tokens_left) = (term.n_terms + 1, term.n_tokens);
                true
            }
            _ => false,
        }
    }

    /// Runs that have had their terms, of the lowest rank first, and of a rank the first admitted.
    pub(super) fn over(&self) -> Vec<ContextId> {
        let mut over: Vec<(u8, u64, ContextId)> = self
            .admitted()
            .filter_map(|(id, context)| match context.standing {
                Standing::Admitted(term) if context.has_had_its_term() => {
                    Some((context.owner.account.priority().rank, term.number, id))
                }
                _ => None,
            })
            .collect();
        over.sort_unstable();
        over.into_iter().map(|(.., id)| id).collect()
    }

    /// Ends the terms of runs that have had theirs and are not spared, in the order of [`Self::over`], until `n_pages` are left for
    /// the first in line; returns whether any ended. None does if that would not be enough.
    pub(super) fn end_terms(&mut self, n_pages: usize) -> bool {
        let n_missing = n_pages as isize - self.count(None).n_left;
        let mut over = self.over();
        if over.is_empty() {
            return false;
        }
        self.held.note_head(self.line.first(), n_pages);
        self.leave_out_spared(&mut over);
        over.retain(|&id| {
            let Some(mut context) = self.contexts.remove(&id) else { return false };
            let is_renewed = self.renew_term(&mut context);
            self.contexts.insert(id, context);
            !is_renewed
        });
        let n_most: usize = over.iter().map(|id| self.contexts[id].n_blocks_and_promised()).sum();
        if over.is_empty() || (n_most as isize) < n_missing {
            return false;
        }
        let mut n_found = 0;
        for id in over {
            let Some(mut context) = self.contexts.remove(&id) else { continue };
            n_found += (context.kv.n_alone(&self.pages) + context.n_promised()) as isize;
            self.leave(id, &mut context);
            self.stats.n_preempted += 1;
            self.contexts.insert(id, context);
            if n_found >= n_missing {
                break;
            }
        }
        self.line.forget_count();
        self.held.forget();
        true
    }
}
