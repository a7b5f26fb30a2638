//! Mixtures: runs whose draws take the logits of other contexts into account, which get the tokens too.
//!
//! A mixture is a job over several contexts that goes on from token to token. Its first member has the run: its guest, its
//! masks, what its program leaves. While a step of it is under way the next one can be planned: the rows of all members begin
//! with what the first one draws. Whatever ends the run, or the work of one of the others, ends the mixture.

use smallvec::SmallVec;

use super::admission::Standing;
use super::joint::{Members, Wants};
use super::{ContextState, Scheduler};
use crate::batch::{Output, SlotId, Token};
use crate::causes::Cause;
use crate::command::{Ahead, ContextId, Edit, RunSettings};
use crate::completion::{Reply, Tag};
use crate::error::EngineError;
use crate::job::{JobId, MixedWork, Mixture, RunWork, Stage, Work};
use crate::run::{Finish, RunEvent, RunReply};
use crate::violation::Violation;

/// What may become of a mixture whose members have all but their last tokens computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Its next draw, if there are pages for it.
    Draw,
    /// First something has to come of the step under way.
    UnderWay,
    /// Nothing, until the mask of its next draw has come.
    LacksMask,
    /// Nothing, until its guest has come.
    Nothing,
}

impl Scheduler {
    /// A job that decodes the first of these contexts together with the others.
    ///
    /// # Errors
    /// One of them is not as its guest says, or has no token.
    pub(super) fn mix(
        &mut self,
        edits: Vec<(ContextId, Edit)>,
        settings: RunSettings,
        tag: Tag,
    ) -> Result<(), Violation> {
        let members: Members = edits.iter().map(|&(id, _)| id).collect();
        for (id, edit) in edits {
            self.edit(id, edit)?;
        }
        self.check_members(&members)?;
        if let Some(reply) = members.first().and_then(|&id| self.reply(id, tag)) {
            self.begin_mixture(members, settings, reply);
        }
        Ok(())
    }

    fn begin_mixture(&mut self, members: Members, settings: RunSettings, reply: Reply) {
        let tag = reply.tag();
        let first = &self.contexts[&members[0]];
        let n_ahead = match settings.ahead {
            Ahead::Adaptive => first.window.n(),
            Ahead::Unbounded => usize::MAX,
        };
        let mut queue = RunReply::new(reply, n_ahead, first.kv.tokens.len());
        if members.iter().any(|id| !self.contexts.contains_key(id)) {
            return queue.push(RunEvent::Failed(EngineError::JobDisturbed));
        }
        let checked = self.check_job_rows(members.len()).and_then(|()| self.check_steering(&members));
        if let Err(error) = checked {
            return queue.push(RunEvent::Failed(error));
        }
        if settings.n_tokens_max == Some(0) {
            return queue.push(RunEvent::Finished(Finish::MaxTokens));
        }
        if members.iter().any(|id| self.contexts[id].kv.end_position() >= self.limits.n_positions_max) {
            return queue.push(RunEvent::Finished(Finish::ContextFull));
        }
        let n_others = members.len() - 1;
        let mut run = RunWork::new(settings, queue, self.contexts[&members[0]].kv.tokens.len());
        let mut first = Some(|member| {
            run.mixture = Some(Mixture { member, n_others });
            Work::Run(run)
        });
        self.begin_job(&members, Wants::Run { drawn: SmallVec::new() }, |_, member| match first.take() {
            Some(first) => first(member),
            None => Work::Mixed(MixedWork::new(member, tag)),
        });
        members.into_iter().for_each(|id| self.enqueue(id));
    }

    /// Whether a context's work is part of a mixture.
    pub(super) fn is_mixed(&self, id: ContextId) -> bool {
        let work = self.contexts.get(&id).and_then(|context| context.work.as_ref());
        work.is_some_and(|work| work.goes_on() && work.member().is_some())
    }

    /// The slot for which the device keeps what was drawn last for a context.
    pub(super) fn drawing_slot(&self, context: &ContextState) -> SlotId {
        match &context.work {
            Some(Work::Mixed(work)) => {
                let first = self.jobs.first(work.member.job).expect("its job is there");
                self.contexts[&first].slot
            }
            _ => context.slot,
        }
    }

    /// What comes next for a mixture, once its members are led up.
    pub(super) fn next_of_mixture(&mut self, members: &Members) -> Next {
        let is_under_way = members.iter().any(|id| self.contexts[id].under_way.is_some());
        let waits = if is_under_way { Next::UnderWay } else { Next::Nothing };
        let has_no_room = |context: &ContextState| {
            context.n_draws_under_way() > 0
                && (context.n_tokens_expected() >= context.kv.n_tokens_most(self.limits.n_positions_max)
                    || context.slot.0 as usize >= self.limits.n_slots)
        };
        if members.iter().any(|id| has_no_room(&self.contexts[id])) {
            return waits;
        }
        let first = self.contexts.get_mut(&members[0]).expect("a member exists");
        let lacks_mask = first.lacks_mask();
        let (window, n_draws) = (first.window, first.n_draws_under_way());
        let wants_more = first.work.as_mut().is_some_and(|work| work.wants_more(window, n_draws));
        match (wants_more, lacks_mask) {
            (true, false) => Next::Draw,
            (true, true) if !is_under_way => Next::LacksMask,
            _ => waits,
        }
    }

    /// Gives up what a mixture that is not under way was admitted for: others may have its pages until it goes on.
    pub(super) fn rest(&mut self, members: &Members, next: Next) {
        for (idx, id) in members.iter().enumerate() {
            self.leave_by_id(*id);
            // The first one is ready but for its mask, and stands for all.
            if idx > 0 || next != Next::LacksMask {
                self.contexts.get_mut(id).expect("a member exists").ready_since = None;
            }
        }
    }

    /// Takes in that the rows of a mixture's draw are there: each member gets the token.
    pub(super) fn take_mixed(&mut self, job: JobId, outputs: SmallVec<[Output; 1]>) {
        let members = self.jobs.members(job);
        let mut outputs = outputs.into_iter();
        let output = outputs.next().expect("the first member's row came first");
        let token = match &output {
            Output::Sampled(candidate) | Output::Programmed(candidate, _) => Some(candidate.token),
            _ => None,
        };
        let n_positions_max = self.limits.n_positions_max;
        let mut is_full = false;
        for id in &members[1..] {
            let context = self.contexts.get_mut(id).expect("a member exists");
            if let Some(token) = token {
                context.push_mixed(token, &mut self.pages);
            }
            is_full |= context.kv.end_position() >= n_positions_max;
        }
        let first = self.contexts.get_mut(&members[0]).expect("a member exists");
        let (pages, causes) = (&mut self.pages, &mut self.stats.causes);
        first.take_run_output(output, &mut outputs, n_positions_max, pages, causes);
        if is_full && first.work.is_some() {
            first.end_run(RunEvent::Finished(Finish::ContextFull), pages, causes);
        }
        if first.work.is_none() {
            self.leave_by_id(members[0]);
            return self.end_mixture(job);
        }
        for id in &members {
            let context = self.contexts.get_mut(id).expect("a member exists");
            if context.under_way.is_none()
                && let Some(member) = context.work.as_mut().and_then(Work::member_mut)
            {
                member.stage = Stage::LeadsUp;
            }
        }
        self.enqueue(members[0]);
    }

    /// Ends the work of the other members of a mixture whose run has ended.
    pub(super) fn end_mixture(&mut self, job: JobId) {
        for id in self.jobs.remove(job) {
            if self.job_of(id) == Some(job) {
                self.leave_by_id(id);
                if let Some(context) = self.contexts.get_mut(&id) {
                    context.kv.forget_unwritten(&mut self.pages);
                    context.end_work(Cause::RowsPastEnd, &mut self.stats.causes);
                }
            }
        }
    }

    /// Ends a mixture because something is done with one of its members, whose guest has had so many of its tokens. The others
    /// are left with those.
    pub(super) fn interrupt_mixture(&mut self, id: ContextId, n_pulled: usize) {
        let Some(job) = self.job_of(id) else { return };
        let Some(first) = self.jobs.first(job) else { return };
        let members = self.jobs.remove(job);
        let mut n_in_vain = 0;
        for &member in &members {
            self.leave_by_id(member);
            let Some(context) = self.contexts.get_mut(&member) else { continue };
            if let Some(Work::Run(mut run)) = context.end_work(Cause::RowsGivenUp, &mut self.stats.causes) {
                if id != first {
                    run.queue.push(RunEvent::Failed(EngineError::JobDisturbed));
                }
                n_in_vain = self.interrupt_run(member, run, n_pulled);
            }
        }
        for member in members.into_iter().filter(|&member| member != id) {
            if let Some(context) = self.contexts.get_mut(&member) {
                let n_tokens = context.kv.tokens.len() - n_in_vain;
                context.kv.truncate(n_tokens, &mut self.pages);
            }
        }
    }
}

impl ContextState {
    /// Gets a token that another context drew.
    fn push_mixed(&mut self, token: Token, pages: &mut crate::kv::PageTable) {
        self.kv.push(token, pages);
        if let Standing::Admitted(term) = &mut self.standing {
            term.note_decoded();
        }
    }
}
