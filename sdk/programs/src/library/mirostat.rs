//! Text of a steady surprise.

use std::f32::consts::LN_2;

use super::number;
use crate::builder::{Row, Scalar, Token};
use crate::operation::Source;

/// Draws so that the mean surprise comes to `tau` bits: tokens more surprising than `mu` bits are left out, and after each
/// token `mu` moves by `eta` times how far its surprise was from `tau`. Keeps one number, at first twice `first_tau`.
///
/// Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity" (ICLR 2021), algorithm 2;
/// llama.cpp, `llama_sampler_init_mirostat_v2`. Surprise is that of the distribution after leaving out.
pub fn mirostat<'b>(x: Row<'b>, first_tau: f32, tau: impl Scalar<'b>, eta: impl Scalar<'b>) -> Token<'b> {
    let b = x.builder();
    let (tau, eta) = (number(b, tau), number(b, eta));
    let mu = b.state(2.0 * first_tau);
    let logprobs = x.log_softmax();
    let bound = (mu.get() * -LN_2).at_most(logprobs.max());
    let kept = logprobs.keep(logprobs.ge(bound)).log_softmax();
    let token = kept.draw(Source::SEED);
    let surprise = kept.at(token) * (-1.0 / LN_2);
    mu.set(mu.get() - eta * (surprise - tau));
    token
}
