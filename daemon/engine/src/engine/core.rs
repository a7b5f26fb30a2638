//! The engine as a value: operations go in, the device works, completions come out. It has no thread, waits for nothing and
//! reads no clock.
//!
//! Whoever drives it calls [`Core::turn`] with what has come in, and does what the turn asks for before the next one.

mod late;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::account::Owner;
use crate::backend::{Backend, BackendError, Collected, Damage};
use crate::batch::{self, Row};
use crate::command::Operation;
use crate::completion::{CallerId, Completion};
use crate::error::{EngineError, EngineFailure};
use crate::scheduler::{Move, Plan, Scheduler};

/// So many steps that fail, with none between them that succeeds, are taken for a device that is lost.
const N_STEPS_FAILED_MAX: usize = 3;

/// A step waits for guests that ask again at once for this share of the step before, and for no longer than this. Waking
/// a guest's thread takes some tens of microseconds, and a guest that comes too late waits for two steps.
const LINGER_SHARE: u32 = 33;
const LINGER_MAX: Duration = Duration::from_micros(250);

/// What comes in.
#[derive(Debug)]
pub(super) enum Input {
    /// A guest that asks from now on.
    Enter(CallerId, Owner),
    /// A guest that has asked its last.
    Leave(CallerId),
    /// What a guest asks.
    Operation(Operation),
    /// The end.
    Shutdown,
}

/// What has to happen before the next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Something comes in.
    Input,
    /// Nothing.
    Turn,
    /// [`Core::wait`], for the device.
    Device,
    /// Something comes in, or the device is done with the layers of the last step: [`Core::is_held_up`].
    InputOrLayers,
    /// Something comes in, or this moment.
    InputBefore(Instant),
    /// There is no next turn.
    Stop,
}

/// Guests that were just answered and are expected to ask again at once.
#[derive(Clone, Copy, Debug)]
enum Linger {
    /// To wait for, from the next turn on.
    AtMost(Duration),
    Until(Instant),
}

/// One backend, what it computes, and for whom.
pub(super) struct Core {
    scheduler: Scheduler,
    backend: Box<dyn Backend>,
    /// Steps that were submitted, the oldest first.
    under_way: VecDeque<Plan>,
    /// What came of the oldest.
    collected: Option<Result<Collected, BackendError>>,
    linger: Option<Linger>,
    n_steps_failed: usize,
    /// Memory for the rows of a step.
    rows: Vec<Row<'static>>,
}

impl Core {
    pub(super) fn new(scheduler: Scheduler, backend: Box<dyn Backend>) -> Self {
        Self {
            scheduler,
            backend,
            under_way: VecDeque::new(),
            collected: None,
            linger: None,
            n_steps_failed: 0,
            rows: Vec::new(),
        }
    }

    /// The device's name for people.
    pub(super) fn device(&self) -> &str {
        self.backend.device()
    }

    /// Carries out what has come in, then takes in the step that is done or submits the next. What is to be given back
    /// goes into the empty list `completions`.
    ///
    /// # Errors
    /// The engine has come to its end.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        inputs: impl IntoIterator<Item = Input>,
        completions: &mut Vec<Completion>,
    ) -> Result<Next, EngineFailure> {
        let next = self.go_on(now, inputs);
        self.scheduler.take_completions(completions);
        next
    }

    fn go_on(
        &mut self,
        now: Instant,
        inputs: impl IntoIterator<Item = Input>,
    ) -> Result<Next, EngineFailure> {
        let collected = match self.collected.take() {
            Some(Err(error)) => {
                let plan = self.oldest();
                self.note_failed(&plan, plan.moves.len(), error)?;
                None
            }
            Some(Ok(collected)) => Some(collected),
            None => None,
        };
        // Guests that the step before answered have asked again meanwhile, and are in time.
        for input in inputs {
            match input {
                Input::Enter(caller, owner) => self.scheduler.enter(caller, owner),
                Input::Leave(caller) => self.scheduler.leave_for_good(caller),
                Input::Operation(operation) => self.scheduler.apply(operation),
                Input::Shutdown => return Ok(Next::Stop),
            }
        }
        if let Some(collected) = collected {
            self.take_in(collected);
            return Ok(Next::Turn);
        }
        if let Some(next) = self.attend_to_masks()? {
            return Ok(next);
        }
        if let Some(until) = self.lingers_until(now) {
            return Ok(Next::InputBefore(until));
        }
        self.submit_steps()?;
        if self.waits_for_masks() {
            // They may have come while the step was submitted.
            return Ok(Next::Turn);
        }
        Ok(match (self.under_way.is_empty(), self.scheduler.has_work()) {
            (false, _) => Next::Device,
            (true, true) => Next::Turn,
            (true, false) => Next::Input,
        })
    }

    /// Waits until the device is done with the oldest step.
    pub(super) fn wait(&mut self) {
        self.collected = Some(self.backend.collect());
    }

    /// Ends everything, as [`Scheduler::dissolve`].
    pub(super) fn dissolve(self) {
        self.scheduler.dissolve();
    }

    fn oldest(&mut self) -> Plan {
        self.under_way.pop_front().expect("what was collected was under way")
    }

    fn take_in(&mut self, collected: Collected) {
        let Collected { outputs, elapsed } = collected;
        let plan = self.oldest();
        self.n_steps_failed = 0;
        self.scheduler.complete(plan, outputs, u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
        if self.under_way.is_empty() {
            self.linger = Some(Linger::AtMost((elapsed / LINGER_SHARE).min(LINGER_MAX)));
        }
    }

    /// Until when the next step is held for guests that were just answered and asked again at once the last times:
    /// theirs and everybody's rows then ride in one step.
    fn lingers_until(&mut self, now: Instant) -> Option<Instant> {
        let until = match self.linger? {
            Linger::AtMost(time) => now + time,
            Linger::Until(until) => until,
        };
        if self.scheduler.n_guests_awaited() > 0 && now < until {
            self.linger = Some(Linger::Until(until));
            return Some(until);
        }
        self.linger = None;
        self.scheduler.forget_late_guests();
        None
    }

    /// Plans and submits as many steps as the device takes.
    fn submit_steps(&mut self) -> Result<(), EngineFailure> {
        let n_steps_max = self.backend.limits().n_steps_under_way;
        while self.under_way.len() < n_steps_max && self.scheduler.has_work() && !self.waits_for_masks() {
            // The next step waits for guests that will have asked again when this one is done.
            if self.scheduler.has_returning_guests(self.under_way.back()) {
                break;
            }
            let plan = self.scheduler.plan();
            if plan.is_empty() {
                break;
            }
            let mut n_moved = 0;
            match self.submit(&plan, &mut n_moved) {
                Ok(()) if plan.has_rows() => self.under_way.push_back(plan),
                Ok(()) => break,
                Err(error) => self.note_failed(&plan, n_moved, error)?,
            }
        }
        Ok(())
    }

    /// Puts a plan into effect; `n_moved` counts the pages whose moves the backend has taken.
    fn submit(&mut self, plan: &Plan, n_moved: &mut usize) -> Result<(), BackendError> {
        // Moves of one kind that follow each other go to the device together.
        for moves in plan.moves.chunk_by(|a, b| matches!(a, Move::Out(..)) == matches!(b, Move::Out(..))) {
            let out: Vec<_> = moves
                .iter()
                .filter_map(|m| if let Move::Out(a, b) = *m { Some((a, b)) } else { None })
                .collect();
            let back: Vec<_> = moves
                .iter()
                .filter_map(|m| if let Move::In(a, b) = *m { Some((a, b)) } else { None })
                .collect();
            if !out.is_empty() {
                self.backend.swap_out(&out)?;
            }
            if !back.is_empty() {
                self.backend.swap_in(&back)?;
            }
            *n_moved += moves.len();
        }
        if plan.has_rows() {
            let batch = self.scheduler.batch(plan, std::mem::take(&mut self.rows));
            let submitted = self.backend.submit(&batch);
            self.rows = batch::reused(batch.rows);
            submitted?;
        }
        Ok(())
    }

    /// Takes a failed step back, or ends the engine.
    fn note_failed(&mut self, plan: &Plan, n_moved: usize, error: BackendError) -> Result<(), EngineFailure> {
        if error.damage() == Damage::Device {
            return Err(EngineFailure::Device(error));
        }
        self.n_steps_failed += 1;
        if self.n_steps_failed == N_STEPS_FAILED_MAX {
            return Err(EngineFailure::Steps { n_steps: self.n_steps_failed, last: error });
        }
        tracing::warn!(%error, n_rows = plan.n_rows(), "a step failed; the engine goes on");
        self.scheduler.fail_step(plan, n_moved, &EngineError::Step(error));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
