//! Taking in what a step computed.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::admission::Standing;
use super::plan::PlannedRow;
use super::{ContextState, Plan, Scheduler, StepUnderWay};
use crate::account::Resource;
use crate::batch::{CellMove, Drawn, Input, Output};
use crate::causes::{Cause, Causes};
use crate::command::{Answer, Ask, ContextId};
use crate::fair::Class;
use crate::job::{AskOutcome, LateMasks, RunWork, VerifyWork, Work};
use crate::kv::PageTable;
use crate::run::{Finish, RunEvent};
use crate::stats::EngineStats;

impl Plan {
    /// Tells those who look on at a guest that it was in the step.
    pub(crate) fn show(&self, ended: Instant, elapsed: Duration) {
        for row in &self.rows {
            if let Some(steps) = row.account.steps() {
                steps.note_row(ended, elapsed, row.end - row.start);
            }
        }
    }
}

impl Scheduler {
    /// Takes in the outputs of the oldest step under way, in the order of the batch's requests, and answers.
    ///
    /// `elapsed_ns` is how long the step took.
    pub(crate) fn complete(&mut self, mut plan: Plan, outputs: Vec<Output>, elapsed_ns: u64) {
        let under_way = self.steps_under_way.pop_front().filter(|under_way| under_way.step == plan.step);
        self.keep_ids(under_way.expect("steps are taken in in their order"));
        self.commons.n_under_way -= 1;
        self.stats.n_steps += 1;
        self.stats.n_rows += plan.rows.len() as u64;
        self.outbox.runs().note_step(plan.rows.iter().map(|row| row.end - row.start).sum());
        let of_prompts = plan.rows.iter().filter(|row| row.class == Class::Prompt);
        self.stats.n_tokens_of_prompts += of_prompts.map(|row| row.n_charged).sum::<u64>();
        self.stats.device_busy += Duration::from_nanos(elapsed_ns);
        self.charge_rest(&plan, elapsed_ns);
        self.costs.learn(plan.work, elapsed_ns);
        let n_decode_rows = plan.work.n_decode_rows;
        let alone_ns =
            (n_decode_rows > 0).then(|| self.costs.target_ns(n_decode_rows, 1.0).unwrap_or(elapsed_ns));
        self.commons.note_step(self.settings.place, alone_ns);
        let target_ns = alone_ns.map(|ns| (ns as f64 * self.settings.latency_multiple) as u64);
        self.debt.note_step(elapsed_ns, plan.work.n_prompt_tokens > 0, target_ns);
        if !plan.is_kept {
            // Nobody else could have ridden with that, and who waits for its end has not been answered.
            self.returns.note_missed();
        }
        self.end_failed_jobs(None);
        let mut outputs = outputs.into_iter();
        let mut let_go: SmallVec<[ContextId; 4]> = SmallVec::new();
        for row in plan.rows.drain(..) {
            let mut row_outputs = outputs.by_ref().take(row.n_outputs);
            let context = self.contexts.get_mut(&row.id).filter(|context| context.epoch == row.epoch);
            let Some(context) = context else {
                // Its work ended while it was under way.
                row_outputs.for_each(drop);
                // A guest pays for a prompt that it gave up, not for tokens that the scheduler took for certain.
                let n_free = match row.input {
                    Input::Known => row.n_charged.min(row.n_expected as u64),
                    Input::Drawn(_) => row.n_charged,
                };
                row.account.release(Resource::Tokens, n_free);
                continue;
            };
            context.note_taken_in(&row);
            if !row.is_of_head() {
                let n_blocks = context.kv.blocks().len();
                context.kv.advance(row.end_in_order(), &mut self.pages);
                let n_let_go = n_blocks - context.kv.blocks().len();
                // A row behind it has written over what it left.
                let is_last_row = context.under_way.is_none();
                context.kv.set_state((row.keeps_state && is_last_row).then_some(row.end));
                if n_let_go > 0 {
                    self.note_let_go(row.id, n_let_go);
                    let_go.push(row.id);
                }
            }
            let context = self.contexts.get_mut(&row.id).expect("it has a row");
            let work = context.work.as_mut().expect("a row of this epoch has its work");
            if let Some(job) = work.job() {
                self.take_member(job, row.id, row_outputs.collect());
                continue;
            }
            let is_last = row.end == work.target(row.n_tokens);
            match work {
                Work::Ask(ask) => {
                    let row_outputs: Vec<Output> = row_outputs.collect();
                    assert_eq!(row_outputs.len(), row.n_outputs, "the backend left out an output");
                    if let AskOutcome::Finished(answer) = ask.take_outputs(row.start, row_outputs, is_last) {
                        let n_base = ask.n_base;
                        if let Some(Work::Ask(ask)) = context.take_work() {
                            if !matches!(ask.ask(), Ask::Keep) {
                                self.returns.note_answered(context.owner.guest);
                            }
                            self.spares.note(row.id, context, n_base);
                            ask.answer(answer);
                        }
                    }
                }
                Work::Verify(_) if is_last => {
                    if let Some(Work::Verify(verify)) = context.take_work() {
                        self.returns.note_answered(context.owner.guest);
                        let row_outputs: Vec<Output> = row_outputs.collect();
                        assert_eq!(row_outputs.len(), row.n_outputs, "the backend left out an output");
                        let n_base = verify.n_base;
                        let (pages, cell_moves) = (&mut self.pages, &mut self.cell_moves);
                        context.take_verified(verify, row_outputs, pages, cell_moves, &mut self.stats);
                        self.spares.note(row.id, context, n_base);
                    }
                }
                Work::Verify(_) => {}
                Work::Joint(_) | Work::Mixed(_) => unreachable!("they are parts of jobs"),
                Work::Run(run) => {
                    let draws: SmallVec<[Output; 1]> = row_outputs.by_ref().take(run.n_draws()).collect();
                    let n_blocks = context.kv.blocks().len();
                    let mut n_forced = 0;
                    for draw in draws {
                        let n_positions_max = self.limits.n_positions_max;
                        let (pages, causes) = (&mut self.pages, &mut self.stats.causes);
                        if !context.take_run_output(draw, &mut row_outputs, n_positions_max, pages, causes) {
                            break;
                        }
                        n_forced += 1;
                    }
                    row_outputs.for_each(drop);
                    self.stats.n_tokens_forced += n_forced;
                    context.owner.account.note_forced(n_forced);
                    // What was not drawn after all may have taken a page that comes free now, and is needed again.
                    let n_let_go = n_blocks.saturating_sub(context.kv.blocks().len());
                    if n_let_go > 0 && context.work.is_some() {
                        self.note_let_go(row.id, n_let_go);
                        let_go.push(row.id);
                    }
                }
            }
            if self.contexts.get(&row.id).is_some_and(|context| context.work.is_none()) {
                self.leave_by_id(row.id);
            }
            self.enqueue_again(row.id);
        }
        assert!(outputs.next().is_none(), "the backend returned more than was asked");
        self.check_room_after(&let_go);
        plan.clear();
        self.spare_plans.push(plan);
    }

    /// Keeps the memory of a step that is not under way any more.
    fn keep_ids(&mut self, under_way: StepUnderWay) {
        let mut ids = under_way.ids;
        ids.clear();
        self.spare_ids.push(ids);
    }
}

impl ContextState {
    fn note_taken_in(&mut self, row: &PlannedRow) {
        let under_way = self.under_way.as_mut().expect("a row of this epoch is under way");
        under_way.n_rows -= 1;
        under_way.n_draws -= usize::from(row.draws);
        if under_way.n_rows == 0 {
            self.under_way = None;
        }
    }

    /// Answers a verification. The KV of tokens that were accepted stays for the edit that appends them.
    fn take_verified(
        &mut self,
        work: VerifyWork,
        outputs: Vec<Output>,
        pages: &mut PageTable,
        cell_moves: &mut Vec<CellMove>,
        stats: &mut EngineStats,
    ) {
        let verified = work.take_outputs(outputs);
        let n_accepted = verified.as_ref().map_or(0, |verified| verified.n_accepted);
        let (n_guessed, n_right) = (work.guess().len() as u64, n_accepted as u64);
        self.owner.account.note_guessed(n_guessed, n_right);
        stats.note_guessed(n_guessed, n_right);
        self.note(Cause::TokensGuessedWrong, n_guessed - n_right, &mut stats.causes);
        match (&verified, work.tree()) {
            (Ok(verified), Some(_)) => {
                self.kv.keep_branch(work.n_base, &verified.branch, pages, cell_moves);
            }
            _ => self.kv.truncate(work.n_base + n_accepted, pages),
        }
        work.answer(verified.map(|verified| Answer::Verified(verified.drawn)));
    }

    /// Takes in what a run drew, and what was looked at beside it; whether the next draw of the row was made behind that.
    pub(super) fn take_run_output(
        &mut self,
        output: Output,
        looked: &mut impl Iterator<Item = Output>,
        n_positions_max: usize,
        pages: &mut PageTable,
        causes: &mut Causes,
    ) -> bool {
        if output == Output::SatOut {
            self.note(Cause::RowsSatOut, 1, causes);
        }
        let Some(Work::Run(run)) = &mut self.work else { return false };
        let drawn = match output {
            Output::Sampled(candidate) => Ok((candidate, None)),
            Output::Programmed(candidate, left) => Ok((candidate, Some(left))),
            Output::SatOut => {
                run.masks.iter_mut().for_each(LateMasks::note_sat_out);
                return false;
            }
            Output::Failed(fault) => Err(fault),
            other => unreachable!("a run asks for a draw, not for {other:?}"),
        };
        let drawn = drawn.and_then(|drawn| Ok((drawn, run.settings.sampler.looks.take(looked)?)));
        let ((candidate, left), seen) = match drawn {
            Ok(drawn) => drawn,
            Err(fault) => {
                self.give_up_expected(pages, causes);
                self.end_run(RunEvent::Failed(fault.into()), pages, causes);
                return false;
            }
        };
        let was_expected = self.take_drawn(candidate.token, pages, causes);
        let Some(Work::Run(run)) = &mut self.work else { unreachable!("a run stays one") };
        run.n_given += 1;
        run.masks.iter_mut().for_each(|masks| masks.note_drawn(candidate.token));
        if let Some(left) = &left {
            run.next = left.next;
        }
        run.queue.push(RunEvent::Token(Drawn { candidate, left, seen }));
        self.window.note_taken(run.n_given - run.queue.n_unread());
        if let Standing::Admitted(term) = &mut self.standing {
            term.note_decoded();
        }
        let end_position = self.kv.end_position() - run.n_expected;
        let ended = finish(run, candidate.token, end_position, n_positions_max).map(RunEvent::Finished);
        let ended = ended.or_else(|| {
            let end = run.masks.as_mut()?.take_end()?;
            Some(end.map_or_else(RunEvent::Failed, RunEvent::Finished))
        });
        if let Some(event) = ended {
            self.end_run(event, pages, causes);
            return false;
        }
        was_expected
    }

    pub(super) fn end_run(&mut self, event: RunEvent, pages: &mut PageTable, causes: &mut Causes) {
        // Nothing follows: a page for what would have is not the guest's to pay for.
        self.kv.forget_unwritten(pages);
        if let Some(Work::Run(mut run)) = self.end_work(Cause::RowsPastEnd, causes) {
            run.queue.push(event);
        }
    }
}

fn finish(run: &RunWork, token: u32, end_position: usize, n_positions_max: usize) -> Option<Finish> {
    if run.settings.stop_tokens.contains(&token) {
        Some(Finish::Stop)
    } else if run.settings.n_tokens_max == Some(run.n_given) {
        Some(Finish::MaxTokens)
    } else if end_position >= n_positions_max {
        Some(Finish::ContextFull)
    } else {
        None
    }
}
