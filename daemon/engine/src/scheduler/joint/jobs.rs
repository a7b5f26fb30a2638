//! The jobs over several contexts that are not done.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::Members;
use super::alike::Alike;
use crate::batch::Output;
use crate::command::ContextId;
use crate::completion::{Reply, Tag};
use crate::error::EngineError;
use crate::job::JobId;
use crate::scheduler::beams::Searching;

#[derive(Debug)]
pub(super) struct Job {
    /// Contexts of one guest. The first stands in the line for all.
    pub(super) members: Members,
    pub(super) wants: Wants,
    /// For each member, one before it that begins alike.
    pub(super) alike: Vec<Option<Alike>>,
    /// The last step that its rows were planned for.
    pub(super) last_step: Option<u64>,
}

/// What a job wants.
#[derive(Debug)]
pub(in crate::scheduler) enum Wants {
    /// A draw after each member; what was drawn so far.
    Draws { reply: Reply, drawn: Vec<Option<Output>> },
    /// The tokens of a run, which its first member has; what that one drew and looked at, until the rows of the others are
    /// taken in.
    Run { drawn: SmallVec<[Output; 1]> },
    /// The candidates of each row of a beam search, which goes on with them in another job; those that have come.
    Search { search: Box<Searching>, ranked: Vec<Option<Output>> },
}

/// Jobs over several contexts that are not done.
#[derive(Debug, Default)]
pub(in crate::scheduler) struct Jobs {
    pub(super) jobs: FxHashMap<JobId, Job>,
    pub(super) n_made: u64,
    /// Those whose members are all ready, and that found no room in a step.
    pub(super) waiting: VecDeque<JobId>,
    /// Those that failed while a step was planned that may have rows of theirs: they end once it is on its way.
    pub(super) failed: Vec<(JobId, EngineError)>,
}

impl Jobs {
    pub(in crate::scheduler) fn have_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(in crate::scheduler) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.waiting.is_empty()
    }

    /// The search over this context that was asked for with the tag.
    pub(in crate::scheduler) fn search_of(&self, base: ContextId, tag: Tag) -> Option<JobId> {
        let is_it = |job: &Job| matches!(&job.wants, Wants::Search { search, .. } if search.is_of(base, tag));
        self.jobs.iter().find(|(_, job)| is_it(job)).map(|(&id, _)| id)
    }

    pub(in crate::scheduler) fn search_mut(&mut self, job: JobId) -> Option<&mut Searching> {
        match &mut self.jobs.get_mut(&job)?.wants {
            Wants::Search { search, .. } => Some(search),
            Wants::Draws { .. } | Wants::Run { .. } => None,
        }
    }

    /// Those that want a draw of each member.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(in crate::scheduler) fn n_draws(&self) -> usize {
        self.jobs.values().filter(|job| matches!(job.wants, Wants::Draws { .. })).count()
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(in crate::scheduler) fn n_searches(&self) -> usize {
        self.jobs.values().filter(|job| matches!(job.wants, Wants::Search { .. })).count()
    }

    pub(in crate::scheduler) fn members(&self, job: JobId) -> Members {
        self.jobs.get(&job).map_or_else(Members::new, |job| job.members.clone())
    }

    /// For each member whether what is wanted of it has come.
    pub(in crate::scheduler) fn have_come(&self, job: JobId) -> impl Iterator<Item = bool> {
        let come: &[Option<Output>] = match self.jobs.get(&job).map(|job| &job.wants) {
            Some(Wants::Draws { drawn: come, .. } | Wants::Search { ranked: come, .. }) => come,
            Some(Wants::Run { .. }) | None => &[],
        };
        come.iter().map(Option::is_some)
    }

    /// Rows that a job has yet to get.
    pub(in crate::scheduler) fn n_rows_of(&self, job: JobId) -> usize {
        let n_come = self.have_come(job).filter(|&has_come| has_come).count();
        self.jobs.get(&job).map_or(0, |job| job.members.len() - n_come)
    }

    /// The least of them that one step takes.
    pub(in crate::scheduler) fn n_rows_least(&self, job: JobId) -> usize {
        if self.is_run(job) { self.n_rows_of(job) } else { 1 }
    }

    /// Rows of jobs that found no room and stand in no queue.
    pub(in crate::scheduler) fn n_rows_waiting(&self) -> usize {
        self.waiting.iter().map(|&job| self.n_rows_of(job)).sum()
    }

    /// The first member.
    pub(in crate::scheduler) fn first(&self, job: JobId) -> Option<ContextId> {
        self.jobs.get(&job)?.members.first().copied()
    }

    /// Rows that come with that of a member which waits: of a search, the first stands for all.
    pub(in crate::scheduler) fn n_rows_with(&self, member: ContextId, job: JobId) -> usize {
        match self.jobs.get(&job) {
            Some(Job { wants: Wants::Search { .. }, members, .. }) if members[0] == member => {
                self.n_rows_of(job)
            }
            _ => 1,
        }
    }

    /// Takes a job out; returns its members.
    pub(in crate::scheduler) fn remove(&mut self, job: JobId) -> Members {
        self.waiting.retain(|&waiting| waiting != job);
        self.jobs.remove(&job).map_or_else(Members::new, |job| job.members)
    }

    pub(super) fn is_run(&self, job: JobId) -> bool {
        matches!(self.jobs.get(&job), Some(Job { wants: Wants::Run { .. }, .. }))
    }

    /// Whether a job's rows are in the plan of this step.
    pub(super) fn are_placed(&self, job: JobId, step: u64) -> bool {
        self.jobs.get(&job).is_some_and(|job| job.last_step == Some(step))
    }

    pub(super) fn wait(&mut self, job: JobId) {
        if !self.waiting.contains(&job) {
            self.waiting.push_back(job);
        }
    }
}
