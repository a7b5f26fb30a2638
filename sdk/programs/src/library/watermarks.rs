//! Marks that a detector with the key finds.

use super::{bias_over, number};
use crate::builder::{Row, Scalar, Token};
use crate::operation::{Noise, Source};

/// What a green list depends on.
#[derive(Clone, Copy, Debug)]
pub struct KgwKey {
    /// The secret.
    pub key: u64,
    /// How many tokens before the draw choose the list; 1 in the paper.
    pub n_tokens: u8,
}

/// Adds `delta` to a share `gamma` of the vocabulary that the tokens before choose.
///
/// Kirchenbauer et al., "A Watermark for Large Language Models" (ICML 2023), algorithm 2. A token is green where its
/// uniform noise is below `gamma`.
pub fn kgw<'b>(x: Row<'b>, key: KgwKey, gamma: impl Scalar<'b>, delta: impl Scalar<'b>) -> Row<'b> {
    let b = x.builder();
    let source = Source::Key { key: key.key, n_tokens: key.n_tokens, lane: 0 };
    let green = b.noise(Noise::Uniform, source).lt(number(b, gamma));
    bias_over(x, green, delta)
}

/// Adds `delta` to a share `gamma` of the vocabulary that is always the same.
///
/// Zhao et al., "Provable Robust Watermarking for AI-Generated Text" (ICLR 2024).
pub fn unigram<'b>(x: Row<'b>, key: u64, gamma: impl Scalar<'b>, delta: impl Scalar<'b>) -> Row<'b> {
    kgw(x, KgwKey { key, n_tokens: 0 }, gamma, delta)
}

/// Draws from the softmax with noise that the last `n_tokens` and the key decide: the text is distributed as without.
///
/// Aaronson, "My AI Safety Lecture" (2022); Kuditipudi et al., "Robust Distortion-free Watermarks" (2023) call the
/// estimator exponential minimum sampling. `argmax ln p + g` is `argmax u^(1/p)`.
pub fn gumbel_watermark(x: Row<'_>, key: u64, n_tokens: u8) -> Token<'_> {
    x.draw(Source::Key { key, n_tokens, lane: 0 })
}
