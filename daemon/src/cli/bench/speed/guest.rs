//! The same streams from guests and from the engine alone.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use serde::Serialize;
use trellis_engine::ModelHandle;
use trellis_engine::batch::Token;

use super::decode::Tolerance;
use super::regret::check_streams;
use crate::cli::bench::engine;
use crate::cli::bench::guest::Probe;
use crate::cli::bench::samples::median;
use crate::cli::error::CliError;

/// What one token of each context costs: medians over pairs of runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct GuestCost {
    pub(super) n_contexts: usize,
    pub(super) engine_us: f64,
    pub(super) guest_us: f64,
    /// Of a pair, so that what disturbs both cancels out.
    pub(super) difference_us: f64,
    pub(super) difference_percent: f64,
    /// Tokens that are at least the same from each guest as from the engine alone, of a stream of `n_tokens`.
    pub(super) n_equal: usize,
    pub(super) n_tokens: usize,
}

/// Streams of two lengths: the difference is free of starts, prompts and ends.
#[derive(Clone, Copy, Debug)]
struct Lengths {
    few: usize,
    many: usize,
}

impl Lengths {
    fn per_token(self, few: Duration, many: Duration) -> f64 {
        (many.as_secs_f64() - few.as_secs_f64()) * 1e6 / (self.many - self.few) as f64
    }
}

/// Runs `n_contexts` streams from as many guests, and the same from the engine alone, in turn; verified first.
///
/// # Errors
/// A guest or the engine failed, or a guest decoded something else than the engine alone does.
///
/// # Panics
/// There are less than two tokens, or no runs.
pub(super) async fn compare(
    model: &ModelHandle,
    probe: &Probe,
    n_contexts: usize,
    n_tokens: usize,
    n_runs: usize,
    tolerance: Tolerance,
) -> Result<GuestCost, CliError> {
    let prompt = engine::prompt(model)?;
    let lengths = Lengths { few: (n_tokens / 4).max(1), many: n_tokens };
    let alone = engine::stream(model, &prompt, n_tokens).await?.tokens;

    // The first run of each is not timed: batches of a new size may have to be prepared.
    from_engine(model, &prompt, n_contexts, lengths.few).await?;
    let streams = try_join_all((0..n_contexts).map(|_| probe.stream(n_tokens))).await?;
    let streams: Vec<Vec<Token>> = streams.into_iter().map(|stream| stream.tokens).collect();
    let place = format!("through {n_contexts} guests");
    let n_equal = check_streams(model, &prompt, &alone, &streams, &place, tolerance).await?;

    let (mut engines, mut guests) = (Vec::new(), Vec::new());
    for run in 0..n_runs {
        // Either one first.
        for is_engine in [run % 2 == 0, run % 2 != 0] {
            if is_engine {
                let few = from_engine(model, &prompt, n_contexts, lengths.few).await?;
                let many = from_engine(model, &prompt, n_contexts, lengths.many).await?;
                engines.push(lengths.per_token(few, many));
            } else {
                let few = from_guests(probe, n_contexts, lengths.few).await?;
                let many = from_guests(probe, n_contexts, lengths.many).await?;
                guests.push(lengths.per_token(few, many));
            }
        }
    }
    let pairs = || engines.iter().zip(&guests);
    Ok(GuestCost {
        n_contexts,
        engine_us: median(engines.clone()),
        guest_us: median(guests.clone()),
        difference_us: median(pairs().map(|(engine, guest)| guest - engine).collect()),
        difference_percent: median(pairs().map(|(engine, guest)| (guest / engine - 1.0) * 100.0).collect()),
        n_equal,
        n_tokens,
    })
}

async fn from_engine(
    model: &ModelHandle,
    prompt: &[Token],
    n_contexts: usize,
    n_tokens: usize,
) -> Result<Duration, CliError> {
    let started = Instant::now();
    engine::contexts(model, prompt, n_tokens, n_contexts).await?;
    Ok(started.elapsed())
}

async fn from_guests(probe: &Probe, n_contexts: usize, n_tokens: usize) -> Result<Duration, CliError> {
    let started = Instant::now();
    try_join_all((0..n_contexts).map(|_| probe.stream(n_tokens))).await?;
    Ok(started.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_and_ends_cancel_out() {
        let lengths = Lengths { few: 10, many: 110 };
        let start = Duration::from_millis(50);
        let of = |n_tokens| start + n_tokens * Duration::from_micros(300);
        let per_token = lengths.per_token(of(10), of(110));
        assert!((per_token - 300.0).abs() < 1e-6, "{per_token}");
    }
}
