//! Single steps over many contexts. The contexts of one call are computed in one batch.

use crate::bindings::trellis::host::decoding as raw;
use crate::{Context, GuessTree, Result, Sampler, Token};

pub use crate::bindings::trellis::host::types::Candidate;
#[doc(inline)]
pub use raw::{Distribution, Pooling};

/// Draws a token for each context and appends it. A context may be named once only.
///
/// # Errors
/// Those of [`Context::step`]; one mistake and no context is changed.
pub fn step_all<'a>(
    requests: impl IntoIterator<Item = (&'a Context, &'a Sampler)>,
) -> Result<Vec<Candidate>> {
    let requests: Vec<_> = requests
        .into_iter()
        .map(|(context, sampler)| raw::StepRequest {
            context: context.raw(),
            sampler: sampler.raw(),
            others: Vec::new(),
        })
        .collect();
    Ok(raw::step(&requests)?)
}

/// Draws tokens for each context and appends them, as far as they were guessed and one token further. A context may be
/// named once only.
///
/// # Errors
/// Those of [`Context::speculate`]; one mistake and no context is changed.
pub fn speculate_all<'a>(
    requests: impl IntoIterator<Item = (&'a Context, &'a Sampler, &'a [Token])>,
) -> Result<Vec<Vec<Candidate>>> {
    let requests: Vec<_> = requests
        .into_iter()
        .map(|(context, sampler, guess)| raw::SpeculateRequest {
            context: context.raw(),
            sampler: sampler.raw(),
            guess: guess.to_vec(),
        })
        .collect();
    Ok(raw::speculate(&requests)?)
}

/// As [`speculate_all`], with alternatives. A context may be named once only.
///
/// # Errors
/// Those of [`Context::speculate_tree`]; one mistake and no context is changed.
pub fn speculate_tree_all<'a>(
    requests: impl IntoIterator<Item = (&'a Context, &'a Sampler, &'a GuessTree)>,
) -> Result<Vec<Vec<Candidate>>> {
    let requests: Vec<_> = requests
        .into_iter()
        .map(|(context, sampler, tree)| raw::SpeculateTreeRequest {
            context: context.raw(),
            sampler: sampler.raw(),
            guesses: tree.raw().to_vec(),
        })
        .collect();
    Ok(raw::speculate_tree(&requests)?)
}

/// The `n` most probable next tokens of each context, best first. A context may be named once only.
///
/// # Errors
/// Those of [`Context::top`].
pub fn top_all<'a>(contexts: impl IntoIterator<Item = &'a Context>, n: u32) -> Result<Vec<Distribution>> {
    let contexts: Vec<_> = contexts.into_iter().map(Context::raw).collect();
    Ok(raw::top(&contexts, n)?)
}

/// The log-probability of each token of a continuation of each context. The contexts stay as they are.
///
/// # Errors
/// Those of [`Context::score`].
pub fn score_all<'a>(
    requests: impl IntoIterator<Item = (&'a Context, &'a [Token])>,
) -> Result<Vec<Vec<f32>>> {
    Ok(raw::score(&score_requests(requests))?)
}

/// The `n` most probable tokens at each place of a continuation of each context.
///
/// # Errors
/// Those of [`Context::tops`].
pub fn tops_all<'a>(
    requests: impl IntoIterator<Item = (&'a Context, &'a [Token])>,
    n: u32,
) -> Result<Vec<Vec<Distribution>>> {
    Ok(raw::tops(&score_requests(requests), n)?)
}

/// The log-probabilities of some tokens as the next one of each context.
///
/// # Errors
/// Those of [`Context::logprobs`].
pub fn logprobs_all<'a>(
    requests: impl IntoIterator<Item = (&'a Context, &'a [Token])>,
) -> Result<Vec<Vec<f32>>> {
    let requests: Vec<_> = requests
        .into_iter()
        .map(|(context, tokens)| raw::LogprobsRequest { context: context.raw(), tokens: tokens.to_vec() })
        .collect();
    Ok(raw::logprobs(&requests)?)
}

/// The log-probabilities of the whole vocabulary as the next token of each context, of 16 at most.
///
/// # Errors
/// Those of [`Context::full`].
pub fn full_all<'a>(contexts: impl IntoIterator<Item = &'a Context>) -> Result<Vec<Vec<f32>>> {
    let contexts: Vec<_> = contexts.into_iter().map(Context::raw).collect();
    Ok(raw::full(&contexts)?)
}

/// The hidden state of the last token of each context.
///
/// # Errors
/// Those of [`Context::embedding`].
pub fn embedding_all<'a>(contexts: impl IntoIterator<Item = &'a Context>) -> Result<Vec<Vec<f32>>> {
    let contexts: Vec<_> = contexts.into_iter().map(Context::raw).collect();
    Ok(raw::embedding(&contexts)?)
}

/// Hidden states of each context: of each layer one, `[hidden_size]`. 0 is the embedding of the tokens, the model's
/// `n_layers` what is left after the final norm.
///
/// # Errors
/// Those of [`Context::hidden`]; [`InvalidArgument`](crate::Error::InvalidArgument) for more than 1024 states in all.
pub fn hidden_all<'a>(
    contexts: impl IntoIterator<Item = &'a Context>,
    layers: &[u32],
    pooling: Pooling,
) -> Result<Vec<Vec<Vec<f32>>>> {
    let contexts: Vec<_> = contexts.into_iter().map(Context::raw).collect();
    Ok(raw::hidden(&contexts, layers, pooling)?)
}

/// The attention that the last token of each context puts on each of its tokens: the mean over the query heads of these layers,
/// counted from 0.
///
/// # Errors
/// Those of [`Context::attention`], where the tokens of all contexts count together.
pub fn attention_all<'a>(
    contexts: impl IntoIterator<Item = &'a Context>,
    layers: &[u32],
) -> Result<Vec<Vec<f32>>> {
    let contexts: Vec<_> = contexts.into_iter().map(Context::raw).collect();
    Ok(raw::attention(&contexts, layers)?)
}

fn score_requests<'a>(
    requests: impl IntoIterator<Item = (&'a Context, &'a [Token])>,
) -> Vec<raw::ScoreRequest<'a>> {
    requests
        .into_iter()
        .map(|(context, continuation)| raw::ScoreRequest {
            context: context.raw(),
            continuation: continuation.to_vec(),
        })
        .collect()
}
