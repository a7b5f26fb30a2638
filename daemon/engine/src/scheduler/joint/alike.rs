//! Members of a job that begin alike.
//!
//! The full pages of what two of them have in common are held once: forks share them from the start, and what a member has
//! lost, or never had, it takes from the other. So a job needs no more pages for having lost some. A member that is to find
//! pages that another has yet to compute waits for it: always for one before it in the list, so that there is one that does
//! not wait.

use rustc_hash::FxHashMap;

use super::{Members, PAGE_LEN, Scheduler};
use crate::command::ContextId;
use crate::job::{JobId, Work};
use crate::scheduler::ContextState;

/// A member that begins as one behind it does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alike {
    member: ContextId,
    /// Full pages that they have in common, those aside that either computes for its draw.
    n_blocks: usize,
}

/// Whether a member has the blocks that it is to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    All,
    /// Another is to compute them first.
    Later,
}

impl ContextState {
    /// Blocks from the first on for which a member of a job needs no pages, those that it holds aside.
    pub(in crate::scheduler) fn n_blocks_found(&self) -> usize {
        self.work.as_ref().and_then(Work::member).map_or(0, |member| member.n_blocks_found)
    }

    fn set_blocks_found(&mut self, n_blocks: usize) {
        if let Some(member) = self.work.as_mut().and_then(Work::member_mut) {
            member.n_blocks_found = n_blocks;
        }
    }

    /// Full pages that it has computed.
    fn n_blocks_full(&self) -> usize {
        self.kv.n_computed / PAGE_LEN
    }
}

impl Scheduler {
    /// For each member, the one of the first and the last before it with which it has most in common.
    pub(super) fn who_begin_alike(&self, members: &Members) -> Vec<Option<Alike>> {
        let alike = |id: ContextId, member: ContextId| {
            let both = [id, member].map(|id| &self.contexts[&id].kv);
            if both.iter().any(|kv| kv.is_holed()) {
                // The same tokens may have seen others.
                return Alike { member, n_blocks: 0 };
            }
            let [tokens, others] = both.map(|kv| kv.view(&self.pages));
            let n_full = tokens.len().min(others.len()).saturating_sub(1);
            let n_alike = tokens.n_common(others).min(both[0].n_steered_as(both[1]));
            Alike { member, n_blocks: n_alike.min(n_full) / PAGE_LEN }
        };
        let of = |(idx, &id): (usize, &ContextId)| {
            let before = &members[..idx];
            let candidates = [before.first(), before.last()].into_iter().flatten();
            candidates.map(|&member| alike(id, member)).max_by_key(|alike| alike.n_blocks)
        };
        members.iter().enumerate().map(of).map(|alike| alike.filter(|alike| alike.n_blocks > 0)).collect()
    }

    /// The pairs of a job that begin alike: the later member, and the one before it.
    fn pairs(&self, job: JobId) -> Vec<(ContextId, Alike)> {
        let Some(job) = self.jobs.jobs.get(&job) else { return Vec::new() };
        job.members.iter().zip(&job.alike).filter_map(|(&id, &alike)| Some((id, alike?))).collect()
    }

    /// Notes which blocks the members of a job will find, before it is counted what they need.
    pub(super) fn note_what_is_found(&mut self, job: JobId) {
        let mut n_found: FxHashMap<ContextId, usize> = FxHashMap::default();
        for (later, alike) in self.pairs(job) {
            // One that comes later may have kept what the one before it has lost.
            let n_kept = self.contexts[&later].n_blocks_full();
            for (id, n_blocks) in [(later, alike.n_blocks), (alike.member, alike.n_blocks.min(n_kept))] {
                let n = n_found.entry(id).or_default();
                *n = n_blocks.max(*n);
            }
        }
        for (id, n_blocks) in n_found {
            let context = self.contexts.get_mut(&id).expect("a member of a job exists");
            let n_full = context.n_blocks_full();
            let finds_more = n_blocks > n_full && context.under_way.is_none();
            if finds_more {
                // Blocks are found from a full one on.
                context.kv.lose_after(n_full, &mut self.pages);
            }
            context.set_blocks_found(if finds_more { n_blocks } else { 0 });
        }
    }

    /// Takes the blocks that a member is to find, as far as others have computed them.
    pub(super) fn find_blocks_of_others(&mut self, job: JobId, id: ContextId) -> Found {
        let is_to_find = |context: &ContextState| {
            context.under_way.is_none() && context.n_blocks_full() < context.n_blocks_found()
        };
        if !self.contexts.get(&id).is_some_and(|context| is_to_find(context)) {
            return Found::All;
        }
        let mut context = self.contexts.remove(&id).expect("it was there");
        let n_away = context.kv.locate(&self.pages);
        for (later, alike) in self.pairs(job) {
            let other = match id {
                id if later == id => alike.member,
                id if alike.member == id => later,
                _ => continue,
            };
            context.kv.adopt_from(&self.contexts[&other].kv, alike.n_blocks, &mut self.pages);
        }
        let n_away_with_others = context.kv.locate(&self.pages) - n_away;
        self.note_promised_with_another(&mut context, n_away_with_others);
        self.mark_found(&context);
        let has_all = context.n_blocks_full() >= context.n_blocks_found();
        self.contexts.insert(id, context);
        if has_all { Found::All } else { Found::Later }
    }

    /// Of pages that members of a job computed twice, one each goes, for want of room; returns whether there were any.
    pub(super) fn give_up_doubles(&mut self, job: JobId) -> bool {
        let mut has_found = false;
        for (later, alike) in self.pairs(job) {
            let [blocks, others] = [later, alike.member].map(|id| self.contexts[&id].kv.blocks());
            let both = blocks.iter().zip(others).take(alike.n_blocks);
            let n_same = both.clone().take_while(|(block, other)| block == other).count();
            if n_same < both.len() && self.contexts[&later].under_way.is_none() {
                let context = self.contexts.get_mut(&later).expect("a member of a job exists");
                context.kv.lose_after(n_same, &mut self.pages);
                has_found = true;
            }
        }
        has_found
    }
}
