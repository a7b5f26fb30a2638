//! Decoding many contexts at once, and whether that gives what each gives alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Candidate, Token};
use trellis_engine::sampling::Sampler;
use trellis_engine::{Ahead, Ask, Context, MaskSource, ModelHandle, Pull, RunKey, RunSettings};

use super::regret::{Difference, tokens};
use crate::cli::bench::{BenchError, engine};

/// The most contexts that are decoded alone too: each takes as long as all together.
const N_ALONE_MAX: usize = 4;

/// A context's greedy tokens, and when each came.
#[derive(Clone, Debug)]
pub(super) struct Decoded {
    pub(super) drawn: Vec<Candidate>,
    pub(super) arrivals: Vec<Instant>,
}

/// Steps in which all contexts were decoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Together {
    pub(super) step: Duration,
    /// Mean positions of a context.
    pub(super) n_positions: f64,
}

/// Fails with the numbers where the contexts do not fit the engine all at once.
pub(super) fn check_room(
    model: &ModelHandle,
    n_contexts: usize,
    n_positions: usize,
) -> Result<(), BenchError> {
    let limits = model.limits();
    if n_contexts > limits.n_rows_max {
        return Err(BenchError::TooManyContexts { n_contexts, n_rows_max: limits.n_rows_max });
    }
    let needed = n_contexts * n_positions.div_ceil(PAGE_LEN);
    if needed > limits.n_pages {
        return Err(BenchError::TooFewPages { n_contexts, n_positions, needed, n_pages: limits.n_pages });
    }
    Ok(())
}

/// Computes all prompts, then decodes `n_tokens` greedily after each, all at once.
///
/// # Errors
/// The engine failed, or stopped early.
pub(super) async fn decode(
    model: &ModelHandle,
    prompts: &[Vec<Token>],
    n_tokens: usize,
) -> Result<Vec<Decoded>, BenchError> {
    let contexts = try_join_all(prompts.iter().map(|prompt| prepare(model, prompt))).await?;
    try_join_all(contexts.into_iter().map(|context| pull(context, n_tokens))).await
}

async fn prepare(model: &ModelHandle, prompt: &[Token]) -> Result<Context, BenchError> {
    let mut context = Context::create(model, engine::owner()).await?;
    context.append(prompt).await?;
    context.ask(Ask::Prefill).await?.answer().await?;
    Ok(context)
}

async fn pull(mut context: Context, n_tokens: usize) -> Result<Decoded, BenchError> {
    let settings = || RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: [].into(),
        n_tokens_max: Some(n_tokens),
        ahead: Ahead::Unbounded,
        masks: MaskSource::Sampler,
    };
    let mut decoded = Decoded { drawn: Vec::with_capacity(n_tokens), arrivals: Vec::with_capacity(n_tokens) };
    while decoded.drawn.len() < n_tokens {
        match context.pull(RunKey(0), settings).await? {
            Pull::Token(drawn) => decoded.drawn.push(drawn.candidate),
            Pull::Finished(_) => {
                return Err(BenchError::Short { wanted: n_tokens, got: decoded.drawn.len() });
            }
        }
        decoded.arrivals.push(Instant::now());
    }
    Ok(decoded)
}

/// The steps from the one in which the last context began to the one in which the first ended. `None` when there are
/// hardly any.
pub(super) fn together(decoded: &[Decoded], n_prompt: usize) -> Option<Together> {
    let begin = decoded.iter().filter_map(|context| context.arrivals.first()).max()?;
    let end = decoded.iter().filter_map(|context| context.arrivals.last()).min()?;
    let inside = |context: &Decoded| {
        let first = context.arrivals.iter().position(|arrival| arrival >= begin)?;
        let last = context.arrivals.iter().rposition(|arrival| arrival <= end)?;
        (last >= first + 4).then(|| (first, last, context.arrivals[last] - context.arrivals[first]))
    };
    // All take part in the same steps; the stream that saw most of them is timed.
    let (first, last, elapsed) =
        decoded.iter().filter_map(inside).max_by_key(|(first, last, _)| last - first)?;
    // The step that brings token i reads the prompt and the i tokens before, of which the last is new to it.
    let n_positions = n_prompt as f64 + (first + 1 + last) as f64 / 2.0;
    Some(Together { step: elapsed / (last - first) as u32, n_positions })
}

/// How far greedy decoding in a batch agrees with that alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(super) struct Agreement {
    pub(super) n_tokens: usize,
    /// Before the first difference in each context.
    pub(super) n_equal: usize,
    /// Differences of log-probabilities over those, in nats.
    pub(super) mean: f64,
    pub(super) p99: f64,
    /// The most that the reference's choice is more probable than another one, both scored alone, in nats.
    pub(super) regret: f64,
}

/// What may differ, in nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tolerance {
    pub(crate) mean_max: f64,
    pub(crate) tail_max: f64,
}

impl Tolerance {
    /// Another batch is computed by other kernels, which round otherwise: as for a type of 16 bits against the CPU.
    pub(crate) const HALF: Self = Self { mean_max: 0.06, tail_max: 0.2 };
    /// The same in f32.
    pub(crate) const SINGLE: Self = Self { mean_max: 1e-3, tail_max: 1e-3 };
    /// The CPU computes a row in the same way in every batch.
    pub(crate) const NONE: Self = Self { mean_max: 0.0, tail_max: 0.0 };
}

impl Agreement {
    /// Contexts decoded alone, next to the same ones in a batch, and the regrets of those that differ.
    pub(super) fn of(alone: &[Decoded], batch: &[Decoded], regrets: &[f64]) -> Self {
        let mut agreement = Self::default();
        let mut diffs = Vec::new();
        for (alone, batch) in alone.iter().zip(batch) {
            agreement.n_tokens += alone.drawn.len();
            for (a, b) in alone.drawn.iter().zip(&batch.drawn) {
                if a.token != b.token {
                    break;
                }
                agreement.n_equal += 1;
                diffs.push(f64::from((a.logprob - b.logprob).abs()));
            }
        }
        // NaN is above everything in this order.
        agreement.regret = regrets.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0);
        diffs.sort_unstable_by(f64::total_cmp);
        if let Some(last) = diffs.len().checked_sub(1) {
            agreement.mean = diffs.iter().sum::<f64>() / diffs.len() as f64;
            agreement.p99 = diffs[(last as f64 * 0.99).round() as usize];
        }
        agreement
    }

    /// # Errors
    /// They differ by more.
    pub(super) fn check(&self, n_contexts: usize, tolerance: Tolerance) -> Result<(), BenchError> {
        let Self { n_tokens, n_equal, mean, p99, regret } = *self;
        let Tolerance { mean_max, tail_max } = tolerance;
        let is_same = n_tokens > 0 && (n_equal == n_tokens || tolerance != Tolerance::NONE);
        if is_same && mean <= mean_max && p99 <= tail_max && regret <= tail_max {
            return Ok(());
        }
        Err(BenchError::Disagreement { n_contexts, mean, p99, regret, mean_max, tail_max })
    }
}

/// Decodes the first contexts alone and next to all others.
///
/// # Errors
/// The results differ by more than allowed, or the engine failed.
pub(super) async fn verify(
    model: &ModelHandle,
    prompts: &[Vec<Token>],
    n_tokens: usize,
    tolerance: Tolerance,
) -> Result<Agreement, BenchError> {
    let mut alone = Vec::new();
    for prompt in prompts.iter().take(N_ALONE_MAX) {
        alone.extend(decode(model, std::slice::from_ref(prompt), n_tokens).await?);
    }
    let batch = decode(model, prompts, n_tokens).await?;
    let mut regrets = Vec::new();
    for ((prompt, alone), batch) in prompts.iter().zip(&alone).zip(&batch) {
        let expected = tokens(&alone.drawn);
        if let Some(difference) = Difference::first(&expected, &tokens(&batch.drawn)) {
            regrets.push(difference.regret(model, prompt, &expected).await?);
        }
    }
    let agreement = Agreement::of(&alone, &batch, &regrets);
    agreement.check(prompts.len(), tolerance)?;
    Ok(agreement)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(tokens: &[(Token, f32)], start_ms: u64) -> Decoded {
        Decoded {
            drawn: tokens.iter().map(|&(token, logprob)| Candidate { token, logprob }).collect(),
            arrivals: (0..tokens.len() as u64)
                .map(|i| *EPOCH + Duration::from_millis(start_ms + 10 * i))
                .collect(),
        }
    }

    static EPOCH: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

    #[test]
    fn only_steps_with_all_contexts_count() {
        let early = decoded(&[(1, 0.0); 20], 0);
        let late = decoded(&[(1, 0.0); 20], 50);
        // From 50 to 190 ms.
        let seen = together(&[early.clone(), late], 100).expect("they overlap");
        assert_eq!(seen.step, Duration::from_millis(10));
        assert!((105.0..=115.0).contains(&seen.n_positions), "{seen:?}");
        let after = decoded(&[(1, 0.0); 20], 180);
        assert_eq!(together(&[early.clone(), after], 100), None);
        assert_eq!(together(&[early], 100).expect("alone").n_positions, 110.0);
    }

    #[test]
    fn differences_are_counted_up_to_the_first() {
        let alone = decoded(&[(1, -1.0), (2, -2.0), (3, -1.0), (4, -1.0)], 0);
        let batch = decoded(&[(1, -1.5), (2, -2.0), (5, -1.25), (9, -9.0)], 0);
        let agreement = Agreement::of(&[alone], &[batch], &[0.25]);
        let expected = Agreement { n_tokens: 4, n_equal: 2, mean: 0.25, p99: 0.5, regret: 0.25 };
        assert_eq!(agreement, expected);
        assert!(agreement.check(1, Tolerance { mean_max: 0.25, tail_max: 0.5 }).is_ok());
        let error = agreement.check(1, Tolerance::HALF).expect_err("too far");
        assert!(matches!(error, BenchError::Disagreement { .. }));
        assert_eq!(error.exit_code(), 1);
        assert!(Agreement::default().check(1, Tolerance::HALF).is_err(), "nothing was compared");
    }

    #[test]
    fn not_a_number_is_no_agreement() {
        let alone = decoded(&[(1, f32::NAN)], 0);
        let same = Agreement::of(std::slice::from_ref(&alone), &[decoded(&[(1, -1.0)], 0)], &[]);
        assert!(same.check(1, Tolerance::HALF).is_err());
        let other = Agreement::of(&[alone], &[decoded(&[(2, -1.0)], 0)], &[f64::NAN]);
        assert!(other.check(1, Tolerance::HALF).is_err());
    }

    #[test]
    fn other_choices_count_by_what_the_reference_says_of_them() {
        // Both are sure of their own choice: only the reference knows that one of them is wrong.
        let alone = decoded(&[(1, -0.1), (2, -0.1)], 0);
        let batch = decoded(&[(7, -0.1), (8, -0.1)], 0);
        let of =
            |regret| Agreement::of(std::slice::from_ref(&alone), std::slice::from_ref(&batch), &[regret]);
        assert_eq!(of(9.0).n_equal, 0);
        assert!(of(9.0).check(1, Tolerance::HALF).is_err());
        assert!(of(0.1).check(1, Tolerance::HALF).is_ok());
        assert!(of(0.0).check(1, Tolerance::NONE).is_err(), "the CPU has no other choice");
    }
}
