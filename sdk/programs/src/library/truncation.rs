//! Leaving out tokens.

use super::number;
use crate::builder::{Row, Scalar};
use crate::operation::Source;

/// Keeps the `k` largest, and all that tie with the k-th.
///
/// transformers, `TopKLogitsWarper`.
pub fn top_k<'b>(x: Row<'b>, k: impl Scalar<'b>) -> Row<'b> {
    x.keep(x.largest(k))
}

/// Keeps the most probable tokens that reach `p` together.
///
/// Holtzman et al., "The Curious Case of Neural Text Degeneration" (ICLR 2020); transformers, `TopPLogitsWarper`.
pub fn top_p<'b>(x: Row<'b>, p: impl Scalar<'b>) -> Row<'b> {
    x.keep(x.nucleus(p))
}

/// Keeps tokens at least `p` times as probable as the best.
///
/// Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024); transformers, `MinPLogitsWarper`.
pub fn min_p<'b>(x: Row<'b>, p: impl Scalar<'b>) -> Row<'b> {
    let p = number(x.builder(), p);
    x.keep(x.ge(x.max() + p.ln()))
}

/// Keeps what an expert finds plausible: tokens at least `alpha` times as probable as its best.
///
/// Li et al., "Contrastive Decoding: Open-ended Text Generation as Optimization" (ACL 2023), section 3.2.
pub fn plausible<'b>(x: Row<'b>, alpha: impl Scalar<'b>) -> Row<'b> {
    min_p(x, alpha)
}

/// Keeps the tokens whose surprise is nearest to the entropy, that reach `p` together.
///
/// Meister et al., "Locally Typical Sampling" (TACL 2023); transformers, `TypicalLogitsWarper`.
pub fn typical<'b>(x: Row<'b>, p: impl Scalar<'b>) -> Row<'b> {
    let logprobs = x.log_softmax();
    let distance = (logprobs + x.entropy()).abs();
    x.keep(logprobs.nucleus_by(-distance, p))
}

/// Keeps tokens of at least this probability, and the best.
///
/// Hewitt et al., "Truncation Sampling as Language Model Desmoothing" (EMNLP Findings 2022); transformers,
/// `EpsilonLogitsWarper`.
pub fn epsilon<'b>(x: Row<'b>, epsilon: impl Scalar<'b>) -> Row<'b> {
    let logprobs = x.log_softmax();
    let bound = number(x.builder(), epsilon).ln().at_most(logprobs.max());
    x.keep(logprobs.ge(bound))
}

/// Keeps tokens of at least the probability min(ε, √ε · e^−entropy), and the best.
///
/// Hewitt et al., as [`epsilon`](fn@epsilon); transformers, `EtaLogitsWarper`.
pub fn eta<'b>(x: Row<'b>, epsilon: impl Scalar<'b>) -> Row<'b> {
    let epsilon = number(x.builder(), epsilon).ln();
    let logprobs = x.log_softmax();
    let bound = epsilon.at_most(epsilon * 0.5 - x.entropy());
    x.keep(logprobs.ge(bound.at_most(logprobs.max())))
}

/// Keeps logits at most `n` standard deviations below the largest.
///
/// Tang et al., "Top-nσ: Not All Logits Are You Need" (2024); llama.cpp, `llama_sampler_init_top_n_sigma`, which takes
/// the deviation over tokens above −∞.
pub fn top_n_sigma<'b>(x: Row<'b>, n: impl Scalar<'b>) -> Row<'b> {
    let sigma = x.variance_over(x.gt(f32::NEG_INFINITY)).sqrt();
    x.keep(x.ge(x.max() - sigma * n))
}

/// With this probability leaves out all tokens of at least the probability `threshold` but the least probable of them.
///
/// p-e-w, "Exclude Top Choices" (text-generation-webui 6335); llama.cpp, `llama_sampler_init_xtc`. Draws its number from
/// the seed's lane 1.
pub fn xtc<'b>(x: Row<'b>, probability: impl Scalar<'b>, threshold: impl Scalar<'b>) -> Row<'b> {
    let b = x.builder();
    let logprobs = x.log_softmax();
    let top = logprobs.ge(number(b, threshold).ln());
    let least = -(-logprobs).max_over(top);
    let rest = x.keep(!(top & logprobs.gt(least)));
    b.uniform(Source::Seed { lane: 1 }).lt(number(b, probability)).select_row(rest, x)
}
