//! Taking in what a step computed.

use super::work::{Progress, RunWork, Work};
use super::{ContextState, Plan, Scheduler};
use crate::batch::Output;
use crate::pages::PageTable;
use crate::run::{Finish, RunEvent};

impl Scheduler {
    /// Takes the outputs of the planned step, in the order of the batch's requests, and answers.
    pub(crate) fn complete(&mut self, plan: Plan, outputs: Vec<Output>) {
        self.stats.n_steps += 1;
        let mut outputs = outputs.into_iter();
        for row in plan.rows {
            let context =
                self.contexts.get_mut(&row.id).expect("no command comes between plan and completion");
            let work = context.work.as_mut().expect("a planned context has work");
            let n_tokens = context.kv.tokens.len();
            let n_outputs = work.outputs(row.start, row.end, n_tokens).len();
            let row_outputs: Vec<Output> = outputs.by_ref().take(n_outputs).collect();
            assert_eq!(row_outputs.len(), n_outputs, "the backend left out an output");
            context.kv.advance(row.end, &mut self.pages);
            let is_last = row.end == work.target(n_tokens);
            match work {
                Work::Ask(ask) => {
                    if let Progress::Finished(answer) = ask.take_outputs(row.start, row_outputs, is_last) {
                        let n_base = ask.n_base;
                        let Some(Work::Ask(ask)) = context.work.take() else { continue };
                        context.kv.truncate(n_base, &mut self.pages);
                        ask.answer(answer);
                    }
                }
                Work::Run(_) => {
                    for output in row_outputs {
                        context.take_run_output(
                            output,
                            self.limits.n_positions_max,
                            self.step,
                            &mut self.pages,
                        );
                    }
                }
            }
            self.enqueue(row.id);
        }
        assert!(outputs.next().is_none(), "the backend returned more than was asked");
    }
}

impl ContextState {
    fn take_run_output(&mut self, output: Output, n_positions_max: usize, step: u64, pages: &mut PageTable) {
        let Some(Work::Run(run)) = &mut self.work else { return };
        let candidate = match output {
            Output::Sampled(candidate) => candidate,
            Output::Failed(fault) => return self.end_run(RunEvent::Failed(fault.into()), step, pages),
            other => unreachable!("a run asks for a draw, not for {other:?}"),
        };
        self.kv.tokens.push(candidate.token);
        run.n_given += 1;
        run.queue.push(RunEvent::Token(candidate));
        self.window.note_taken(run.n_given - run.queue.n_unread());
        if let Some(finish) = finish(run, candidate.token, self.kv.tokens.len(), n_positions_max) {
            self.end_run(RunEvent::Finished(finish), step, pages);
        }
    }

    fn end_run(&mut self, event: RunEvent, step: u64, pages: &mut PageTable) {
        // Nothing follows: a page for what would have is not the guest's to pay for.
        self.kv.forget_unwritten(step, pages);
        if let Some(Work::Run(mut run)) = self.work.take() {
            run.queue.push(event);
        }
    }
}

fn finish(run: &RunWork, token: u32, n_tokens: usize, n_positions_max: usize) -> Option<Finish> {
    if run.settings.stop_tokens.contains(&token) {
        Some(Finish::Stop)
    } else if run.settings.n_tokens_max == Some(run.n_given) {
        Some(Finish::MaxTokens)
    } else if n_tokens >= n_positions_max {
        Some(Finish::ContextFull)
    } else {
        None
    }
}
