//! What it takes that tokens are steered.

use super::joint::Members;
use super::{ContextState, Scheduler};
use crate::error::EngineError;
use crate::steering::{Steering, SteeringError};

/// What adding a vector after a layer costs beside the layer: on a GPU, a launch.
const ADDITION_SHARE: f32 = 0.1;

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

    /// What steering the tokens `start..end` of a context costs, in thousandths of a token.
    pub(super) fn steering_cost(&self, context: &ContextState, start: usize, end: usize) -> u64 {
        let Some(steered) = context.kv.steered(start, end) else { return 0 };
        let share = steered.steering.vectors().len() as f32 / self.limits.n_layers.max(1) as f32;
        ((end - start) as f32 * share * ADDITION_SHARE * 1000.0) as u64
    }
}
