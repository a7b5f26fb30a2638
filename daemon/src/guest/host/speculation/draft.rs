//! Guesses of another model: what it draws with the same sampler at the same positions, under the same constraint.
//!
//! Y. Leviathan and others, "Fast Inference from Transformers via Speculative Decoding" (2023); what agrees is accepted
//! because both draw with the noise of their position.

use std::sync::Arc;

use trellis_engine::account::Owner;
use trellis_engine::batch::Token;
use trellis_engine::sampling::{Looks, Sampler};
use trellis_engine::{Ahead, Context, EngineError, MaskSource, Pull, RunKey, RunSettings};

use crate::guest::held::HeldModel;

/// A context of the other model that follows the one that is guessed for.
pub(super) struct Draft {
    model: HeldModel,
    owner: Owner,
    context: Option<Context>,
    /// Tokens from the first on that both had, as long as none are taken away.
    n_same: usize,
    n_truncations: u64,
    n_runs: u64,
}

impl Draft {
    pub(super) fn new(model: HeldModel, owner: Owner) -> Self {
        Self { model, owner, context: None, n_same: 0, n_truncations: 0, n_runs: 0 }
    }

    /// At most `n` tokens that may follow those of a context.
    ///
    /// # Errors
    /// A budget is used up, or the engine has failed or stopped.
    pub(super) async fn guess(
        &mut self,
        guessed_for: &Context,
        sampler: &Arc<Sampler>,
        n: usize,
    ) -> Result<Vec<Token>, EngineError> {
        let (tokens, n_truncations) = (guessed_for.tokens(), guessed_for.n_truncations());
        if self.context.is_none() {
            self.context = Some(Context::create(&self.model, self.owner.clone()).await?);
        }
        let context = self.context.as_mut().expect("it was just made");
        let n_same = if n_truncations == self.n_truncations { self.n_same } else { 0 };
        let n_both = context.tokens().len().min(tokens.len());
        let rest = n_same.min(n_both)..n_both;
        let pairs = context.tokens().iter_range(rest.clone()).zip(tokens.iter_range(rest.clone()));
        let n_same = rest.start + pairs.take_while(|(a, b)| a == b).count();
        let n = n.min(context.capacity().saturating_sub(tokens.len()));
        if n == 0 {
            return Ok(Vec::new());
        }
        context.truncate(n_same).await?;
        context.append(&tokens.copy_of(n_same..tokens.len())).await?;
        (self.n_same, self.n_truncations) = (tokens.len(), n_truncations);
        match context.keep_as(guessed_for) {
            Ok(()) => {}
            // What is guessed for does without: its own tokens come one by one.
            Err(EngineError::Budget(_)) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        self.n_runs += 1;
        let key = RunKey(self.n_runs);
        // What the sampler looks at is wanted of the target only, not of the draft.
        let sampler = match sampler.looks == Looks::default() {
            true => sampler.clone(),
            false => Arc::new(Sampler { looks: Looks::default(), ..(**sampler).clone() }),
        };
        let settings = || RunSettings {
            sampler: sampler.clone(),
            // What ends an answer is guessed like any other token.
            stop_tokens: Arc::new([]),
            n_tokens_max: Some(n),
            ahead: Ahead::Unbounded,
            masks: MaskSource::Sampler,
        };
        let mut guess = Vec::with_capacity(n);
        while guess.len() < n {
            match context.pull(key, settings).await {
                Ok(Pull::Token(drawn)) => guess.push(drawn.candidate.token),
                Ok(Pull::Finished(_)) => break,
                // Where it cannot draw there is nothing to guess.
                Err(EngineError::Output(_) | EngineError::Constraint(_)) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(guess)
    }
}
