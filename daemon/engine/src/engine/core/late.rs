//! Steps whose draws wait for masks.
//!
//! Such a step is the last one submitted: what follows it has to come after its draws. It draws once the masks of all rows
//! are there, at the latest when its layers are done.

use super::{Core, Next};
use crate::error::EngineFailure;
use crate::scheduler::{MasksOfStep, Plan};

impl Core {
    /// Whether the last step has not been let draw.
    pub(super) fn waits_for_masks(&self) -> bool {
        self.under_way.back().is_some_and(Plan::waits_for_masks)
    }

    /// Lets the last step draw if it is time; otherwise says what has to happen first.
    pub(super) fn attend_to_masks(&mut self) -> Result<Option<Next>, EngineFailure> {
        let Some(plan) = self.under_way.back_mut().filter(|plan| plan.waits_for_masks()) else {
            return Ok(None);
        };
        let MasksOfStep { masks, n_missing } = self.scheduler.masks_of(plan);
        let is_time = if n_missing == 0 { Ok(true) } else { self.backend.waits_for_masks() };
        let supplied = match is_time {
            Ok(false) => {
                // Its layers run behind those of the step before.
                let is_oldest = self.under_way.len() == 1;
                return Ok(Some(if is_oldest { Next::InputOrLayers } else { Next::Device }));
            }
            Ok(true) => self.backend.supply(&masks),
            Err(error) => Err(error),
        };
        match supplied {
            Ok(()) => self.scheduler.let_draw(plan),
            Err(error) => {
                let plan = self.under_way.pop_back().expect("it is under way");
                self.note_failed(&plan, plan.moves.len(), error)?;
            }
        }
        Ok(None)
    }

    /// Whether the last step waits for its masks alone.
    pub(in crate::engine) fn is_held_up(&mut self) -> bool {
        // What failed is said to the next turn.
        self.backend.waits_for_masks().unwrap_or(true)
    }
}
