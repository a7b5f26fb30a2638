//! Steps whose draws wait for masks.
//!
//! Such a step is the last one submitted: what follows it has to come after its draws. It draws once the masks of all rows
//! are there, at the latest when its layers are done.

use super::{Core, Next};
use crate::error::EngineFailure;
use crate::scheduler::MasksOfStep;

impl Core {
    /// Whether the last step has not been let draw.
    pub(super) fn waits_for_masks(&self) -> bool {
        self.under_way.back().is_some_and(|(_, plan)| plan.waits_for_masks())
    }

    /// Lets the last step draw if it is time; otherwise says what has to happen first.
    pub(super) fn attend_to_masks(&mut self) -> Result<Option<Next>, EngineFailure> {
        let Self { residents, commons, under_way, layers_failed, .. } = self;
        // Its layers run behind those of the step before.
        let is_oldest = under_way.len() == 1;
        let Some((place, plan)) = under_way.back_mut().filter(|(_, plan)| plan.waits_for_masks()) else {
            return Ok(None);
        };
        let place = *place;
        let resident = residents[place].as_mut().expect("a model with a step under way is there");
        let MasksOfStep { masks, n_missing } = resident.scheduler.masks_of(plan);
        let is_time = match layers_failed.take() {
            Some(error) => Err(error),
            None if n_missing == 0 => Ok(true),
            None => resident.backend.waits_for_masks(),
        };
        let supplied = match is_time {
            Ok(false) => return Ok(Some(if is_oldest { Next::InputOrLayers } else { Next::Device })),
            Ok(true) => resident.backend.supply(&masks),
            Err(error) => Err(error),
        };
        match supplied {
            Ok(sat_out) => resident.lend(commons).let_draw(plan, &sat_out),
            Err(error) => {
                let (place, plan) = self.under_way.pop_back().expect("it is under way");
                self.note_failed(place, &plan, plan.moves.len(), error)?;
            }
        }
        Ok(None)
    }

    /// Whether the last step waits for its masks alone.
    pub(in crate::engine) fn is_held_up(&mut self) -> bool {
        let Some(&(place, _)) = self.under_way.back() else { return true };
        let is_held_up = self.resident(place).backend.waits_for_masks();
        is_held_up.unwrap_or_else(|error| {
            // A device may say so once only.
            self.layers_failed = Some(error);
            true
        })
    }
}
