//! Which contexts may take pages when there are not enough for all.
//!
//! A context with work is *admitted* when all the pages that its work needs fit beside what the others that are admitted
//! hold and have been promised. Until then it stands in a line and takes none. So a context that is admitted comes to the
//! end of what it was admitted for, whatever arrives later: a question to its answer, a run to the end of its *term*.
//!
//! A run that has had its term makes room for the head of the line, unless it is spared (`held`), and stands at its end. A
//! term lasts for 32 tokens, and for as long as it took to bring the context back: so pages move at most once in 32 steps,
//! and without host memory at most one token is computed again for each that is decoded. A run of a user with a larger share
//! than the head's has as many terms in a row as its share is larger. The line (`line`) is in the order
//! of virtual time over the pages that users, their sessions and their guests were given, by the shares of users, so that no
//! user gets more of the memory by asking more often, and one of any rank gets its part.

use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::terms::{N_TERM_TOKENS, Term};
use super::{ContextState, Scheduler, Source};
use crate::causes::Cause;
use crate::command::ContextId;
use crate::job::Work;
use crate::kv::{BlockId, PageTable};

/// Pages brought back from host memory that count as one step at most: what the link moves while a large model decodes a
/// token.
const N_MOVED_PAGES_PER_STEP: usize = 64;

/// Whether a context may take pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Standing {
    /// It has not asked for any since its work began.
    #[default]
    Outside,
    InLine,
    Admitted(Term),
}

/// Pages that admitted contexts neither hold nor have been promised, at one point of one step's plan. What several of them
/// hold counts once, on the device or in host memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageCount {
    pub(super) n_left: isize,
    /// Pages that have been promised, of those that several wait for in host memory one.
    n_promised: usize,
    pub(super) marking: u64,
}

/// What a context's work needs on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// Blocks that it will hold at the end of its term.
    n_blocks: usize,
    /// Pages among them that have to be found: for new blocks, for copies, for those in host memory.
    n_pages: usize,
    /// Those of them that are for new blocks and copies.
    n_to_get: usize,
    n_tokens: usize,
}

/// What a run is to have pages for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// What it computes next: the rest it asks for when it gets there.
    NextPage,
    /// Its whole term.
    Term,
}

impl ContextState {
    /// Where the tokens end that its work has to compute, as far as they are known or being drawn.
    pub(super) fn target(&self) -> usize {
        match (&self.work, self.n_draws_under_way()) {
            // A job is admitted for its draws, whatever leads up to them.
            (Some(work), _) if work.member().is_some() => self.n_tokens_expected(),
            (Some(work), 0) => work.target(self.kv.tokens.len()),
            _ => self.n_tokens_expected(),
        }
    }

    pub(super) fn is_admitted(&self) -> bool {
        matches!(self.standing, Standing::Admitted(_))
    }

    pub(super) fn is_in_line(&self) -> bool {
        self.standing == Standing::InLine
    }

    /// Pages that are kept for it and that it has not taken yet.
    pub(super) fn n_promised(&self) -> usize {
        if let Standing::Admitted(term) = self.standing { term.n_promised } else { 0 }
    }

    /// Pages that have to be found before it holds so many blocks that it can write to, beside those that it holds in host
    /// memory, where the device has `n_pages_most`.
    fn n_to_get(&self, n_blocks: usize, pages: &PageTable, n_pages_most: usize) -> usize {
        let n_new = n_blocks.saturating_sub(self.kv.blocks().len().max(self.n_blocks_found()));
        // What it writes next may be shared; a copy takes a page beside the one that is copied.
        let n_copied = self.blocks_to_write().iter().filter(|&&block| pages.is_shared(block)).count();
        // Where there is no room for both, what is in it is computed again.
        let has_room = n_blocks + n_copied <= n_pages_most;
        n_new + if has_room { n_copied } else { 0 }
    }

    /// Those of its blocks that rows are still to write to.
    fn blocks_to_write(&self) -> &[BlockId] {
        self.kv.blocks().get(self.kv.block_of(self.start())..).unwrap_or_default()
    }

    /// Takes the blocks that it will write to out of the prefix cache: if another context shared one, writing would need a
    /// copy for which no page is reserved.
    pub(super) fn hide_what_it_writes(&self, pages: &mut PageTable) {
        for &block in self.blocks_to_write() {
            if !pages.is_shared(block) {
                pages.forget_key(block);
            }
        }
    }

    /// Counts what it holds and is to get, if it is admitted; returns what it lacks by itself.
    fn count(&self, count: &mut PageCount, pages: &mut PageTable, n_pages_most: usize) -> usize {
        let Standing::Admitted(term) = self.standing else { return 0 };
        self.hide_what_it_writes(pages);
        let mut n_lacking = self.n_to_get(term.n_blocks, pages, n_pages_most);
        count.n_left -= n_lacking as isize;
        count.n_promised += n_lacking;
        for &block in self.kv.blocks() {
            let (is_first, is_away) = (pages.mark(block, count.marking), pages.page(block).is_none());
            count.n_left -= isize::from(is_first);
            count.n_promised += usize::from(is_first && is_away);
            n_lacking += usize::from(is_away);
        }
        n_lacking.min(n_pages_most)
    }
}

impl Scheduler {
    fn need(&self, context: &mut ContextState, kept: Kept) -> Need {
        let n_away = context.kv.locate(&self.pages);
        let kv = &context.kv;
        let target = context.target();
        let is_run = context.work.as_ref().is_some_and(Work::goes_on);
        let n_term =
            N_TERM_TOKENS.max(kv.n_lost()).max(n_away / self.n_moves_per_step().min(N_MOVED_PAGES_PER_STEP));
        let end = match kept {
            Kept::Term if is_run => (target + n_term).min(kv.n_tokens_most(self.limits.n_positions_max)),
            _ => target,
        };
        // No more than the device has: alone it gets what there is.
        let n_blocks = kv.n_blocks_until(end).min(self.limits.n_pages).max(kv.blocks().len());
        let n_to_get = context.n_to_get(n_blocks, &self.pages, self.limits.n_pages);
        Need { n_blocks, n_pages: (n_to_get + n_away).min(self.limits.n_pages), n_to_get, n_tokens: n_term }
    }

    /// Admits a context before those in line: a run without a term, which goes on for as long as it is spared.
    pub(super) fn begin_passing(&mut self, id: ContextId, context: &mut ContextState, need: Need) {
        self.begin_term(id, context, Need { n_tokens: 0, ..need });
        if let Standing::Admitted(term) = &mut context.standing {
            term.has_passed = true;
        }
    }

    /// Admits a context.
    fn begin_term(&mut self, id: ContextId, context: &mut ContextState, need: Need) {
        assert!(!context.is_admitted(), "what it was promised before is not counted twice");
        context.hide_what_it_writes(&mut self.pages);
        self.line.n_promised += need.n_pages;
        self.line.admitted.insert(id);
        let number = self.line.next_number();
        let Need { n_blocks, n_pages: n_promised, n_tokens, .. } = need;
        let n_tokens_left = n_tokens;
        let (n_terms, has_passed, n_pages_then) = (1, false, self.limits.n_pages);
        let term =
            Term { n_blocks, n_promised, n_tokens, n_tokens_left, n_terms, number, has_passed, n_pages_then };
        context.standing = Standing::Admitted(term);
    }

    /// Admits a context that needs pages now, if there are enough for all its work; otherwise it stands in the line.
    pub(super) fn admit(&mut self, id: ContextId, context: &mut ContextState) -> bool {
        if context.is_admitted() && !self.needs_more(context) {
            return true;
        }
        self.renew_term(context);
        // Within its term a run goes before those in line.
        let n_left = context.n_term_tokens_left();
        let earlier = context.term_under_way();
        let passes = n_left == 0 && self.passes_line(id, context);
        self.leave(id, context);
        if (self.line.is_empty() || n_left > 0 || passes)
            && let Some(need) = self.find_room(context)
        {
            match n_left {
                0 if passes => self.begin_passing(id, context, need),
                0 => self.begin_term(id, context, need),
                n_tokens => self.begin_term(id, context, Need { n_tokens, ..need }),
            }
            if let (Standing::Admitted(term), Some(earlier)) = (&mut context.standing, earlier) {
                (term.n_terms, term.n_tokens) = (earlier.n_terms, earlier.n_tokens);
            }
            return true;
        }
        let need = self.need(context, Kept::Term);
        self.line.enter(id, &context.owner, need.n_blocks);
        context.standing = Standing::InLine;
        context.note_waited_for_row(self.commons.step, &mut self.stats.causes);
        false
    }

    /// Admits all of these contexts, if there is room for them together; otherwise says how many pages that takes.
    pub(super) fn admit_all(&mut self, ids: &[ContextId]) -> Result<(), usize> {
        let needs = self.needs(ids);
        let n_pages: usize = needs.iter().map(|need| need.n_pages).sum();
        let is_at_hand = self.has_at_hand(n_pages);
        if self.line.count.is_some() || !is_at_hand {
            let PageCount { n_left, n_promised, marking } = self.count(None);
            let n_to_get: usize = needs.iter().map(|need| need.n_to_get).sum();
            let (mut n_held, mut n_away) = (0, 0);
            for id in ids {
                for &block in self.contexts[id].kv.blocks() {
                    let is_first = self.pages.mark(block, marking);
                    n_held += usize::from(is_first);
                    n_away += usize::from(is_first && self.pages.page(block).is_none());
                }
            }
            let n_needed = n_held + n_to_get;
            let n_promised = n_promised + n_to_get + n_away;
            let is_too_large = n_needed > self.limits.n_pages && self.n_pages_most > self.limits.n_pages;
            let is_with_others = self.source == Source::Others && self.n_at_hand() < n_promised;
            let has_room = n_needed as isize <= n_left || self.line.admitted.is_empty() && !is_too_large;
            if is_with_others || !has_room {
                self.line.forget_count();
                return Err(n_needed);
            }
            self.line.count = Some(PageCount { n_left: n_left - n_needed as isize, n_promised, marking });
        }
        for (id, need) in ids.iter().zip(needs) {
            let mut context = self.contexts.remove(id).expect("a member of a job exists");
            self.begin_term(*id, &mut context, need);
            self.holders.note_changed(*id, &mut context.listing);
            self.contexts.insert(*id, context);
        }
        Ok(())
    }

    /// What the members of a job need. A mixture that would not fit the device with a whole term is admitted for its next
    /// token, as far as the pages of that go.
    fn needs(&mut self, ids: &[ContextId]) -> SmallVec<[Need; 2]> {
        let of_term = self.needs_for(ids, Kept::Term);
        let n_to_get: usize = of_term.iter().map(|need| need.n_to_get).sum();
        let blocks = ids.iter().flat_map(|id| self.contexts[id].kv.blocks());
        let is_a_run = |id| self.contexts[id].work.as_ref().is_some_and(Work::goes_on);
        let fits = || blocks.collect::<FxHashSet<_>>().len() + n_to_get <= self.n_pages_most;
        match ids.len() > 1 && ids.iter().any(is_a_run) && !fits() {
            true => self.needs_for(ids, Kept::NextPage),
            false => of_term,
        }
    }

    fn needs_for(&mut self, ids: &[ContextId], kept: Kept) -> SmallVec<[Need; 2]> {
        let mut needs = SmallVec::new();
        for id in ids {
            let mut context = self.contexts.remove(id).expect("a member of a job exists");
            needs.push(self.need(&mut context, kept));
            self.contexts.insert(*id, context);
        }
        needs
    }

    /// The first of these contexts stands in the line for all.
    pub(super) fn enter_line(&mut self, ids: &[ContextId]) {
        let n_blocks = self.needs(ids).iter().map(|need| need.n_blocks).sum();
        let first = self.contexts.get_mut(&ids[0]).expect("a member of a job exists");
        self.line.enter(ids[0], &first.owner, n_blocks);
        first.standing = Standing::InLine;
        self.holders.note_changed(ids[0], &mut first.listing);
    }

    /// Whether a context needs more than it was admitted for: more blocks, or more pages for them than it was promised,
    /// since what it held or was to find is gone.
    pub(super) fn needs_more(&self, context: &mut ContextState) -> bool {
        let Standing::Admitted(term) = context.standing else { return false };
        let n_away = context.kv.locate(&self.pages);
        context.kv.n_blocks_until(context.target()).min(self.limits.n_pages) > term.n_blocks
            || (context.n_to_get(term.n_blocks, &self.pages, self.limits.n_pages) + n_away)
                .min(self.limits.n_pages)
                > term.n_promised
    }

    /// Whether so many pages are free or cached beside those that were promised, as far as that is known without a count.
    fn has_at_hand(&self, n_pages: usize) -> bool {
        self.n_at_hand() >= self.line.n_promised + n_pages
    }

    /// As [`Self::has_at_hand`], by a count.
    fn has_counted_at_hand(&mut self, n_pages: usize) -> bool {
        self.has_at_hand(n_pages) || self.n_at_hand() >= self.count(None).n_promised + n_pages
    }

    fn n_at_hand(&self) -> usize {
        self.pages.n_free() + self.pages.n_idle()
    }

    /// Pages that the first in line lacks beside what is free or cached, and whose guest's turn it is.
    pub(super) fn lack_of_first(&mut self) -> Option<(usize, ContextId)> {
        let first = self.line.first()?;
        let members = match self.job_of(first) {
            Some(job) => self.jobs.members(job),
            None => SmallVec::from_slice(&[first]),
        };
        self.line.forget_count();
        let needs = self.needs(&members);
        let PageCount { n_promised, marking, .. } = self.count(None);
        let mut n_pages = n_promised;
        for (id, need) in members.into_iter().zip(needs) {
            let context = self.contexts.remove(&id)?;
            if context.work.is_some() {
                n_pages += need.n_to_get;
                n_pages += self.mark_away(&context, marking);
            }
            self.contexts.insert(id, context);
        }
        self.line.forget_count();
        let n_lacking = n_pages.checked_sub(self.n_at_hand())?;
        (n_lacking > 0).then_some((n_lacking, first))
    }

    /// Marks what a context has in host memory; returns how much of it no marking had reached.
    fn mark_away(&mut self, context: &ContextState, marking: u64) -> usize {
        let pages = &mut self.pages;
        let is_away = |&block: &BlockId| pages.page(block).is_none() && pages.mark(block, marking);
        context.kv.blocks().iter().copied().filter(is_away).count()
    }

    /// Room for a context beside those that are admitted.
    pub(super) fn find_room(&mut self, context: &mut ContextState) -> Option<Need> {
        // What is free or cached is at hand. What contexts hold that wait for nothing is counted only if need be.
        let is_back = context.kv.n_lost() > 0 || context.kv.locate(&self.pages) > 0;
        let need = self.need(context, if is_back { Kept::Term } else { Kept::NextPage });
        if self.line.count.is_none() && self.has_at_hand(need.n_pages) {
            return Some(need);
        }
        let need = self.need(context, Kept::Term);
        if self.source == Source::Others && !self.has_counted_at_hand(need.n_pages) {
            return None;
        }
        self.take_from_count(need, context).ok()?;
        Some(need)
    }

    /// Takes what a context holds and needs out of the pages that are left, if they are enough; otherwise says how many that
    /// takes.
    fn take_from_count(&mut self, need: Need, context: &ContextState) -> Result<(), usize> {
        let PageCount { n_left, n_promised, marking } = self.count(None);
        let is_own = |&&block: &&BlockId| !self.pages.is_marked(block, marking);
        let own = context.kv.blocks().iter().filter(is_own);
        let n_own = own.clone().count();
        let n_own_away = own.filter(|&&block| self.pages.page(block).is_none()).count();
        let n_taken = n_own + need.n_to_get;
        if n_taken as isize > n_left && !self.line.admitted.is_empty() {
            return Err(n_taken);
        }
        for &block in context.kv.blocks() {
            self.pages.mark(block, marking);
        }
        let n_promised = n_promised + need.n_to_get + n_own_away;
        self.line.count = Some(PageCount { n_left: n_left - n_taken as isize, n_promised, marking });
        Ok(())
    }

    /// Counts the pages that admitted contexts hold and are to get, and marks those that they hold. What they are promised
    /// is from then on what each of them lacks by itself.
    pub(super) fn count(&mut self, placed: Option<&ContextState>) -> PageCount {
        if let Some(count) = self.line.count {
            return count;
        }
        self.n_markings += 1;
        let marking = self.n_markings;
        let Self { contexts, pages, line, limits, .. } = self;
        let mut count = PageCount { n_left: limits.n_pages as isize, n_promised: 0, marking };
        line.n_promised = 0;
        for id in &line.admitted {
            // One that is being placed is out of the table.
            let Some(context) = contexts.get_mut(id) else { continue };
            let n_lacking = context.count(&mut count, pages, limits.n_pages);
            if let Standing::Admitted(term) = &mut context.standing {
                (term.n_promised, term.n_pages_then) = (n_lacking, limits.n_pages);
                line.n_promised += n_lacking;
            }
        }
        if let Some(context) = placed.filter(|context| context.is_admitted()) {
            context.count(&mut count, pages, limits.n_pages);
            line.n_promised += context.n_promised();
        }
        line.count = Some(count);
        count
    }

    /// The marking of the blocks that admitted contexts hold.
    pub(super) fn marking(&mut self, placed: &ContextState) -> u64 {
        self.count(Some(placed)).marking
    }

    /// Admits from the head of the line as long as there is room, or can be made by runs that have had their term.
    pub(super) fn admit_from_line(&mut self) {
        while let Some(id) = self.line.first() {
            if let Some(job) = self.job_of(id) {
                if !self.admit_job_from_line(job, id) {
                    return self.admit_past_head();
                }
                continue;
            }
            let mut context = self.contexts.remove(&id).expect("who is gone has left the line");
            if context.work.is_none() {
                // It is ended when it is looked at.
                self.leave(id, &mut context);
                self.contexts.insert(id, context);
                self.enqueue(id);
                continue;
            }
            let need = self.need(&mut context, Kept::Term);
            if self.source == Source::Others && !self.has_counted_at_hand(need.n_pages) {
                self.contexts.insert(id, context);
                return self.admit_past_head();
            }
            let taken = self.take_from_count(need, &context);
            if taken.is_ok() {
                self.line.leave(id);
                self.begin_term(id, &mut context, need);
                self.held.forget();
                self.holders.note_changed(id, &mut context.listing);
                context.note_waited(Cause::StepsForPages, self.commons.step, &mut self.stats.causes);
            }
            self.contexts.insert(id, context);
            match taken {
                Ok(()) => self.enqueue(id),
                // Alone it gets what there is.
                Err(n_pages) if self.end_terms(n_pages.min(self.limits.n_pages)) => {}
                Err(_) => return self.admit_past_head(),
            }
        }
    }

    /// Contexts that are admitted, but for one that is looked at.
    pub(super) fn admitted(&self) -> impl Iterator<Item = (ContextId, &ContextState)> {
        self.line.admitted.iter().filter_map(|&id| Some((id, self.contexts.get(&id)?.as_ref())))
    }

    /// That just those are admitted that are known to be; that each was promised what it lacks; and that the device has what
    /// all of them hold and are to get.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn check_admitted(&self) {
        let n_admitted = self.contexts.values().filter(|context| context.is_admitted()).count();
        assert_eq!(self.line.admitted.len(), n_admitted);
        assert!(self.admitted().filter(|(_, context)| context.is_admitted()).count() == n_admitted);
        let promised = self.admitted().map(|(_, context)| context.n_promised());
        assert_eq!(self.line.n_promised, promised.sum::<usize>());
        let blocks = self.admitted().flat_map(|(_, context)| context.kv.blocks());
        let mut n_taken = blocks.collect::<std::collections::BTreeSet<_>>().len();
        for (id, context) in self.admitted() {
            let Standing::Admitted(term) = context.standing else { unreachable!("it is admitted") };
            let n_to_get = context.n_to_get(term.n_blocks, &self.pages, term.n_pages_then);
            let is_away = |&&block: &&BlockId| self.pages.page(block).is_none();
            let n_away = context.kv.blocks().iter().filter(is_away).count();
            assert!(n_to_get + n_away <= term.n_promised, "{id:?} lacks {n_to_get} + {n_away}: {term:?}");
            n_taken += n_to_get;
        }
        let n_pages = self.limits.n_pages;
        assert!(n_taken <= n_pages, "admitted contexts hold and are to get {n_taken} pages of {n_pages}");
    }

    /// Takes note of the pages that an admitted context has taken.
    pub(super) fn note_taken(&mut self, context: &mut ContextState) {
        if let Standing::Admitted(term) = &mut context.standing {
            let n_promised = term.n_blocks.saturating_sub(context.kv.blocks().len()).min(term.n_promised);
            self.line.n_promised -= term.n_promised - n_promised;
            term.n_promised = n_promised;
        }
    }

    /// Takes note of promised pages that are on the device again.
    pub(super) fn note_back(&mut self, context: &mut ContextState, n_pages: usize) {
        if let Standing::Admitted(term) = &mut context.standing {
            let n_pages = n_pages.min(term.n_promised);
            term.n_promised -= n_pages;
            self.line.n_promised -= n_pages;
        }
    }

    /// Marks what an admitted context has found since pages were counted: it was counted among what the context was to get, and
    /// no room is made at its cost.
    pub(super) fn mark_found(&mut self, context: &ContextState) {
        if let Some(count) = self.line.count.filter(|_| context.is_admitted()) {
            context.kv.blocks().iter().for_each(|&block| _ = self.pages.mark(block, count.marking));
        }
    }

    /// Takes note of pages in host memory that an admitted context holds from now on with one that was promised them.
    pub(super) fn note_promised_with_another(&mut self, context: &mut ContextState, n_pages: usize) {
        if let Standing::Admitted(term) = &mut context.standing {
            term.n_promised += n_pages;
            self.line.n_promised += n_pages;
        }
    }

    /// Ends a context's right to pages, or its place in the line.
    pub(super) fn leave(&mut self, id: ContextId, context: &mut ContextState) {
        self.holders.note_changed(id, &mut context.listing);
        match std::mem::take(&mut context.standing) {
            Standing::Admitted(term) => {
                self.line.n_promised -= term.n_promised;
                self.line.admitted.remove(&id);
                self.line.forget_count();
            }
            Standing::InLine => self.line.give_up(id),
            Standing::Outside => {}
        }
    }

    /// As [`Self::leave`], for a context in the table.
    pub(super) fn leave_by_id(&mut self, id: ContextId) {
        if let Some(mut context) = self.contexts.remove(&id) {
            self.leave(id, &mut context);
            self.contexts.insert(id, context);
        }
    }
}
