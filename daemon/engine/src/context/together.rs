//! What is done with several contexts at once: draws, and tokens that all get or none.

use std::sync::Arc;

use super::{Context, Pending};
use crate::batch::Drawn;
use crate::command::Operation;
use crate::error::EngineError;
use crate::sampling::Sampler;

impl Context {
    /// Appends to each of these contexts what was drawn for it, as [`Self::append_drawn`], or to none of them.
    ///
    /// # Errors
    /// As for [`Self::append`]; all contexts are then as they were.
    pub async fn append_drawn_to_all(
        contexts: &mut [&mut Self],
        drawn: &[Vec<Drawn>],
        samplers: &[Arc<Sampler>],
    ) -> Result<(), EngineError> {
        let n_before: Vec<usize> = contexts.iter().map(|context| context.tokens.len()).collect();
        for idx in 0..contexts.len() {
            let appended = contexts[idx].append_drawn(&drawn[idx], &samplers[idx]).await;
            if appended.is_err() {
                for (context, &n_tokens) in contexts[..idx].iter_mut().zip(&n_before) {
                    // That fails where the engine has ended: then there is nothing left to take back.
                    let _ = context.truncate(n_tokens).await;
                }
                return appended;
            }
        }
        Ok(())
    }

    /// Draws the next token after each of these contexts, in one step if others leave the room; the answer is
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
        let n_untold = contexts.iter().map(|context| context.n_untold()).sum();
        let room = model.room(&caller, n_untold).await?;
        let place = caller.ticket();
        let members = contexts.iter_mut().map(|context| (context.id, context.take_edit())).collect();
        model.post_into(room, Operation::DrawTogether { members, sampler, tag: place.tag() })?;
        Ok(Pending::new(place, model, caller.id(), id))
    }
}
