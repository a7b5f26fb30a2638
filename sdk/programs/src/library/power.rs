//! A power of the distribution, and what its tokens leave of that of whole texts.

use crate::builder::{Row, Scalar, Token};
use crate::operation::Source;

/// Draws token v with probability `p(v)^alpha / Z`, where `Z = Σ p(v)^alpha`, and reports the sum of the logarithms of all Z so far,
/// in nats. Keeps that number, at first 0.
///
/// With this as proposal the weight of a whole text under `p^alpha` is the product of its Z: what importance weights and the moves
/// of Karan and Du, "Reasoning with Sampling: Your Base Model is Smarter Than You Think" (2025), come to.
pub fn power<'b>(x: Row<'b>, alpha: impl Scalar<'b>) -> Token<'b> {
    let b = x.builder();
    let powers = x.log_softmax() * alpha;
    let state = b.state(0.0);
    let sum = state.get() + powers.log_sum_exp();
    state.set(sum);
    b.report(sum);
    powers.draw(Source::SEED)
}
