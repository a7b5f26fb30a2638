//! Jobs over several contexts: draws that are made at once, searches (`beams`), and mixtures (`mixture`).
//!
//! A job is admitted to pages as a whole, so that two of them never hold what the other waits for. Its members compute what
//! leads up to their last tokens as prompts do. When all are there, their last tokens get rows: those of a mixture in one
//! step, since one token is drawn of them all; those of draws and of a search in as few steps as there is room for, so that
//! hundreds of hypotheses make no step long in which somebody else decodes. The first job that finds no room is looked at
//! before all other work in the next step. Whatever ends the work of one member ends the job. Members that begin alike share
//! the pages of that, also where they have lost them (`joint/alike`).

mod alike;
mod jobs;
mod rest;
mod taken;

use std::ptr;
use std::sync::Arc;

use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use self::alike::Found;
use self::jobs::Job;
pub(super) use self::jobs::{Jobs, Wants};
use super::asked::Asked;
use super::bounds::N_ROWS_PER_PREFILL;
use super::cost::StepWork;
use super::histories::n_history_pages_of;
use super::mixture::Next;
use super::plan::{N_BLOCKS_FOUND_MAX, Placed};
use super::{ContextState, Plan, Scheduler, Source, UnderWay};
use crate::account::Resource;
use crate::backend::PAGE_LEN;
use crate::batch::{Candidate, Output};
use crate::causes::Cause;
use crate::command::{Answer, ContextId, Edit};
use crate::completion::{Done, Reply, Tag};
use crate::error::EngineError;
use crate::job::{JobId, JointWork, Membership, Stage, Wanted, Work};
use crate::kv::BlockId;
use crate::run::RunEvent;
use crate::sampling::Sampler;
use crate::steering::Steering;
use crate::violation::Violation;

pub(super) type Members = SmallVec<[ContextId; 2]>;

/// How much a plan held before the rows of a job, and what was under way of its members.
struct PlanMark {
    n_rows: usize,
    n_copies: usize,
    work: StepWork,
    under_way: SmallVec<[Option<UnderWay>; 2]>,
}

impl Scheduler {
    /// A job that draws the next token of each context.
    ///
    /// # Errors
    /// One of them is not as its guest says, or has no token, or no room for another.
    pub(super) fn draw_together(
        &mut self,
        edits: Vec<(ContextId, Edit)>,
        sampler: Arc<Sampler>,
        tag: Tag,
    ) -> Result<(), Violation> {
        let members: Members = edits.iter().map(|&(id, _)| id).collect();
        for (id, edit) in edits {
            self.edit(id, edit)?;
        }
        self.check_members(&members)?;
        for context in members.iter().filter_map(|id| self.contexts.get(id)) {
            context.check_room(1, self.limits.n_positions_max)?;
        }
        if let Some(reply) = members.first().and_then(|&id| self.reply(id, tag)) {
            self.begin_draws(&members, &sampler, reply);
        }
        Ok(())
    }

    fn begin_draws(&mut self, members: &Members, sampler: &Arc<Sampler>, reply: Reply) {
        let tag = reply.tag();
        if members.iter().any(|id| !self.contexts.contains_key(id)) {
            return reply.send(Done::Answer(Err(EngineError::JobDisturbed)));
        }
        let checked = self.check_job_rows(members.len()).and_then(|()| self.check_steering(members));
        if let Err(error) = checked {
            return reply.send(Done::Answer(Err(error)));
        }
        for id in members {
            self.returns.note_asked(self.contexts[id].owner.guest, self.commons.are_late);
        }
        let wants = Wants::Draws { reply, drawn: vec![None; members.len()] };
        self.begin_job(members, wants, |_, member| {
            Work::Joint(JointWork::new(member, Wanted::Draw(sampler.clone()), tag))
        });
        members.iter().for_each(|&id| self.enqueue(id));
    }

    /// Whether a step takes so many rows of one job.
    pub(super) fn check_job_rows(&self, n_rows: usize) -> Result<(), EngineError> {
        let n_rows_max = self.n_job_rows_max();
        if n_rows > n_rows_max { Err(EngineError::JobTooLarge { n_rows, n_rows_max }) } else { Ok(()) }
    }

    /// Rows of one job that a step takes.
    pub(super) fn n_job_rows_max(&self) -> usize {
        let n_rows_for_all = self.limits.n_rows_max - self.limits.n_rows_max / N_ROWS_PER_PREFILL;
        n_rows_for_all.min(self.limits.n_tokens_max)
    }

    /// Begins a job over contexts that exist and do nothing; `work` is asked for each by its place. The caller puts them into
    /// the queue.
    pub(super) fn begin_job(
        &mut self,
        members: &Members,
        wants: Wants,
        mut work: impl FnMut(usize, Membership) -> Work,
    ) -> JobId {
        let job = JobId(self.jobs.n_made);
        self.jobs.n_made += 1;
        for (idx, id) in members.iter().enumerate() {
            let context = self.contexts.get_mut(id).expect("a member exists");
            context.kv.rewind(context.kv.tokens.len() - 1, &mut self.pages);
            context.kv.forget_shared_unwritten(&mut self.pages);
            context.work = Some(work(idx, Membership::new(job)));
        }
        let alike = self.who_begin_alike(members);
        self.jobs.jobs.insert(job, Job { members: members.clone(), wants, alike, last_step: None });
        job
    }

    /// The job that a context's work is part of.
    pub(super) fn job_of(&self, id: ContextId) -> Option<JobId> {
        self.contexts.get(&id).and_then(|context| context.job())
    }

    /// Takes a job out, and the work of all its members for this cause; a run of its ends with this event.
    fn take_job(&mut self, job: JobId, cause: Cause, event: impl FnOnce() -> RunEvent) -> Option<Wants> {
        let Job { members, wants, .. } = self.jobs.jobs.remove(&job)?;
        self.jobs.waiting.retain(|&waiting| waiting != job);
        let mut run = None;
        for id in members {
            // The one whose work has ended already may have other work by now.
            if self.job_of(id) == Some(job) {
                self.leave_by_id(id);
                let Some(context) = self.contexts.get_mut(&id) else { continue };
                // A page for what was being drawn is not the guest's to pay for.
                context.kv.forget_unwritten(&mut self.pages);
                if let Some(Work::Run(of_first)) = context.end_work(cause, &mut self.stats.causes) {
                    run = Some(of_first);
                }
            }
        }
        if let Some(mut run) = run {
            run.queue.push(event());
        }
        Some(wants)
    }

    /// Ends a job and the work of all its members with an error.
    pub(super) fn end_job(&mut self, job: JobId, error: &EngineError) {
        let cause = match error {
            EngineError::JobDisturbed => Cause::RowsGivenUp,
            _ => Cause::RowsFailed,
        };
        match self.take_job(job, cause, || RunEvent::Failed(error.clone())) {
            Some(Wants::Draws { reply, .. }) => reply.send(Done::Answer(Err(error.clone()))),
            Some(Wants::Search { search, .. }) => search.fail(error.clone()),
            // The run's last event says it.
            Some(Wants::Run { .. }) | None => {}
        }
    }

    /// Ends all jobs.
    pub(super) fn end_all_jobs(&mut self, error: &EngineError) {
        let jobs: Vec<JobId> = self.jobs.jobs.keys().copied().collect();
        jobs.into_iter().for_each(|job| self.end_job(job, error));
    }

    /// A job cannot go on; it ends after the plan being made.
    pub(super) fn fail_job(&mut self, job: JobId, error: EngineError) {
        self.jobs.failed.push((job, error));
    }

    /// Ends the jobs that failed, save those that have rows in a plan that was only just made.
    pub(super) fn end_failed_jobs(&mut self, plan: Option<&Plan>) {
        for (job, error) in std::mem::take(&mut self.jobs.failed) {
            let has_row = |plan: &Plan| plan.rows.iter().any(|row| self.job_of(row.id) == Some(job));
            match plan.is_some_and(has_row) {
                true => self.jobs.failed.push((job, error)),
                false => self.end_job(job, &error),
            }
        }
    }

    /// Answers a job that has what it wants of all its members, the last of it of this one; a search goes on.
    fn take_all(&mut self, job: JobId, id: ContextId) {
        let (reply, drawn) = match self.take_job(job, Cause::RowsGivenUp, || unreachable!("it has no run")) {
            Some(Wants::Draws { reply, drawn }) => (reply, drawn),
            Some(Wants::Search { search, ranked }) => {
                return self.take_ranked(search, ranked.into_iter().flatten());
            }
            Some(Wants::Run { .. }) | None => unreachable!("a run goes on from token to token"),
        };
        let drawn: Result<Vec<Candidate>, EngineError> = drawn
            .into_iter()
            .flatten()
            .map(|output| match output {
                Output::Sampled(candidate) | Output::Programmed(candidate, _) => Ok(candidate),
                Output::Failed(fault) => Err(fault.into()),
                other => unreachable!("a job asks for draws, not for {other:?}"),
            })
            .collect();
        if let Some(context) = self.contexts.get(&id) {
            self.returns.note_answered(context.owner.guest);
        }
        reply.send(Done::Answer(drawn.map(Answer::Together)));
    }

    /// Of the jobs that found no room in the last step, the first goes before all other work in this one. The others stand
    /// in the fair order again, before what else their guests wait for, so that rows are left to what belongs to no job.
    pub(super) fn enqueue_all_jobs_but_first(&mut self) {
        while self.jobs.waiting.len() > 1
            && let Some(job) = self.jobs.waiting.pop_back()
        {
            self.enqueue_job_first(job);
        }
    }

    /// Places the job that found no room in the last step.
    pub(super) fn place_waiting_job(&mut self, n_rows_max: usize, plan: &mut Plan) {
        let Some(job) = self.jobs.waiting.pop_front() else { return };
        let Some(first) = self.jobs.first(job) else { return };
        let n_rows_max = n_rows_max - plan.n_batch_rows();
        let n_tokens_max = self.limits.n_tokens_max - plan.work.n_decode_rows;
        if self.place_member(job, first, n_rows_max, n_tokens_max, plan).is_none() {
            // A member whose KV was given up meanwhile goes on as a prompt.
            self.enqueue(first);
        }
    }

    /// What becomes of a member of a job that is looked at for a step; `None` when it goes on as a prompt.
    pub(super) fn place_member(
        &mut self,
        job: JobId,
        id: ContextId,
        n_rows_max: usize,
        n_tokens_max: usize,
        plan: &mut Plan,
    ) -> Option<Placed> {
        let members = self.jobs.members(job);
        let has_failed = self.jobs.failed.iter().any(|(failed, _)| *failed == job);
        if has_failed {
            return Some(Placed::Nothing);
        }
        if self.jobs.are_placed(job, plan.step) {
            return Some(Placed::UnderWay);
        }
        let is_run = self.jobs.is_run(job);
        // What rides already of a job that rides in parts says nothing of the others.
        let is_under_way = members.iter().any(|id| {
            let context = &self.contexts[id];
            context.under_way.is_some() && (is_run || !context.rides())
        });
        let are_led_up = members.iter().all(|id| self.contexts[id].is_led_up());
        if is_run && are_led_up {
            match self.next_of_mixture(&members) {
                Next::Draw => {}
                Next::UnderWay => return Some(Placed::UnderWay),
                next @ (Next::LacksMask | Next::Nothing) => {
                    // One that stands in line is ended or admitted when its turn comes.
                    self.rest(&members, next);
                    return Some(Placed::Nothing);
                }
            }
        }
        match self.admit_job(job, &members) {
            Ok(true) => {}
            Ok(false) => return Some(Placed::Nothing),
            // A run may be at its end with what is under way.
            Err(_) if is_under_way => return Some(Placed::UnderWay),
            Err(error) => {
                self.fail_job(job, error);
                return Some(Placed::Nothing);
            }
        }
        if self.contexts.get(&id).is_none_or(|context| !context.is_led_up()) {
            return match self.find_blocks_of_others(job, id) {
                Found::All => None,
                Found::Later => Some(Placed::UnderWay),
            };
        }
        // What is drawn next in a mixture can be planned behind what it draws now.
        let is_ready = |id| {
            let context: &ContextState = &self.contexts[id];
            context.is_led_up() && (context.under_way.is_none() || context.n_draws_under_way() > 0)
        };
        let rest = self.rest_of(job);
        if !rest.iter().all(is_ready) {
            // The job is looked at when its last member is there.
            members.iter().for_each(|&id| self.enqueue_prompt(id));
            return Some(Placed::UnderWay);
        }
        let n_in_part = match is_run {
            true => rest.len(),
            false => self.n_rows_of_part(rest.len(), n_rows_max.min(n_tokens_max), plan),
        };
        let part: Members = rest[..n_in_part].iter().copied().collect();
        if part.is_empty() {
            return Some(Placed::UnderWay);
        }
        let placed = match self.place_all(&part, &members, n_rows_max, n_tokens_max, plan) {
            Ok(placed) => placed,
            Err(_) if is_under_way => return Some(Placed::UnderWay),
            Err(error) => {
                self.fail_job(job, error);
                return Some(Placed::Nothing);
            }
        };
        match placed {
            // It is looked at again when that has come.
            Placed::Waits if is_under_way => {}
            Placed::Waits => self.jobs.wait(job),
            Placed::Row { .. } => {
                let placed = self.jobs.jobs.get_mut(&job).expect("it has rows");
                placed.last_step = Some(plan.step);
                if part.len() < rest.len() {
                    plan.jobs_in_parts.push(job);
                }
                return Some(Placed::Row { n_tokens: part.len() });
            }
            Placed::UnderWay | Placed::LacksMask | Placed::Nothing => {}
        }
        Some(Placed::UnderWay)
    }

    /// Members that wait for what others compute look for it again.
    pub(super) fn enqueue_prompts(&mut self, job: JobId) {
        self.jobs.members(job).into_iter().for_each(|id| self.enqueue_prompt(id));
    }

    /// A member that lost its KV while it waited is in the queue again.
    fn enqueue_prompt(&mut self, id: ContextId) {
        let is_prompt = |context: &ContextState| !context.is_led_up() && context.under_way.is_none();
        if self.contexts.get(&id).is_some_and(|context| is_prompt(context)) {
            self.enqueue(id);
        }
    }

    /// Gives the last token of each member of a part a row, or none of them.
    fn place_all(
        &mut self,
        part: &Members,
        members: &Members,
        n_rows_max: usize,
        n_tokens_max: usize,
        plan: &mut Plan,
    ) -> Result<Placed, EngineError> {
        let n_rows = part.len();
        if n_rows > n_rows_max || n_rows > n_tokens_max || plan.n_blocks_found >= N_BLOCKS_FOUND_MAX {
            return Ok(Placed::Waits);
        }
        let before = PlanMark {
            n_rows: plan.rows.len(),
            n_copies: plan.copies.len(),
            work: plan.work,
            under_way: part.iter().map(|id| self.contexts[id].under_way).collect(),
        };
        self.set_stage(part, Stage::Rides);
        let asked = plan.asked.with(self.asked_of_job(part, plan), &self.limits.asks);
        self.reset_stage(part, &before);
        let Some(asked) = asked else { return Ok(Placed::Waits) };
        let needed = self.pages_of_job(part)?;
        let Some(n_needed) = needed else { return Ok(Placed::UnderWay) };
        if n_needed > 0 && !self.make_room_for_all(n_needed, members, plan) {
            return Ok(Placed::Waits);
        }
        if !self.bring_all_back(part, plan) {
            return Ok(Placed::Waits);
        }
        self.set_stage(part, Stage::Rides);
        for &id in part {
            let mut context = self.contexts.remove(&id).expect("a member exists");
            let placed = self.place_context(&mut context, id, 1, plan);
            self.contexts.insert(id, context);
            if !matches!(placed, Ok(Placed::Row { .. })) {
                self.take_back(part, plan, &before);
                self.reset_stage(part, &before);
                return placed.map(|_| Placed::Waits);
            }
        }
        plan.asked = asked;
        Ok(Placed::Row { n_tokens: n_rows })
    }

    /// What all members ask for when they ride.
    fn asked_of_job(&self, members: &Members, plan: &Plan) -> Asked {
        let mut added = SmallVec::<[&Steering; 2]>::new();
        members.iter().fold(Asked::default(), |sum, id| {
            let context = self.contexts.get(id).expect("a member exists");
            let n_tokens = context.n_tokens_expected();
            let requests = context.work.as_ref().map(|work| work.outputs(n_tokens - 1, n_tokens, n_tokens));
            let steered = context.kv.steered(n_tokens - 1, n_tokens);
            let steered =
                steered.filter(|steered| !added.iter().any(|other| ptr::eq(*other, steered.steering)));
            added.extend(steered.map(|steered| steered.steering));
            let of_member = Asked::of(&requests.unwrap_or_default(), steered, &self.limits, &plan.given);
            let n_history_pages = n_history_pages_of(context, &(n_tokens - 1..n_tokens), n_tokens);
            sum.plus(of_member.looking_at(n_history_pages))
        })
    }

    fn set_stage(&mut self, members: &Members, to: Stage) {
        for id in members {
            let work = self.contexts.get_mut(id).and_then(|context| context.work.as_mut());
            if let Some(member) = work.and_then(Work::member_mut) {
                member.stage = to;
            }
        }
    }

    /// As it was before the rows of a job were planned: those before them ride, if there are any.
    fn reset_stage(&mut self, members: &Members, before: &PlanMark) {
        if before.under_way.iter().all(Option::is_none) {
            self.set_stage(members, Stage::LeadsUp);
        }
    }

    /// Takes the rows of a job out of a plan again.
    fn take_back(&mut self, members: &Members, plan: &mut Plan, before: &PlanMark) {
        let has_copies = plan.copies.len() > before.n_copies;
        plan.copies.truncate(before.n_copies);
        let mut losers = Members::new();
        for row in plan.rows.drain(before.n_rows..) {
            let context = self.contexts.get_mut(&row.id).expect("a context with a row exists");
            let idx = members.iter().position(|&id| id == row.id).expect("they are the job's");
            context.under_way = before.under_way[idx];
            row.account.release(Resource::Tokens, row.n_charged);
            self.stats.n_tokens -= (row.end - row.start) as u64;
            self.stats.n_tokens_again -= row.n_again() as u64;
            if has_copies {
                // The beginning of what it was to write may be a copy that is not made.
                context.kv.lose_after(context.kv.block_of(row.start), &mut self.pages);
                losers.push(row.id);
            }
        }
        // What they were promised is less than they need now. The job asks again.
        losers.into_iter().for_each(|id| self.leave_by_id(id));
        plan.work = before.work;
    }

    /// Pages that have to be found before all members can write their last tokens; `None` when one of them is to compute
    /// something again instead of copying it, there being no room for both.
    fn pages_of_job(&mut self, members: &Members) -> Result<Option<usize>, EngineError> {
        let mut held = FxHashSet::default();
        let mut copying = Members::new();
        let (mut n_new, mut n_copied, mut n_away) = (0, 0, 0);
        let mut before: &[BlockId] = &[];
        for id in members {
            let context = &self.contexts[id];
            let blocks = context.kv.blocks();
            // What members share comes back once.
            let is_away = |block: &&BlockId| held.insert(**block) && self.pages.page(**block).is_none();
            n_away += unlike(blocks, before).iter().filter(is_away).count();
            before = blocks;
            let n_found = blocks.len().max(context.n_blocks_found());
            n_new += context.kv.n_blocks_until(context.n_tokens_expected()).saturating_sub(n_found);
            let written = blocks.get(context.kv.block_of(context.start())..).unwrap_or_default();
            let n = written.iter().filter(|&&block| self.pages.is_shared(block)).count();
            n_copied += n;
            if n > 0 && context.under_way.is_none() {
                copying.push(*id);
            }
        }
        let (n_pages, n_needed) = (self.n_pages_most, held.len() + n_new + n_copied);
        // What the model does not have now it can get.
        if n_needed <= n_pages {
            return Ok(Some(n_new + n_copied + n_away));
        }
        if copying.is_empty() {
            return Err(EngineError::NoPages { n_needed, n_pages });
        }
        for id in copying {
            let context = self.contexts.get_mut(&id).expect("a member exists");
            context.kv.lose_after(context.kv.block_of(context.kv.n_computed), &mut self.pages);
            if context.is_admitted() {
                // It needs more than it was promised. The job asks again.
                self.leave_by_id(id);
            }
            self.enqueue(id);
        }
        Ok(None)
    }

    /// Sees to it that a job needs no more pages than it can have, at the cost of computing some of it again.
    pub(super) fn fit_job(&mut self, job: JobId, members: &Members) -> Result<(), EngineError> {
        loop {
            self.note_what_is_found(job);
            match self.pages_of_job(members) {
                Ok(Some(_)) => return Ok(()),
                Ok(None) => {}
                Err(_) if self.give_up_doubles(job) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn make_room_for_all(&mut self, n_needed: usize, members: &Members, plan: &mut Plan) -> bool {
        let mut before: &[BlockId] = &[];
        for id in members {
            let blocks = self.contexts[id].kv.blocks();
            unlike(blocks, before).iter().for_each(|&block| self.pages.pin(block));
            before = blocks;
        }
        let first = self.contexts.remove(&members[0]).expect("a member exists");
        let is_there = self.make_room(n_needed, &first, plan);
        self.contexts.insert(members[0], first);
        is_there
    }

    /// Brings what members have in host memory to the device, as [`Self::bring_back`].
    fn bring_all_back(&mut self, members: &Members, plan: &mut Plan) -> bool {
        members.iter().all(|id| {
            let mut context = self.contexts.remove(id).expect("a member exists");
            let is_all = context.kv.locate(&self.pages) == 0 || self.bring_back(&mut context, plan);
            self.contexts.insert(*id, context);
            is_all
        })
    }

    /// Whether all members may take pages. If not, the first stands in the line for them.
    fn admit_job(&mut self, job: JobId, members: &Members) -> Result<bool, EngineError> {
        let mut is_in = |id| {
            let Some(mut context) = self.contexts.remove(id) else { return false };
            let is_in = context.is_admitted() && !self.needs_more(&mut context);
            self.contexts.insert(*id, context);
            is_in
        };
        if members.iter().all(&mut is_in) {
            return Ok(true);
        }
        if members.iter().any(|id| self.contexts.get(id).is_some_and(|context| context.is_in_line())) {
            return Ok(false);
        }
        let goes_first = self.jobs.is_run(job) && self.is_mixture_spared(members);
        members.iter().for_each(|&id| self.leave_by_id(id));
        // What does not fit the device alone would hold others up for nothing.
        self.fit_job(job, members)?;
        if (self.line.is_empty() || goes_first) && self.admit_all(members).is_ok() {
            return Ok(true);
        }
        self.enter_line(members);
        Ok(false)
    }

    /// Admits a job at the head of the line, or makes room for it; returns whether there is any use in looking again.
    pub(super) fn admit_job_from_line(&mut self, job: JobId, first: ContextId) -> bool {
        let members = self.jobs.members(job);
        // While it stood in line its members may have lost pages, and the device some of its own.
        if let Err(error) = self.fit_job(job, &members) {
            self.leave_by_id(first);
            self.fail_job(job, error);
            return true;
        }
        match self.admit_all(&members) {
            Ok(()) => {
                self.line.leave(first);
                self.held.forget();
                members.into_iter().for_each(|id| self.enqueue(id));
                true
            }
            // Others are asked first.
            Err(_) if self.source == Source::Others => false,
            Err(n_pages) => self.end_terms(n_pages.min(self.limits.n_pages)),
        }
    }
}

/// The blocks behind those with which two members that follow one another begin alike: hypotheses have most of theirs in
/// common, and a look at each block of each would take as long as all else between two steps.
fn unlike<'a>(blocks: &'a [BlockId], before: &[BlockId]) -> &'a [BlockId] {
    &blocks[blocks.iter().zip(before).take_while(|(block, other)| block == other).count()..]
}

impl ContextState {
    /// The job that its work is part of.
    pub(super) fn job(&self) -> Option<JobId> {
        self.work.as_ref().and_then(Work::job)
    }

    /// Whether all before its last token is computed, or will be by rows under way.
    pub(super) fn is_led_up(&self) -> bool {
        self.start() + 1 >= self.kv.tokens.len()
    }
}
