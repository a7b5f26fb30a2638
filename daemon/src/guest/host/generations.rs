//! `generations`: whole generations that are handed over as they end.
//!
//! The contexts are locked, and whatever waits is polled, only while the guest waits in `next` or `reach`: what was begun
//! there is given up when a call returns, and goes on in the next one. So nothing holds its place in a queue while nobody
//! looks at it.

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use trellis_engine::account::HostCharge;
use wasmtime::component::Resource;

use super::convert::{count, invalid};
use super::generate::Generation;
use super::types::{GuestGenerations, HostError};
use crate::guest::bindings::trellis::host::streams::{
    Completion, EndedGeneration, FinishReason, GenerateRequest, GenerationProgress, HostGenerations,
};
use crate::guest::store::GuestState;

/// One of them: under way, or what it had come to when it was handed over.
pub(crate) enum Slot {
    /// Its context has what was drawn so far.
    UnderWay(Box<Generation>),
    /// Tokens, and their log-probability.
    Over(usize, f64),
}

impl Slot {
    fn progress(&self) -> (usize, f64) {
        match self {
            Self::UnderWay(generation) => generation.progress(),
            Self::Over(n_tokens, logprob) => (*n_tokens, *logprob),
        }
    }

    /// Takes it out, if it is under way.
    fn take(&mut self) -> Option<Generation> {
        let (n_tokens, logprob) = self.progress();
        match std::mem::replace(self, Self::Over(n_tokens, logprob)) {
            Self::UnderWay(generation) => Some(*generation),
            Self::Over(..) => None,
        }
    }
}

impl GuestGenerations {
    fn under_way(&mut self) -> impl Iterator<Item = (usize, &mut Generation)> {
        self.slots.iter_mut().enumerate().filter_map(|(idx, slot)| match slot {
            Slot::UnderWay(generation) => Some((idx, &mut **generation)),
            Slot::Over(..) => None,
        })
    }

    /// Has the engine decode none of them any further.
    async fn give_up(&mut self) {
        for (_, generation) in self.under_way() {
            generation.give_up().await;
        }
    }

    /// Hands over one that has ended, or failed; what it has paid with is kept for the answer.
    async fn hand_over(
        &mut self,
        idx: usize,
        outcome: Result<FinishReason, HostError>,
        answer: &mut Vec<HostCharge>,
    ) -> wasmtime::Result<EndedGeneration> {
        let mut generation = self.slots[idx].take().expect("it was under way");
        let outcome = match outcome {
            Ok(finish) => {
                let (completion, charge) = generation.complete(finish);
                answer.push(charge);
                Ok(completion)
            }
            Err(HostError::Refused(error)) => {
                // What went wrong first is what the guest is told.
                let _ = generation.undo().await;
                Err(error)
            }
            Err(HostError::Fault(fault)) => return Err(fault),
        };
        Ok(EndedGeneration { idx: count(idx), outcome })
    }
}

impl HostGenerations for GuestState {
    async fn start(
        &mut self,
        requests: Vec<GenerateRequest>,
    ) -> Result<Resource<GuestGenerations>, HostError> {
        let generations = self.prepare_all(requests)?;
        let slots = generations.into_iter().map(|one| Slot::UnderWay(Box::new(one))).collect();
        let handle = self.give(GuestGenerations { slots })?;
        let all = self.table.get_mut(&handle)?;
        for idx in 0..all.slots.len() {
            let Slot::UnderWay(generation) = &mut all.slots[idx] else { continue };
            if let Err(error) = generation.start().await {
                let mut all = self.table.delete(handle)?;
                all.give_up().await;
                return Err(error);
            }
        }
        Ok(handle)
    }

    async fn next(
        &mut self,
        generations: Resource<GuestGenerations>,
    ) -> wasmtime::Result<Option<EndedGeneration>> {
        let all = self.table.get_mut(&generations)?;
        let mut runs: FuturesUnordered<_> =
            all.under_way().map(|(idx, one)| async move { (idx, one.run().await) }).collect();
        let ended = runs.next().await;
        drop(runs);
        match ended {
            Some((idx, outcome)) => Ok(Some(all.hand_over(idx, outcome, &mut self.answer).await?)),
            None => Ok(None),
        }
    }

    async fn reach(
        &mut self,
        generations: Resource<GuestGenerations>,
        n_tokens: u32,
    ) -> wasmtime::Result<Vec<EndedGeneration>> {
        let all = self.table.get_mut(&generations)?;
        let mut runs: FuturesUnordered<_> = all
            .under_way()
            .map(|(idx, one)| async move { (idx, one.run_to(n_tokens as usize).await) })
            .collect();
        let mut ended = Vec::new();
        while let Some((idx, outcome)) = runs.next().await {
            if let Some(outcome) = outcome.transpose() {
                ended.push((idx, outcome));
            }
        }
        drop(runs);
        ended.sort_unstable_by_key(|(idx, _)| *idx);
        let mut handed_over = Vec::with_capacity(ended.len());
        for (idx, outcome) in ended {
            handed_over.push(all.hand_over(idx, outcome, &mut self.answer).await?);
        }
        Ok(handed_over)
    }

    async fn cancel(
        &mut self,
        generations: Resource<GuestGenerations>,
        idx: u32,
    ) -> Result<Completion, HostError> {
        let all = self.table.get_mut(&generations)?;
        let n = all.slots.len();
        let slot = all.slots.get_mut(idx as usize);
        let Some(mut generation) = slot.and_then(Slot::take) else {
            return Err(invalid("idx", idx, format!("one of {n} that has not been handed over")));
        };
        let finish = generation.cancel().await?;
        let (completion, charge) = generation.complete(finish);
        self.answer.push(charge);
        Ok(completion)
    }

    fn progress(
        &mut self,
        generations: Resource<GuestGenerations>,
    ) -> wasmtime::Result<Vec<GenerationProgress>> {
        let all = self.table.get(&generations)?;
        let progress = all.slots.iter().map(|slot| {
            let (n_tokens, logprob) = slot.progress();
            let is_over = matches!(slot, Slot::Over(..));
            GenerationProgress { n_tokens: count(n_tokens), logprob: logprob as f32, is_over }
        });
        Ok(progress.collect())
    }

    async fn drop(&mut self, generations: Resource<GuestGenerations>) -> wasmtime::Result<()> {
        self.table.delete(generations)?.give_up().await;
        Ok(())
    }
}
