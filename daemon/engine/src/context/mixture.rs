//! Runs whose draws take the logits of other contexts into account, which get the tokens too.
//!
//! The first context of a mixture has the run. Whatever is done with any of them ends it: the next pull begins anew with what
//! they hold then.

mod by_rows;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::watch::Foresight;
use super::{Context, Pull, RunKey};
use crate::command::{Operation, RunSettings};
use crate::completion::Tag;
use crate::error::EngineError;
use crate::sampling::Sampler;
use crate::sampling::program::N_MEMBERS_MAX;

/// A part in the run of another context.
#[derive(Debug)]
pub(super) struct Mixed {
    /// That of the run.
    tag: Tag,
    n_pulled: usize,
}

impl Mixed {
    /// Tokens of the run that were taken.
    pub(super) fn n_pulled(&self) -> usize {
        self.n_pulled
    }
}

impl Context {
    /// As [`Self::pull`], where the sampler's program is given the logits of other contexts as well, in their order: the tokens
    /// are drawn as of this one (its seed, positions, history, state, rule and log-probability) and appended to all. Like any
    /// other run it is decoded ahead, as long as nothing else is done with any of them.
    ///
    /// Others may be of other models with the same vocabulary. Then nothing is decoded ahead: each token takes a step of each
    /// model, and a whole row of each context that leaves the device where they are not on one, or it has no room for rows.
    ///
    /// # Errors
    /// As for [`Self::pull`]; the sampler has no program; the contexts are not of one guest and one vocabulary, or are more than a
    /// program names or a step takes.
    pub async fn pull_mixed(
        &mut self,
        others: &mut [&mut Self],
        key: RunKey,
        settings: impl FnOnce() -> RunSettings,
    ) -> Result<Pull, EngineError> {
        if self.is_of_several_models(others) {
            return self.pull_by_rows(others, settings()).await;
        }
        self.start_mixed(others, key, settings).await?;
        for other in &mut *others {
            // Before a token is taken that there would be no room for.
            other.footprint.set_with(other.tokens.len() + 1, other.n_bytes_beside())?;
        }
        let pulled = self.pull_started().await;
        match &pulled {
            Ok(Pull::Token(drawn)) => {
                for other in others {
                    other.tokens.push(drawn.candidate.token);
                    other.n_synced += 1;
                    other.mixed.as_mut().expect("it is part of the run").n_pulled += 1;
                }
            }
            // The run has ended for all.
            _ if self.run.is_none() => others.iter_mut().for_each(|other| other.mixed = None),
            _ => {}
        }
        pulled
    }

    /// Starts what [`Self::pull_mixed`] with this key pulls from, unless it has been started: so that several are decoded in
    /// one batch before the first is waited for.
    ///
    /// # Errors
    /// As for [`Self::pull_mixed`].
    pub async fn start_mixed(
        &mut self,
        others: &mut [&mut Self],
        key: RunKey,
        settings: impl FnOnce() -> RunSettings,
    ) -> Result<(), EngineError> {
        if self.is_of_several_models(others) {
            return self.check_mixture(others, &settings().sampler);
        }
        let goes_on = self.run.as_ref().is_some_and(|run| {
            let tag = run.queue.tag();
            let is_part = |other: &Self| other.mixed.as_ref().is_some_and(|mixed| mixed.tag == tag);
            run.key == key && others.iter().all(|other| is_part(other))
        });
        if goes_on {
            return Ok(());
        }
        let settings = settings();
        self.check_mixture(others, &settings.sampler)?;
        let n_untold = others.iter().map(|other| other.n_untold()).sum();
        let tag = self
            .post_run(key, settings, Foresight::None, n_untold, |first, settings, tag| {
                let others = others.iter_mut().map(|other| (other.id, other.take_edit()));
                let members = std::iter::once((first.id, first.take_edit())).chain(others).collect();
                Operation::Mix { members, settings, tag }
            })
            .await?;
        for other in others {
            other.mixed = Some(Mixed { tag, n_pulled: 0 });
        }
        Ok(())
    }

    /// Whether some are not where one job could have them all.
    fn is_of_several_models(&self, others: &[&mut Self]) -> bool {
        others
            .iter()
            .any(|other| !Arc::ptr_eq(&other.caller, &self.caller) || other.id.model != self.id.model)
    }

    /// That these contexts can be mixed by this sampler.
    fn check_mixture(&self, others: &[&mut Self], sampler: &Sampler) -> Result<(), EngineError> {
        let (n_others, n_others_max) = (others.len(), N_MEMBERS_MAX);
        if n_others > n_others_max {
            return Err(EngineError::MixtureTooLarge { n_others, n_others_max });
        }
        if sampler.program.is_none() {
            return Err(EngineError::MixtureWithoutProgram);
        }
        let vocab_size = |context: &Self| context.model.limits().vocab_size;
        for other in others {
            if other.caller.owner().guest != self.caller.owner().guest
                || vocab_size(other) != vocab_size(self)
            {
                return Err(EngineError::JobMixed);
            }
            if other.tokens.is_empty() {
                return Err(EngineError::EmptyContext);
            }
        }
        if self.tokens.is_empty() { Err(EngineError::EmptyContext) } else { Ok(()) }
    }
}
