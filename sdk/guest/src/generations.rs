//! Generations that are handed over as they end.

use crate::bindings::trellis::host::streams as raw;
use crate::generate::raw_requests;
use crate::{Completion, Generate, Result};

#[doc(inline)]
pub use raw::GenerationProgress;

/// Generations under way, begun by [`generate_each`]: an iterator over those that end, in the order in which they do.
/// Dropping it ends those that are left where they are.
///
/// A context belongs to its generation until that is handed over: one that is changed meanwhile fails it with
/// [`InvalidArgument`](crate::Error::InvalidArgument).
#[derive(Debug)]
#[must_use = "generations go on when they are waited for"]
pub struct Generations {
    raw: raw::Generations,
}

/// A generation that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// Its place among the requests, from 0.
    pub idx: usize,
    /// What was generated; after an error its context is as it was, though text may have been sent.
    pub completion: Result<Completion>,
}

/// Begins many generations in one batch and hands each over when it ends: to count votes while others still write, or to
/// give up those that fall behind.
///
/// ```no_run
/// # use trellis_guest::{Context, Result, Sampler, generate_each};
/// # fn f(prompt: &Context, sampler: &Sampler) -> Result<()> {
/// let forks = prompt.forks(16, sampler)?;
/// let mut tries = generate_each(forks.iter().map(|(fork, sampler)| fork.generate(sampler)))?;
/// while let Some(ended) = tries.next() {
///     if ended.completion?.text.contains("42") {
///         break; // the others are ended where they are
///     }
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// Those of [`Generate::run`], but for those of a draw, which come with the generation that they end.
pub fn generate_each<'a>(requests: impl IntoIterator<Item = Generate<'a>>) -> Result<Generations> {
    Ok(Generations { raw: raw::Generations::start(&raw_requests(requests))? })
}

impl Generations {
    /// Waits until each that is under way has `n_tokens` tokens or has ended; those that ended, by their places.
    pub fn reach(&mut self, n_tokens: u32) -> Vec<Ended> {
        self.raw.reach(n_tokens).into_iter().map(Ended::from).collect()
    }

    /// How far each has come, in the order of the requests, as far as has been waited for.
    pub fn progress(&self) -> Vec<GenerationProgress> {
        self.raw.progress()
    }

    /// Ends one where it is: what it has drawn, and [`FinishReason::Cancelled`](crate::FinishReason::Cancelled).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for one that has been handed over or is not there;
    /// [`EngineFailed`](crate::Error::EngineFailed).
    pub fn cancel(&mut self, idx: usize) -> Result<Completion> {
        Ok(self.raw.cancel(u32::try_from(idx).unwrap_or(u32::MAX))?)
    }
}

impl Iterator for Generations {
    type Item = Ended;

    fn next(&mut self) -> Option<Ended> {
        self.raw.next().map(Ended::from)
    }
}

impl From<raw::EndedGeneration> for Ended {
    fn from(ended: raw::EndedGeneration) -> Self {
        let raw::EndedGeneration { idx, outcome } = ended;
        Self { idx: idx as usize, completion: outcome.map_err(Into::into) }
    }
}
