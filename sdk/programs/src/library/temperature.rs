//! Dividing the logits.

use super::number;
use crate::builder::{Row, Scalar};

/// `(x − max x) / t`. The constant changes nothing in the softmax, and keeps quotients in range.
pub fn temperature<'b>(x: Row<'b>, t: impl Scalar<'b>) -> Row<'b> {
    (x - x.max()) / t
}

/// Temperature by how unsure the model is: from `t − delta`, but at least 0.01, to `t + delta`, by the `exponent`-th power of
/// the entropy over the entropy of an even choice among the tokens above −∞.
///
/// llama.cpp, `llama_sampler_init_temp_ext`, whose lowest temperature is 0.
pub fn dynamic_temperature<'b>(
    x: Row<'b>,
    t: impl Scalar<'b>,
    delta: impl Scalar<'b>,
    exponent: impl Scalar<'b>,
) -> Row<'b> {
    let b = x.builder();
    let (t, delta) = (number(b, t), number(b, delta));
    let n = x.gt(f32::NEG_INFINITY).count();
    // Of a single token the entropy is 0, and so is that of an even choice.
    let evenness = x.entropy() / n.ln();
    // 0 to the power: e to the −∞.
    let share = (evenness.ln() * exponent).exp();
    let least = (t - delta).at_least(0.01);
    temperature(x, least + (t + delta - least) * share)
}
