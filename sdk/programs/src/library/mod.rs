//! The samplers that have names, each with its source.
//!
//! Most are stages: they take the row that the stage before made and give the next one, so that an order of one's own is
//! written down as such. A number may be a constant, or a [parameter](Builder::parameter) that is changed between tokens.
//!
//! ```
//! use trellis_programs::{Definition, Source, library};
//!
//! let program = Definition::build(|b| {
//!     let x = library::temperature(b.logits(), b.parameter(0));
//!     library::min_p(library::top_k(x, 50.0), 0.05).draw(Source::SEED)
//! });
//! # assert!(!program.operations.is_empty());
//! ```

mod chain;
mod detectors;
mod mirostat;
mod mixtures;
mod penalties;
mod power;
mod temperature;
mod truncation;
mod watermarks;

pub use chain::{Chain, Penalties, adjusted, chain};
pub use detectors::{z_of_green, z_of_gumbel};
pub use mirostat::mirostat;
pub use mixtures::{ensemble, experts, guidance, product};
pub use penalties::{
    Dry, bias_over, dry, frequency_presence, maximum_length, minimum_length, no_repeat_ngram, repetition,
};
pub use power::power;
pub use temperature::{dynamic_temperature, temperature};
pub use truncation::{epsilon, eta, min_p, plausible, top_k, top_n_sigma, top_p, typical, xtc};
pub use watermarks::{KgwKey, gumbel_watermark, kgw, unigram};

use crate::builder::{Builder, Number, Row, Scalar, Token};

/// The most probable token, ties to the lower one.
pub fn greedy(logits: Row<'_>) -> Token<'_> {
    logits.argmax()
}

/// The expert's log-probabilities over an amateur's where the expert finds a token plausible:
/// `(1 + beta) · expert − beta · amateur` over tokens at least `alpha` times as probable as the expert's best.
///
/// O'Brien and Lewis, "Contrastive Decoding Improves Reasoning in Large Language Models" (2023), equation 2; the
/// plausibility constraint is that of Li et al., "Contrastive Decoding" (ACL 2023).
pub fn contrastive<'b>(
    expert: Row<'b>,
    amateur: Row<'b>,
    alpha: impl Scalar<'b>,
    beta: impl Scalar<'b>,
) -> Row<'b> {
    let beta = number(expert.builder(), beta);
    let kept = expert.ge(expert.max() + number(expert.builder(), alpha).ln());
    (expert + (expert - amateur) * beta).keep(kept)
}

/// A plain number as a value of the program.
fn number<'b>(builder: &'b Builder, scalar: impl Scalar<'b>) -> Number<'b> {
    scalar.number_in(builder)
}
