//! Making tokens less likely, or more, by what stands before them.

use super::number;
use crate::builder::{Row, Scalar, Set};
use crate::operation::MaskId;

/// Divides positive and multiplies other logits of the last `n` tokens by `penalty`; of all tokens when `None`.
///
/// Keskar et al., "CTRL" (2019); transformers, `RepetitionPenaltyLogitsProcessor`.
pub fn repetition<'b>(x: Row<'b>, n: Option<u32>, penalty: impl Scalar<'b>) -> Row<'b> {
    let b = x.builder();
    let penalty = number(b, penalty);
    let penalized = x.gt(0.0).select(x / penalty, x * penalty);
    b.counts(n).gt(0.0).select(penalized, x)
}

/// Subtracts `frequency` for each occurrence among the last `n` tokens, and `presence` once; of all tokens when `None`.
///
/// OpenAI's API reference; llama.cpp, `llama_sampler_init_penalties`.
pub fn frequency_presence<'b>(
    x: Row<'b>,
    n: Option<u32>,
    frequency: impl Scalar<'b>,
    presence: impl Scalar<'b>,
) -> Row<'b> {
    let counts = x.builder().counts(n);
    x - (counts * frequency + counts.gt(0.0).row() * presence)
}

/// Leaves out tokens that would complete a run of `n` tokens that is there already.
///
/// Paulus et al., "A Deep Reinforced Model for Abstractive Summarization" (2017); transformers,
/// `NoRepeatNGramLogitsProcessor`.
pub fn no_repeat_ngram(x: Row<'_>, n: u8) -> Row<'_> {
    x.keep(!x.builder().ngrams(n, None))
}

/// Settings of [`dry`].
#[derive(Clone, Copy, Debug)]
pub struct Dry {
    /// How many of the last tokens are looked at.
    pub window: u32,
    /// Repetitions of at least so many tokens are penalised.
    pub allowed_length: f32,
    /// The penalty of such a repetition.
    pub multiplier: f32,
    /// By which the penalty grows with each token more.
    pub base: f32,
    /// Repetitions do not go on past these.
    pub breakers: Option<MaskId>,
}

impl Dry {
    /// Longer repetitions count as this long.
    pub const CAP: u32 = 50;
}

/// Subtracts `multiplier · base^(length − allowed length)` from tokens that continue a repetition.
///
/// p-e-w, "DRY: A modern repetition penalty" (text-generation-webui 5677), whose longest run is 50 as well.
pub fn dry(x: Row<'_>, settings: Dry) -> Row<'_> {
    let b = x.builder();
    let length = b.repeats(settings.window, Dry::CAP, settings.breakers);
    let penalty = ((length - settings.allowed_length) * settings.base.ln()).exp() * settings.multiplier;
    length.ge(settings.allowed_length).select(x - penalty, x)
}

/// Adds `delta` to the tokens of a set.
pub fn bias_over<'b>(x: Row<'b>, set: Set<'b>, delta: impl Scalar<'b>) -> Row<'b> {
    set.select(x + delta, x)
}

/// Leaves out these tokens, those that end a text, until the program has drawn `n` in the context.
///
/// transformers, `MinNewTokensLengthLogitsProcessor`.
pub fn minimum_length<'b>(x: Row<'b>, ends: Set<'b>, n: impl Scalar<'b>) -> Row<'b> {
    x.builder().drawn().lt(n).select_row(x.keep(!ends), x)
}

/// Leaves nothing but these tokens, those that end a text, once `n − 1` were drawn, so that the text has at most `n`.
///
/// transformers, `ForcedEOSTokenLogitsProcessor`.
pub fn maximum_length<'b>(x: Row<'b>, ends: Set<'b>, n: impl Scalar<'b>) -> Row<'b> {
    let b = x.builder();
    let forced = ends.select(x.at_least(f32::MIN), x).keep(ends);
    b.drawn().ge(number(b, n) - 1.0).select_row(forced, x)
}
