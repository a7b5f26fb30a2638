//! What it takes that tokens are steered.
//!
//! Three things. The additions, by the token and the vector. What a step with steered tokens takes longer, however many they
//! are: its steered rows bear that together, as decode rows bear together that the weights are read. And bringing the vectors to
//! the device, on which they stay for some steps.

use super::joint::Members;
use super::{ContextState, Plan, Scheduler};
use crate::error::EngineError;
use crate::steering::{Steering, SteeringError};

/// What adding a vector after a layer to a token costs beside the layer: it moves 12 bytes a number, and a layer over thousands
/// of numbers computes for as long as moving 50 times that takes.
const ADDITION_SHARE: f32 = 0.02;

/// Steps of the device for which vectors that a step was given are there in any case: it keeps as much as three steps may bring.
const N_STEPS_THERE: u64 = 2;

impl Scheduler {
    /// Whether a step brings what is added to the tokens of all members of a job.
    pub(super) fn check_steering(&self, members: &Members) -> Result<(), EngineError> {
        let mut others: Vec<&Steering> = Vec::new();
        for id in members {
            let steering = self.contexts.get(id).and_then(|context| context.kv.steering());
            others.extend(steering.filter(|steering| !others.contains(steering)));
        }
        let n_bytes = others.iter().map(|steering| steering.n_bytes()).sum();
        let n_bytes_max = self.limits.asks.given_bytes;
        match n_bytes > n_bytes_max {
            true => Err(SteeringError::TooLarge { n_bytes, n_bytes_max }.into()),
            false => Ok(()),
        }
    }

    /// What the additions to the tokens `start..end` of a context cost, in thousandths of a token.
    pub(super) fn steering_cost(&self, context: &ContextState, start: usize, end: usize) -> u64 {
        let Some(steered) = context.kv.steered(start, end) else { return 0 };
        let share = steered.steering.vectors().len() as f32 / self.limits.n_layers.max(1) as f32;
        ((end - start) as f32 * share * ADDITION_SHARE * 1000.0) as u64
    }

    /// Counts a row of these tokens in, if any of them is steered; returns what its owner bears of what that takes beside the
    /// additions, in nanoseconds.
    pub(super) fn note_steered_row(
        &self,
        context: &mut ContextState,
        start: usize,
        end: usize,
        plan: &mut Plan,
    ) -> u64 {
        let Some(steered) = context.kv.steered(start, end) else { return 0 };
        let times = self.limits.steering;
        let n_bytes = steered.steering.n_bytes() as u64;
        let step = self.step_planned();
        let is_there = context.steered_in.replace(step).is_some_and(|last| step - last <= N_STEPS_THERE);
        let brought_ns = if is_there { 0 } else { n_bytes.div_ceil(1024) * times.kib_ns };
        let of_step = if plan.work.n_steered_rows == 0 { times.step_ns } else { 0 };
        plan.work.n_steered_rows += 1;
        plan.work.steering_ns += of_step + brought_ns;
        self.costs.steered_row_ns(times.step_ns) + brought_ns
    }
}
