//! Adding to what layers make of a context's tokens.

use std::sync::Arc;

use super::Context;
use crate::account::HostCharge;
use crate::command::Operation;
use crate::error::EngineError;
use crate::steering::{Steering, SteeringError};

impl Context {
    /// Steers the tokens from this index on, those included that come later: after so many layers each, a vector is added to
    /// what the layers made of the token, and what follows sees that. 0 adds to the embedding; the number of all layers to what
    /// the final norm takes. It takes the place of what was added before; no vectors, or vectors of zeros, take that off, and
    /// the context computes what one without computes, bit for bit.
    ///
    /// Tokens before `from` are computed as in any other context. What was computed otherwise from there on is computed anew
    /// when it is needed, and paid for. Forks and saved copies are steered likewise, and a truncation leaves `from` where it is.
    ///
    /// The vectors are on the guest's account as long as the context or a fork of it is there: 4 bytes a number.
    ///
    /// # Errors
    /// The vectors are not of the model, or more than a step brings to the device; `from` is past the end; tokens were evicted;
    /// a budget is used up; or the engine has failed or stopped. Nothing has changed then.
    pub async fn steer(&mut self, vectors: Vec<(usize, Vec<f32>)>, from: usize) -> Result<(), EngineError> {
        let limits = self.model.limits();
        let (n_layers, n_bytes_max) = (self.model.model().config.n_layers, limits.asks.given_bytes);
        let steering = Steering::new(vectors, n_layers, limits.hidden_size)?;
        let (length, n_evicted) = (self.tokens.len(), self.evictions.n_evicted());
        if from > length {
            return Err(SteeringError::PastEnd { from, length }.into());
        }
        if n_evicted > 0 {
            return Err(SteeringError::Evicted { n_evicted }.into());
        }
        let n_bytes = steering.as_ref().map_or(0, Steering::n_bytes);
        if n_bytes > n_bytes_max {
            return Err(SteeringError::TooLarge { n_bytes, n_bytes_max }.into());
        }
        if steering.is_none() && self.steering.is_none() {
            return Ok(());
        }
        let room = self.model.room(&self.caller, self.n_untold()).await?;
        self.steering = self.charge_steering(n_bytes as u64)?;
        // What was computed from there on is taken away.
        self.n_truncations += 1;
        let (id, edit) = (self.id, self.take_edit());
        self.model.post_into(room, Operation::Steer { id, edit, steering: steering.map(Arc::new), from })
    }

    /// Host memory of what is added to the tokens, which forks share.
    pub(super) fn charge_steering(&self, n_bytes: u64) -> Result<Option<Arc<HostCharge>>, EngineError> {
        if n_bytes == 0 {
            return Ok(None);
        }
        Ok(Some(Arc::new(HostCharge::new(&self.caller.owner().account, n_bytes)?)))
    }
}
