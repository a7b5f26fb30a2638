//! `decoding`

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;
use trellis_engine::account::Resource as Metered;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Answer, Ask, Context, Guess};
use wasmtime::component::Resource;

use super::convert::{candidate, invalid};
use super::types::{GuestContext, HostError};
use crate::guest::bindings::trellis::host::decoding::{
    Distribution, Host, ScoreRequest, SpeculateRequest, StepRequest,
};
use crate::guest::bindings::trellis::host::types::Candidate;
use crate::guest::store::GuestState;

/// The most candidates of one distribution: a two-pass selection on the device, which keeps whole rows there.
/// More is what `full` is for, and what it meters.
const N_TOP_MAX: u32 = 1024;

/// The most tokens of one `logprobs`, which cost what one token does. More is what `full` is for, too.
const N_LOGPROBS_MAX: usize = 1024;

/// Entries of a full row that count as one computed token.
const N_ENTRIES_PER_TOKEN: usize = 1024;

impl GuestState {
    /// The contexts of one call; each may stand there once only.
    pub(super) fn lock_contexts<'a>(
        &self,
        contexts: impl Iterator<Item = &'a Resource<GuestContext>>,
    ) -> Result<Vec<OwnedMutexGuard<Context>>, HostError> {
        let mut seen = HashSet::new();
        contexts
            .enumerate()
            .map(|(idx, context)| {
                if !seen.insert(context.rep()) {
                    return Err(invalid(
                        "context",
                        format!("number {idx} of the list"),
                        "each context once in a list",
                    ));
                }
                self.lock_context(context)
            })
            .collect()
    }

    /// The settings of a sampler for a draw from this context.
    pub(super) fn settings_for(
        &self,
        sampler: &Resource<super::types::GuestSampler>,
        context: &Context,
    ) -> Result<Arc<Sampler>, HostError> {
        self.table.get(sampler)?.for_model(context.model())
    }
}

/// Asks all contexts before it waits for the first answer, so that one batch computes them all.
async fn ask_all(
    contexts: &mut [OwnedMutexGuard<Context>],
    asks: Vec<Ask>,
) -> Result<Vec<Answer>, HostError> {
    let mut pending = Vec::with_capacity(asks.len());
    for (context, ask) in contexts.iter_mut().zip(asks) {
        pending.push(context.ask(ask).await?);
    }
    let mut answers = Vec::with_capacity(pending.len());
    for answer in pending {
        answers.push(answer.answer().await?);
    }
    Ok(answers)
}

async fn ask_one(mut context: OwnedMutexGuard<Context>, ask: Ask) -> Result<Answer, HostError> {
    Ok(context.ask(ask).await?.answer().await?)
}

impl Host for GuestState {
    async fn top(
        &mut self,
        contexts: Vec<Resource<GuestContext>>,
        n: u32,
    ) -> Result<Vec<Distribution>, HostError> {
        if !(1..=N_TOP_MAX).contains(&n) {
            return Err(invalid("n", n, format!("1 to {N_TOP_MAX}")));
        }
        let mut contexts = self.lock_contexts(contexts.iter())?;
        let n_for = |context: &Context| (n as usize).min(context.model().limits().vocab_size);
        let asks = contexts.iter().map(|context| Ask::Top { n: n_for(context) }).collect();
        let answers = ask_all(&mut contexts, asks).await?;
        Ok(answers
            .into_iter()
            .map(|answer| match answer {
                Answer::Top { candidates, entropy } => {
                    Distribution { candidates: candidates.into_iter().map(candidate).collect(), entropy }
                }
                other => unreachable!("asked for the top candidates, answered with {other:?}"),
            })
            .collect())
    }

    async fn step(&mut self, requests: Vec<StepRequest>) -> Result<Vec<Candidate>, HostError> {
        let mut contexts = self.lock_contexts(requests.iter().map(|request| &request.context))?;
        let samplers = requests
            .iter()
            .zip(&contexts)
            .map(|(request, context)| self.settings_for(&request.sampler, context))
            .collect::<Result<Vec<_>, HostError>>()?;
        let asks = samplers.iter().cloned().map(Ask::Sample).collect();
        let answers = ask_all(&mut contexts, asks).await?;
        let mut candidates = Vec::with_capacity(answers.len());
        for ((context, sampler), answer) in contexts.iter_mut().zip(&samplers).zip(answers) {
            let Answer::Sampled(drawn) = answer else {
                unreachable!("asked for a token, answered with {answer:?}");
            };
            candidates.push(candidate(drawn.candidate));
            context.append_drawn(&[drawn], sampler).await?;
        }
        Ok(candidates)
    }

    async fn speculate(&mut self, requests: Vec<SpeculateRequest>) -> Result<Vec<Vec<Candidate>>, HostError> {
        let mut contexts = self.lock_contexts(requests.iter().map(|request| &request.context))?;
        let samplers = requests
            .iter()
            .zip(&contexts)
            .map(|(request, context)| self.settings_for(&request.sampler, context))
            .collect::<Result<Vec<_>, HostError>>()?;
        let ask = |(request, sampler): (SpeculateRequest, &Arc<Sampler>)| Ask::Verify {
            sampler: sampler.clone(),
            guess: Guess::Chain(request.guess),
        };
        let asks = requests.into_iter().zip(&samplers).map(ask).collect();
        let answers = ask_all(&mut contexts, asks).await?;
        let mut candidates = Vec::with_capacity(answers.len());
        for ((context, sampler), answer) in contexts.iter_mut().zip(&samplers).zip(answers) {
            let Answer::Verified(drawn) = answer else {
                unreachable!("asked for a verification, answered with {answer:?}");
            };
            context.append_drawn(&drawn, sampler).await?;
            candidates.push(drawn.into_iter().map(|drawn| candidate(drawn.candidate)).collect());
        }
        Ok(candidates)
    }

    async fn score(&mut self, requests: Vec<ScoreRequest>) -> Result<Vec<Vec<f32>>, HostError> {
        if let Some(idx) = requests.iter().position(|request| request.continuation.is_empty()) {
            return Err(invalid("continuation", format!("empty in request {idx}"), "at least one token"));
        }
        let mut contexts = self.lock_contexts(requests.iter().map(|request| &request.context))?;
        let asks = requests.into_iter().map(|request| Ask::Continuation(request.continuation)).collect();
        Ok(ask_all(&mut contexts, asks).await?.into_iter().map(scores).collect())
    }

    async fn logprobs(
        &mut self,
        context: Resource<GuestContext>,
        tokens: Vec<u32>,
    ) -> Result<Vec<f32>, HostError> {
        if tokens.len() > N_LOGPROBS_MAX {
            return Err(invalid("tokens", tokens.len(), format!("at most {N_LOGPROBS_MAX} tokens")));
        }
        let context = self.lock_context(&context)?;
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        Ok(scores(ask_one(context, Ask::Scores(tokens)).await?))
    }

    async fn full(&mut self, context: Resource<GuestContext>) -> Result<Vec<f32>, HostError> {
        let context = self.lock_context(&context)?;
        let n_tokens = context.model().limits().vocab_size.div_ceil(N_ENTRIES_PER_TOKEN);
        self.owner.account.charge(Metered::Tokens, n_tokens as u64)?;
        match ask_one(context, Ask::Full).await? {
            Answer::Full(row) => Ok(row),
            other => unreachable!("asked for a full row, answered with {other:?}"),
        }
    }

    async fn embedding(&mut self, context: Resource<GuestContext>) -> Result<Vec<f32>, HostError> {
        let context = self.lock_context(&context)?;
        match ask_one(context, Ask::Embedding).await? {
            Answer::Embedding(hidden) => Ok(hidden),
            other => unreachable!("asked for an embedding, answered with {other:?}"),
        }
    }
}

fn scores(answer: Answer) -> Vec<f32> {
    match answer {
        Answer::Scores(scores) => scores,
        other => unreachable!("asked for scores, answered with {other:?}"),
    }
}
