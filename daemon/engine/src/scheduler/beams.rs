//! Beam searches: jobs whose members change from step to step.
//!
//! A search has a context for each beam. The rows of what lives are members of a job, in one step or, beside others that
//! decode, in several; each gives its most probable tokens. When all are there the search takes the best (`sampling/beams`), and the contexts are
//! arranged anew: of those that continue one row the first takes over its context, the others get the sequence of it in a
//! context of what is gone. That moves holdings of pages, and copies none: a page that several are to write to is copied when
//! they do, as everywhere.
//!
//! In its term of so many steps a search goes before the contexts that stand in line for pages, as a run does: its pages do
//! not come and go with every token.

use std::sync::Arc;

use super::Scheduler;
use super::joint::{Members, Wants};
use crate::batch::{Candidate, Output, OutputFault};
use crate::command::{Answer, ContextId, SearchBeams};
use crate::completion::{Done, Reply, Tag};
use crate::error::EngineError;
use crate::job::{JointWork, Wanted, Work};
use crate::kv::Told;
use crate::sampling::beams::{Row, Search};
use crate::sampling::{Sampler, TokenMask};
use crate::violation::Violation;

/// Steps for which a search keeps its right to pages.
const N_TERM_STEPS: usize = 32;

/// A search between two steps.
#[derive(Debug)]
pub(super) struct Searching {
    base: ContextId,
    /// With their places among those that the search was given: those of the rows of the last step in their order, then
    /// those that have none.
    contexts: Vec<(ContextId, usize)>,
    search: Search,
    n_steps_left: Option<usize>,
    n_term_steps_left: usize,
    /// What is made of each row.
    sampler: Option<Arc<Sampler>>,
    /// What may come in the first step, by row; nothing is said where there are none.
    masks: Vec<Arc<TokenMask>>,
    reply: Reply,
}

impl Searching {
    /// Whether it is the one that was asked for so.
    pub(super) fn is_of(&self, base: ContextId, tag: Tag) -> bool {
        self.base == base && self.reply.tag() == tag
    }

    fn is_over(&self) -> bool {
        self.search.is_over() || self.n_steps_left == Some(0)
    }

    /// Hands the search back to the caller that asked.
    fn answer(self) {
        let order = self.contexts.into_iter().map(|(_, place)| place).collect();
        self.reply.send(Done::Answer(Ok(Answer::Beams { search: Box::new(self.search), order })));
    }

    pub(super) fn fail(self, error: EngineError) {
        self.reply.send(Done::Answer(Err(error)));
    }
}

impl Scheduler {
    /// A job that goes on with a search.
    ///
    /// # Errors
    /// The prompt is not as its guest says, or empty, or has no room for the longest hypothesis.
    pub(super) fn search_beams(&mut self, asked: SearchBeams) -> Result<(), Violation> {
        let SearchBeams { base, edit, contexts, search, n_steps, sampler, masks, tag } = asked;
        self.edit(base, edit)?;
        let Some(context) = self.contexts.get(&base) else { return Ok(()) };
        context.check_last()?;
        let n_beams = search.settings().n_beams;
        context.check_room(search.settings().n_tokens_max, self.limits.n_positions_max)?;
        let reply = self.outbox.to(context.caller, tag);
        let has_program = sampler.as_ref().is_some_and(|sampler| sampler.program.is_some());
        let n_beams_max = match has_program {
            true => self.n_job_rows_max().min(self.n_whole_rows_max()),
            false => self.n_job_rows_max(),
        };
        if n_beams > n_beams_max {
            reply.send(Done::Answer(Err(EngineError::TooManyBeams { n_beams, n_beams_max })));
            return Ok(());
        }
        let all: Members = std::iter::once(base).chain(contexts.iter().copied()).collect();
        if let Err(error) = self.check_steering(&all) {
            reply.send(Done::Answer(Err(error)));
            return Ok(());
        }
        let guest = self.contexts[&base].owner.guest;
        self.returns.note_asked(guest, self.commons.are_late);
        let contexts = contexts.into_iter().enumerate().map(|(place, id)| (id, place)).collect();
        let searching = Searching {
            base,
            contexts,
            search,
            n_steps_left: n_steps,
            n_term_steps_left: 0,
            sampler,
            masks,
            reply,
        };
        self.go_on(Box::new(searching));
        Ok(())
    }

    /// Whole rows of logits that a step brings back: what does not come back with it, all would wait for.
    fn n_whole_rows_max(&self) -> usize {
        (self.limits.asks.whole_bytes / (4 * self.limits.vocab_size)).max(1)
    }

    /// Takes in the candidates of all rows of a step.
    pub(super) fn take_ranked(
        &mut self,
        mut searching: Box<Searching>,
        outputs: impl Iterator<Item = Output>,
    ) {
        let tops: Result<Vec<Vec<Candidate>>, EngineError> = outputs
            .map(|output| match output {
                Output::Top { candidates, .. } | Output::Ranked(candidates) => Ok(candidates),
                // Nothing can follow: that one ends, the others go on.
                Output::Failed(OutputFault::NothingToDraw) => Ok(Vec::new()),
                Output::Failed(fault) => Err(fault.into()),
                other => unreachable!("a search asks for candidates, not for {other:?}"),
            })
            .collect();
        match tops {
            Ok(tops) => {
                searching.search.advance(&tops.iter().map(Vec::as_slice).collect::<Vec<_>>());
                searching.n_steps_left = searching.n_steps_left.map(|n| n - 1);
                self.go_on(searching);
            }
            Err(error) => searching.fail(error),
        }
    }

    /// Has the rows of what lives ride next, or answers.
    fn go_on(&mut self, mut searching: Box<Searching>) {
        if searching.is_over() {
            if let Some(base) = self.contexts.get(&searching.base) {
                self.returns.note_answered(base.owner.guest);
            }
            return searching.answer();
        }
        let Some(members) = self.arrange(&mut searching) else {
            return searching.fail(EngineError::JobDisturbed);
        };
        let (n, n_term_steps_left) =
            (searching.search.n_top(self.limits.vocab_size), searching.n_term_steps_left);
        let (sampler, masks, tag) =
            (searching.sampler.clone(), std::mem::take(&mut searching.masks), searching.reply.tag());
        let wanted = |idx: usize| match (&sampler, masks.get(idx)) {
            (None, None) => Wanted::Top { n },
            (sampler, within) => {
                let sampler = sampler.clone().unwrap_or_else(|| Arc::new(Sampler::greedy()));
                Wanted::Ranked { sampler, within: within.cloned(), n }
            }
        };
        let wants = Wants::Search { search: searching, ranked: vec![None; members.len()] };
        let job = self
            .begin_job(&members, wants, |idx, member| Work::Joint(JointWork::new(member, wanted(idx), tag)));
        self.line.forget_count();
        let is_within_term =
            n_term_steps_left > 0 && self.fit_job(job, &members).is_ok() && self.admit_all(&members).is_ok();
        if let Some(searching) = self.jobs.search_mut(job) {
            searching.n_term_steps_left = if is_within_term { n_term_steps_left - 1 } else { N_TERM_STEPS };
        }
        self.enqueue_job(&members);
    }

    /// Has the contexts of a search hold what its next rows are; returns those of the rows. `None` when one of them is gone, is
    /// busy with something else, or does not hold what can be gone on with: then something was done with it that was not the
    /// search's.
    fn arrange(&mut self, searching: &mut Searching) -> Option<Members> {
        let Searching { base, contexts, search, .. } = searching;
        let is_free = |id: &ContextId| self.contexts.get(id).is_some_and(|context| context.work.is_none());
        if !is_free(base) || !contexts.iter().all(|(id, _)| is_free(id)) {
            return None;
        }
        let rows = search.rows();
        let fits = |row: &&Row| {
            let parent = row.parent.map_or(Some(*base), |parent| contexts.get(parent).map(|&(id, _)| id));
            let kv = parent.and_then(|id| self.contexts.get(&id)).map(|context| &context.kv);
            let n_positions = kv.map_or(0, |kv| kv.end_position() + row.appended.len());
            (1..=self.limits.n_positions_max).contains(&n_positions)
        };
        if rows.len() > contexts.len() || !rows.iter().all(fits) {
            return None;
        }
        // What a question left past the end of one of them is the search's now, and not to be taken away from it.
        contexts.iter().for_each(|&(id, _)| self.spares.remove(id));
        let mut place_of_row: Vec<Option<usize>> = vec![None; rows.len()];
        let mut is_taken = vec![false; contexts.len()];
        for (row, place) in rows.iter().zip(&mut place_of_row) {
            if let Some(parent) = row.parent
                && !std::mem::replace(&mut is_taken[parent], true)
            {
                *place = Some(parent);
            }
        }
        // Hypotheses that are gone let go of their pages before others need some.
        let free: Vec<usize> = (0..contexts.len()).filter(|&place| !is_taken[place]).collect();
        let let_go = |place: usize| {
            let context = self.contexts.get_mut(&contexts[place].0).expect("it is there");
            let told = context.kv.take_told();
            context.kv.forget(&mut self.pages);
            (place, told)
        };
        let mut free = free.into_iter().map(let_go).collect::<Vec<_>>().into_iter();
        for (row, place) in rows.iter().zip(&mut place_of_row) {
            if place.is_none() {
                let (own, told) = free.next().expect("a context for each row");
                let from = row.parent.map_or(*base, |parent| contexts[parent].0);
                self.copy_sequence(from, contexts[own].0, &told);
                *place = Some(own);
            }
        }
        let place_of_row: Vec<usize> = place_of_row.into_iter().flatten().collect();
        for (Row { appended, .. }, &place) in rows.into_iter().zip(&place_of_row) {
            if let Some(context) = self.contexts.get_mut(&contexts[place].0) {
                context.kv.append(appended, &mut self.pages);
            }
        }
        for (id, _) in contexts.iter() {
            if let Some(context) = self.contexts.get_mut(id) {
                self.holders.note_changed(*id, &mut context.listing);
            }
        }
        let n_rows = place_of_row.len();
        let order = place_of_row.into_iter().chain(free.map(|(place, _)| place));
        *contexts = order.map(|place| contexts[place]).collect();
        Some(contexts[..n_rows].iter().map(|&(id, _)| id).collect())
    }

    /// Gives a context that holds nothing, and of whose slot the backend was told this, what another holds.
    fn copy_sequence(&mut self, from: ContextId, to: ContextId, told: &Told) {
        let Some(source) = self.contexts.get(&from).map(|context| context.owner.account.clone()) else {
            return;
        };
        let Some(kv) = self.fork_kv(from, source) else { return };
        if let Some(context) = self.contexts.get_mut(&to) {
            kv.come_to(told);
            context.kv = kv;
        }
    }

    /// Puts the members of a job into the queue. One that is looked at is enough where all have come to their last tokens.
    fn enqueue_job(&mut self, members: &Members) {
        let is_led_up = |id| self.contexts.get(id).is_some_and(|context| context.is_led_up());
        let n_looked_at = if members.iter().all(is_led_up) { 1 } else { members.len() };
        members.iter().take(n_looked_at).for_each(|&id| self.enqueue(id));
    }
}
