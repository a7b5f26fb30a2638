//! The engine alone, in this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use trellis_engine::batch::Token;
use trellis_engine::model::SpecialTokens;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Ahead, Ask, Context, EngineError, MaskSource, ModelHandle, Pull, RunKey, RunSettings};

use super::BenchError;

/// What the streams continue. `probe` appends it in the same way.
pub(crate) const TEXT: &str = "Once upon a time";

/// A greedy stream and how long it took.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    pub(crate) tokens: Vec<Token>,
    /// From the start to the first token.
    pub(crate) first: Duration,
    /// From the first token to the last.
    pub(crate) rest: Duration,
}

impl Stream {
    /// Tokens per second, the prompt not counted.
    pub(crate) fn rate(&self) -> f64 {
        (self.tokens.len() - 1) as f64 / self.rest.as_secs_f64()
    }
}

/// The tokens of [`TEXT`], after the token that every text begins with.
///
/// # Errors
/// The tokenizer cannot encode it.
pub(crate) fn prompt(model: &ModelHandle) -> Result<Vec<Token>, BenchError> {
    let text = model.model().tokenizer.encode(TEXT, SpecialTokens::AsText)?;
    Ok(model.model().bos_token.into_iter().chain(text).collect())
}

pub(crate) fn owner() -> Owner {
    Owner {
        actor: ActorId(0),
        session: SessionId(0),
        guest: GuestId(0),
        account: Account::new("guest", Budget::UNLIMITED, None),
    }
}

/// Decodes `n_tokens` greedily, one pull at a time as a guest would.
///
/// # Errors
/// The engine failed, or stopped early.
pub(crate) async fn stream(
    model: &ModelHandle,
    prompt: &[Token],
    n_tokens: usize,
) -> Result<Stream, BenchError> {
    let settings = || RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: [].into(),
        n_tokens_max: Some(n_tokens),
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    let mut context = Context::create(model, owner()).await?;
    context.append(prompt).await?;
    let mut tokens = Vec::with_capacity(n_tokens);
    let started = Instant::now();
    let mut first = started;
    while tokens.len() < n_tokens {
        match context.pull(RunKey(0), settings).await? {
            Pull::Token(drawn) => tokens.push(drawn.candidate.token),
            Pull::Finished(_) => return Err(BenchError::Short { wanted: n_tokens, got: tokens.len() }),
        }
        if tokens.len() == 1 {
            first = Instant::now();
        }
    }
    Ok(Stream { tokens, first: first - started, rest: first.elapsed() })
}

/// Decodes the same stream in many contexts at once. Returns their tokens and tokens per second, all together
/// and from the start to the last end.
///
/// # Errors
/// As [`stream`].
pub(crate) async fn contexts(
    model: &ModelHandle,
    prompt: &[Token],
    n_tokens: usize,
    n_contexts: usize,
) -> Result<(Vec<Vec<Token>>, f64), BenchError> {
    let started = Instant::now();
    let streams = try_join_all((0..n_contexts).map(|_| stream(model, prompt, n_tokens))).await?;
    let rate = (n_contexts * n_tokens) as f64 / started.elapsed().as_secs_f64();
    Ok((streams.into_iter().map(|stream| stream.tokens).collect(), rate))
}

/// Tokens per second of a prompt that no cache knows; each `run` has its own.
///
/// # Errors
/// The engine failed.
pub(crate) async fn prefill(model: &ModelHandle, n_tokens: usize, run: usize) -> Result<f64, EngineError> {
    let mut context = Context::create(model, owner()).await?;
    context.append(&unseen(model, n_tokens, run)).await?;
    let started = Instant::now();
    context.ask(Ask::Prefill).await?.answer().await?;
    Ok(n_tokens as f64 / started.elapsed().as_secs_f64())
}

/// The time from a prompt that no cache knows to the first token.
///
/// # Errors
/// The engine failed.
pub(crate) async fn first_token(
    model: &ModelHandle,
    n_tokens: usize,
    run: usize,
) -> Result<Duration, BenchError> {
    Ok(stream(model, &unseen(model, n_tokens, run), 1).await?.first)
}

/// Tokens without meaning. Those of another length or run have no beginning in common with them.
pub(crate) fn unseen(model: &ModelHandle, n_tokens: usize, run: usize) -> Vec<Token> {
    let vocab_size = model.limits().vocab_size as u64;
    let seed = mixed(((n_tokens as u64) << 32) | run as u64);
    (0..n_tokens as u64).map(|i| (mixed(seed.wrapping_add(i)) % vocab_size) as Token).collect()
}

/// The finaliser of splitmix64.
pub(crate) fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
