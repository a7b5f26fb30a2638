//! The logits of several contexts made one: stages over the row of the first and those of the other
//! [members](crate::Builder::member) of a mixture.
//!
//! Rows of logits that differ by a constant stand for the same probabilities, so sums and differences of logits need no
//! log-probabilities. What the first says is kept to the bit where the others have no weight.

use super::number;
use crate::builder::{Row, Scalar};

/// Classifier-free guidance: away from what would be said without the prompt, or under a negative one, towards what is said
/// with it; `unconditional + scale · (conditional − unconditional)`. A scale of 1 is the conditional alone.
///
/// Sanchez and others, "Stay on topic with Classifier-Free Guidance" (2023), equation 7. With the context left out of the
/// second prompt it is the context-aware decoding of Shi and others, "Trusting Your Evidence" (2023), whose α is
/// `scale − 1`.
pub fn guidance<'b>(conditional: Row<'b>, unconditional: Row<'b>, scale: impl Scalar<'b>) -> Row<'b> {
    let weight = number(conditional.builder(), scale) - 1.0;
    conditional + (conditional - unconditional) * weight
}

/// Towards what an expert says and away from what an anti-expert does: `base + alpha · (expert − anti_expert)`.
///
/// Liu and others, "DExperts: Decoding-Time Controlled Text Generation with Experts and Anti-Experts" (2021), equation 1. They
/// truncate by the base's nucleus first: [`keep`](Row::keep) the set that `base.nucleus(p)` is.
pub fn experts<'b>(base: Row<'b>, expert: Row<'b>, anti_expert: Row<'b>, alpha: impl Scalar<'b>) -> Row<'b> {
    base + (expert - anti_expert) * number(base.builder(), alpha)
}

/// An ensemble: the logarithm of the weighted mean of the probabilities of two rows, where the second has this weight between
/// 0 and 1. Each row is normalized by itself, so that it costs several readings: see [`product`] for one that does not.
///
/// The linear opinion pool; Genest and Zidek, "Combining Probability Distributions" (1986), section 3.
pub fn ensemble<'b>(first: Row<'b>, second: Row<'b>, weight: impl Scalar<'b>) -> Row<'b> {
    let weight = number(first.builder(), weight);
    let one = first.builder().constant(1.0);
    let probabilities = |row: Row<'b>| (row - row.log_sum_exp()).exp();
    (probabilities(first) * (one - weight) + probabilities(second) * weight).ln()
}

/// A product of experts: the weighted mean of two rows of logits, where the second has this weight. More rows are put in one
/// after the other.
///
/// The logarithmic opinion pool; Genest and Zidek (1986), section 3. Hinton, "Products of Experts" (1999).
pub fn product<'b>(first: Row<'b>, second: Row<'b>, weight: impl Scalar<'b>) -> Row<'b> {
    first + (second - first) * number(first.builder(), weight)
}
