//! What comes back for the members of a job.

use smallvec::SmallVec;

use super::{Job, Scheduler, Wants};
use crate::batch::Output;
use crate::command::ContextId;
use crate::job::{JobId, Stage, Work};

impl Scheduler {
    /// Takes in the row of a member, with what it asked for: one thing, and behind the draw of a run what is looked at.
    pub(in crate::scheduler) fn take_member(
        &mut self,
        job: JobId,
        id: ContextId,
        mut outputs: SmallVec<[Output; 1]>,
    ) {
        if outputs.is_empty() {
            // It has computed a part of what leads up.
            self.enqueue_prompts(job);
            return self.enqueue_again(id);
        }
        let Some(Job { members, wants, .. }) = self.jobs.jobs.get_mut(&job) else { return };
        let (idx, n_members) = (members.iter().position(|&member| member == id), members.len());
        let idx = idx.expect("it is of a member");
        match wants {
            Wants::Draws { drawn, .. } | Wants::Search { ranked: drawn, .. } => {
                drawn[idx] = outputs.pop();
                if drawn.iter().all(Option::is_some) {
                    return self.take_all(job, id);
                }
                // It waits for those that ride in later steps.
                let context = self.contexts.get_mut(&id).expect("it had a row");
                if let Some(member) = context.work.as_mut().and_then(Work::member_mut) {
                    member.stage = Stage::LeadsUp;
                }
            }
            Wants::Run { drawn } => {
                if idx == 0 {
                    *drawn = outputs;
                }
                // The rows of a job lie in the order of its members.
                if idx + 1 == n_members {
                    let outputs = std::mem::take(drawn);
                    self.take_mixed(job, outputs);
                }
            }
        }
    }
}
