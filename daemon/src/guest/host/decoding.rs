//! `decoding`

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;
use trellis_engine::account::Resource as Metered;
use trellis_engine::asked::{N_LOGPROBS_MAX, N_STATES_MAX, N_TOP_MAX, N_TOPS_MAX};
use trellis_engine::batch::Drawn;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Answer, Ask, Context, EngineError, Guess, N_ATTENTION_TOKENS_MAX, N_ENTRIES_PER_TOKEN};
use wasmtime::component::Resource;

use super::convert::{candidate, guess_tree, invalid};
use super::looks;
use super::types::{GuestContext, GuestSampler, HostError};
use crate::guest::bindings::trellis::host::decoding::{
    Distribution, Host, LogprobsRequest, Pooling, ScoreRequest, SpeculateRequest, SpeculateTreeRequest,
    StepRequest,
};
use crate::guest::bindings::trellis::host::types::Candidate;
use crate::guest::store::GuestState;

/// The most rows of one `full`, which leave the device whole and are held for the guest until it has them all.
const N_FULL_MAX: usize = 16;

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

    /// Draws for each context as long as it draws what is guessed, and appends the tokens.
    async fn verify(
        &mut self,
        guessed: Vec<(Resource<GuestContext>, Resource<GuestSampler>, Guess)>,
    ) -> Result<Vec<Vec<Candidate>>, HostError> {
        let mut contexts = self.lock_contexts(guessed.iter().map(|(context, ..)| context))?;
        let samplers = guessed
            .iter()
            .zip(&contexts)
            .map(|((_, sampler, _), context)| self.settings_for(sampler, context))
            .collect::<Result<Vec<_>, HostError>>()?;
        for (context, (_, sampler, _)) in contexts.iter_mut().zip(&guessed) {
            context.keep_to(self.table.get(sampler)?.given.rule());
        }
        let guesses = guessed.into_iter().map(|(.., guess)| guess);
        let asks =
            guesses.zip(&samplers).map(|(guess, sampler)| Ask::Verify { sampler: sampler.clone(), guess });
        let answers = ask_all(&mut contexts, asks.collect()).await?;
        let drawn = answers.into_iter().map(|answer| match answer {
            Answer::Verified(drawn) => drawn,
            other => unreachable!("asked for a verification, answered with {other:?}"),
        });
        let drawn: Vec<Vec<Drawn>> = drawn.collect();
        append_to_all(&mut contexts, &drawn, &samplers).await?;
        let candidates = |drawn: Vec<Drawn>| drawn.into_iter().map(|drawn| candidate(drawn.candidate));
        Ok(drawn.into_iter().map(|drawn| candidates(drawn).collect()).collect())
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
    for (context, ask) in contexts.iter_mut().zip(&asks) {
        context.foresee(ask)?;
    }
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

/// Appends what was drawn, to all contexts or to none.
async fn append_to_all(
    contexts: &mut [OwnedMutexGuard<Context>],
    drawn: &[Vec<Drawn>],
    samplers: &[Arc<Sampler>],
) -> Result<(), HostError> {
    let mut contexts: Vec<&mut Context> = contexts.iter_mut().map(|context| &mut **context).collect();
    Ok(Context::append_drawn_to_all(&mut contexts, drawn, samplers).await?)
}

impl Host for GuestState {
    async fn top(
        &mut self,
        contexts: Vec<Resource<GuestContext>>,
        n: u32,
    ) -> Result<Vec<Distribution>, HostError> {
        check_n_top(n)?;
        let mut contexts = self.lock_contexts(contexts.iter())?;
        self.pay_for_answer(contexts.len() * n as usize * size_of::<Candidate>())?;
        let asks = contexts.iter().map(|context| Ask::Top { n: n_candidates(context, n) }).collect();
        let answers = ask_all(&mut contexts, asks).await?;
        Ok(answers
            .into_iter()
            .map(|answer| match answer {
                Answer::Top { candidates, entropy } => distribution(candidates, entropy),
                other => unreachable!("asked for the top candidates, answered with {other:?}"),
            })
            .collect())
    }

    async fn tops(
        &mut self,
        requests: Vec<ScoreRequest>,
        n: u32,
    ) -> Result<Vec<Vec<Distribution>>, HostError> {
        check_n_top(n)?;
        check_continuations(&requests)?;
        let n_places: usize = requests.iter().map(|request| request.continuation.len()).sum();
        if n_places.saturating_mul(n as usize) > N_TOPS_MAX {
            let value = format!("{n} at each of {n_places} places");
            return Err(invalid("n", value, format!("at most {N_TOPS_MAX} candidates in all")));
        }
        let mut contexts = self.lock_contexts(requests.iter().map(|request| &request.context))?;
        self.pay_for_answer(n_places * n as usize * size_of::<Candidate>())?;
        let asks = requests
            .into_iter()
            .zip(&contexts)
            .map(|(ScoreRequest { continuation, .. }, context)| Ask::Tops {
                continuation,
                n: n_candidates(context, n),
            })
            .collect();
        Ok(ask_all(&mut contexts, asks)
            .await?
            .into_iter()
            .map(|answer| match answer {
                Answer::Tops(tops) => {
                    tops.into_iter().map(|top| distribution(top.candidates, top.entropy)).collect()
                }
                other => unreachable!("asked for the tops of places, answered with {other:?}"),
            })
            .collect())
    }

    async fn step(&mut self, requests: Vec<StepRequest>) -> Result<Vec<Candidate>, HostError> {
        if requests.iter().any(|request| !request.others.is_empty()) {
            return self.step_mixed(requests).await;
        }
        let mut contexts = self.lock_contexts(requests.iter().map(|request| &request.context))?;
        let samplers = requests
            .iter()
            .zip(&contexts)
            .map(|(request, context)| self.settings_for(&request.sampler, context))
            .collect::<Result<Vec<_>, HostError>>()?;
        for (context, request) in contexts.iter_mut().zip(&requests) {
            context.keep_to(self.table.get(&request.sampler)?.given.rule());
        }
        let asks = samplers.iter().cloned().map(Ask::Sample).collect();
        let answers = ask_all(&mut contexts, asks).await?;
        let drawn = answers.into_iter().map(|answer| match answer {
            Answer::Sampled(drawn) => vec![drawn],
            other => unreachable!("asked for a token, answered with {other:?}"),
        });
        let drawn: Vec<Vec<Drawn>> = drawn.collect();
        append_to_all(&mut contexts, &drawn, &samplers).await?;
        Ok(drawn.into_iter().flatten().map(|drawn| candidate(drawn.candidate)).collect())
    }

    async fn speculate(&mut self, requests: Vec<SpeculateRequest>) -> Result<Vec<Vec<Candidate>>, HostError> {
        let guessed = requests
            .into_iter()
            .map(|SpeculateRequest { context, sampler, guess }| (context, sampler, Guess::Chain(guess)));
        self.verify(guessed.collect()).await
    }

    async fn speculate_tree(
        &mut self,
        requests: Vec<SpeculateTreeRequest>,
    ) -> Result<Vec<Vec<Candidate>>, HostError> {
        let guessed = requests.into_iter().map(|SpeculateTreeRequest { context, sampler, guesses }| {
            Ok((context, sampler, guess_tree(&guesses)?))
        });
        self.verify(guessed.collect::<Result<_, HostError>>()?).await
    }

    async fn score(&mut self, requests: Vec<ScoreRequest>) -> Result<Vec<Vec<f32>>, HostError> {
        check_continuations(&requests)?;
        let mut contexts = self.lock_contexts(requests.iter().map(|request| &request.context))?;
        let asks = requests.into_iter().map(|request| Ask::Continuation(request.continuation)).collect();
        Ok(ask_all(&mut contexts, asks).await?.into_iter().map(scores).collect())
    }

    async fn logprobs(&mut self, requests: Vec<LogprobsRequest>) -> Result<Vec<Vec<f32>>, HostError> {
        for (idx, LogprobsRequest { tokens, .. }) in requests.iter().enumerate() {
            if tokens.len() > N_LOGPROBS_MAX {
                let value = format!("{} in request {idx}", tokens.len());
                return Err(invalid("tokens", value, format!("at most {N_LOGPROBS_MAX} tokens")));
            }
        }
        let contexts = self.lock_contexts(requests.iter().map(|request| &request.context))?;
        let mut logprobs = vec![Vec::new(); requests.len()];
        // Of no tokens nothing is asked.
        let (mut contexts, asks, places) = contexts
            .into_iter()
            .zip(requests)
            .zip(&mut logprobs)
            .filter(|((_, request), _)| !request.tokens.is_empty())
            .map(|((context, request), place)| (context, Ask::Scores(request.tokens), place))
            .collect::<(Vec<_>, Vec<_>, Vec<_>)>();
        for (place, answer) in places.into_iter().zip(ask_all(&mut contexts, asks).await?) {
            *place = scores(answer);
        }
        Ok(logprobs)
    }

    async fn full(&mut self, contexts: Vec<Resource<GuestContext>>) -> Result<Vec<Vec<f32>>, HostError> {
        if contexts.len() > N_FULL_MAX {
            return Err(invalid("contexts", contexts.len(), format!("at most {N_FULL_MAX} at once")));
        }
        let mut contexts = self.lock_contexts(contexts.iter())?;
        let n_tokens_for = |context: &OwnedMutexGuard<Context>| {
            context.model().limits().vocab_size.div_ceil(N_ENTRIES_PER_TOKEN)
        };
        let n_tokens: usize = contexts.iter().map(n_tokens_for).sum();
        let n_logits: usize = contexts.iter().map(|context| context.model().limits().vocab_size).sum();
        self.pay_for_answer(n_logits * size_of::<f32>())?;
        self.owner.account.charge(Metered::Tokens, n_tokens as u64)?;
        let asks = contexts.iter().map(|_| Ask::Full).collect();
        let row = |answer| match answer {
            Answer::Full(row) => row,
            other => unreachable!("asked for a full row, answered with {other:?}"),
        };
        Ok(ask_all(&mut contexts, asks).await?.into_iter().map(row).collect())
    }

    async fn embedding(&mut self, contexts: Vec<Resource<GuestContext>>) -> Result<Vec<Vec<f32>>, HostError> {
        let mut contexts = self.lock_contexts(contexts.iter())?;
        self.pay_for_answer(state_bytes(&contexts))?;
        let asks = contexts.iter().map(|_| Ask::Embedding).collect();
        let hidden = |answer| match answer {
            Answer::Embedding(hidden) => hidden,
            other => unreachable!("asked for an embedding, answered with {other:?}"),
        };
        Ok(ask_all(&mut contexts, asks).await?.into_iter().map(hidden).collect())
    }

    async fn hidden(
        &mut self,
        contexts: Vec<Resource<GuestContext>>,
        layers: Vec<u32>,
        pooling: Pooling,
    ) -> Result<Vec<Vec<Vec<f32>>>, HostError> {
        let n_layers = looks::layers(layers)?;
        let n_states = contexts.len() * n_layers.len();
        if n_states > N_STATES_MAX {
            return Err(invalid("layers", format!("{n_states} states"), format!("at most {N_STATES_MAX}")));
        }
        let pooling = match pooling {
            Pooling::Last => trellis_engine::Pooling::Last,
            Pooling::MeanFrom(first) => trellis_engine::Pooling::MeanFrom(first as usize),
        };
        let mut contexts = self.lock_contexts(contexts.iter())?;
        self.pay_for_answer(n_layers.len() * state_bytes(&contexts))?;
        let ask = |_: &OwnedMutexGuard<Context>| Ask::Hidden { n_layers: n_layers.clone(), pooling };
        let asks = contexts.iter().map(ask).collect();
        let hidden = |answer| match answer {
            Answer::Hidden(states) => states,
            other => unreachable!("asked for hidden states, answered with {other:?}"),
        };
        Ok(ask_all(&mut contexts, asks).await?.into_iter().map(hidden).collect())
    }

    async fn attention(
        &mut self,
        contexts: Vec<Resource<GuestContext>>,
        layers: Vec<u32>,
    ) -> Result<Vec<Vec<f32>>, HostError> {
        let mut contexts = self.lock_contexts(contexts.iter())?;
        let layers: Vec<usize> = layers.into_iter().map(|layer| layer as usize).collect();
        for context in &contexts {
            context.model().check_attention(&layers, context.tokens().len())?;
        }
        // They are held for the guest until it has them all.
        let n_tokens: usize = contexts.iter().map(|context| context.tokens().len()).sum();
        if n_tokens > N_ATTENTION_TOKENS_MAX {
            let n_tokens_max = N_ATTENTION_TOKENS_MAX;
            return Err(EngineError::AttentionTooLong { n_tokens, n_tokens_max }.into());
        }
        self.pay_for_answer(n_tokens * size_of::<f32>())?;
        let n_charged: usize =
            contexts.iter().map(|context| context.tokens().len().div_ceil(N_ENTRIES_PER_TOKEN)).sum();
        self.owner.account.charge(Metered::Tokens, n_charged as u64)?;
        let asks = contexts.iter().map(|_| Ask::Attention { layers: layers.clone() }).collect();
        let masses = |answer| match answer {
            Answer::Attention(masses) => masses,
            other => unreachable!("asked for attention, answered with {other:?}"),
        };
        Ok(ask_all(&mut contexts, asks).await?.into_iter().map(masses).collect())
    }
}

/// What a hidden state of each context takes.
fn state_bytes(contexts: &[OwnedMutexGuard<Context>]) -> usize {
    contexts.iter().map(|context| context.model().limits().hidden_size * size_of::<f32>()).sum()
}

fn check_continuations(requests: &[ScoreRequest]) -> Result<(), HostError> {
    match requests.iter().position(|request| request.continuation.is_empty()) {
        Some(idx) => Err(invalid("continuation", format!("empty in request {idx}"), "at least one token")),
        None => Ok(()),
    }
}

fn check_n_top(n: u32) -> Result<(), HostError> {
    if (1..=N_TOP_MAX).contains(&(n as usize)) {
        Ok(())
    } else {
        Err(invalid("n", n, format!("1 to {N_TOP_MAX}")))
    }
}

/// How many candidates there are of `n`.
fn n_candidates(context: &Context, n: u32) -> usize {
    (n as usize).min(context.model().limits().vocab_size)
}

fn distribution(candidates: Vec<trellis_engine::batch::Candidate>, entropy: f32) -> Distribution {
    Distribution { candidates: candidates.into_iter().map(candidate).collect(), entropy }
}

fn scores(answer: Answer) -> Vec<f32> {
    match answer {
        Answer::Scores(scores) => scores,
        other => unreachable!("asked for scores, answered with {other:?}"),
    }
}
