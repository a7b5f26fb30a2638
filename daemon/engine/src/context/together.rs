//! Draws after several contexts that are made in one step.

use std::sync::Arc;

use super::{Context, Pending};
use crate::command::Operation;
use crate::error::EngineError;
use crate::sampling::Sampler;

impl Context {
    /// Draws the next token after each of these contexts in one step; the answer is
    /// [`Answer::Together`](crate::Answer::Together). Nothing is appended. What is done with any of them before the answer
    /// is there ends the job.
    ///
    /// # Errors
    /// A context is empty or full, they are not of one guest and one model, or the engine has failed or stopped.
    pub async fn draw_together(
        contexts: &mut [&mut Self],
        sampler: Arc<Sampler>,
    ) -> Result<Pending, EngineError> {
        let Some(first) = contexts.first() else { return Err(EngineError::EmptyContext) };
        let (model, caller, id) = (first.model.clone(), first.caller.clone(), first.id);
        sampler.validate(model.limits().vocab_size)?;
        for context in contexts.iter() {
            if !Arc::ptr_eq(&context.caller, &caller) || context.id.model != id.model {
                return Err(EngineError::JobMixed);
            }
            if context.tokens.is_empty() {
                return Err(EngineError::EmptyContext);
            }
            context.check_continuation(&[0])?; // room for the token that is drawn
        }
        let room = model.room(&caller).await?;
        let place = caller.stand();
        let members = contexts.iter_mut().map(|context| (context.id, context.take_edit())).collect();
        model.post_into(room, Operation::DrawTogether { members, sampler, tag: place.tag() })?;
        Ok(Pending { place, model, caller: caller.id(), asked: Some(id) })
    }
}
