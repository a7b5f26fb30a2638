//! Taking tokens out of the middle of a context.

use super::Context;
use super::keeps::Keeping;
use super::states::Leaves;
use crate::command::Operation;
use crate::error::EngineError;
use crate::kv::{N_STRETCHES_MAX, Positions};

impl Context {
    /// Takes out the tokens `start..end`; the tokens after them close up in length, list and history. What is computed from
    /// now on does not see them, the last token included: what comes next is asked of it anew. What was computed before has
    /// seen them and stays as it is. Pages in which nothing is left come free at once.
    ///
    /// All tokens that a context has had stay written down, 10 bytes each on its guest's account: a KV that is lost for want
    /// of room is computed again as it was, with what was taken out since. Draws count them too: none is made twice with the
    /// same noise. Tokens up to the end are truncated.
    ///
    /// # Errors
    /// There are no such tokens; the model cannot evict; too many stretches would be left; the context draws under a
    /// constraint that has some of them; a budget is used up; or the engine has failed or stopped. Nothing has changed then.
    pub async fn evict(&mut self, start: usize, end: usize, positions: Positions) -> Result<(), EngineError> {
        let length = self.tokens.len();
        if start > end || end > length {
            return Err(EngineError::NotThere { start, end, length });
        }
        if end == length {
            return self.truncate(start).await;
        }
        let n_stretches_max = self.model.limits().n_stretches_max;
        if n_stretches_max == 0 {
            return Err(EngineError::CannotEvict);
        }
        if start == end {
            let room = self.room_to_stop_run(0).await?;
            return self.stop_run(room);
        }
        let is_kept_to =
            |keeping: &Keeping| self.rule.as_ref().is_some_and(|rule| rule.id() == keeping.rule.id());
        let first = self.keeping.as_ref().filter(|keeping| is_kept_to(keeping)).map(|keeping| keeping.first);
        if let Some(first) = first.filter(|&first| end > first) {
            return Err(EngineError::EvictsConstrained { start, end, first });
        }
        let mut evictions = self.evictions.clone();
        evictions.evict(start..end, length, positions, self.capacity()).map_err(|error| {
            EngineError::TooManyStretches { n_stretches: error.n_stretches, n_stretches_max: N_STRETCHES_MAX }
        })?;
        let n_bytes = self.states.n_bytes() + evictions.n_bytes_held();
        let room = self.model.room(&self.caller, self.n_untold()).await?;
        self.footprint.set_with(length - (end - start), n_bytes)?;
        let edit = self.take_edit();
        self.evictions = evictions;
        let tail = self.tokens().copy_of(end..length);
        self.tokens.truncate(start);
        self.tokens.append(&tail);
        self.n_synced = self.tokens.len();
        self.n_truncations += 1;
        self.states.evict(start, end);
        self.foreseen = None;
        match &mut self.keeping {
            Some(keeping) if end <= keeping.first => keeping.first -= end - start,
            keeping => *keeping = None,
        }
        self.model.post_into(room, Operation::Evict { id: self.id, edit, start, end, positions })
    }

    /// Tokens that were evicted and whose positions were kept: the highest position is so much higher than the length.
    fn n_positions_kept(&self) -> usize {
        self.evictions.n_evicted() - self.evictions.n_closed_up()
    }

    /// How many more tokens fit.
    #[must_use]
    pub fn n_free(&self) -> usize {
        self.capacity() - self.tokens.len() - self.n_positions_kept()
    }

    /// Host memory that is charged beside the tokens that are there.
    pub(super) fn n_bytes_beside(&self) -> u64 {
        self.states.n_bytes() + self.evictions.n_bytes_held()
    }

    /// The same once there are as many states more as a program leaves by so many draws.
    pub(super) fn n_bytes_with(&self, leaves: Option<Leaves>, n_draws: usize) -> u64 {
        self.states.n_bytes_with(leaves, n_draws) + self.evictions.n_bytes_held()
    }
}
