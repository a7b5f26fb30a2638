//! The fixed chain of settings that a plain sampler has.

use super::{bias_over, greedy, temperature};
use crate::builder::{Builder, Row, Token};
use crate::operation::{BiasId, MaskId, Source};

/// Settings of the [`chain`], those that are on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chain {
    /// Tokens outside of it become −∞.
    pub mask: Option<MaskId>,
    /// Added to the logits.
    pub bias: Option<BiasId>,
    /// Added to the logits of a set.
    pub bias_over: Option<(MaskId, f32)>,
    /// Penalties.
    pub penalties: Option<Penalties>,
    /// 0 takes the largest logit.
    pub temperature: f32,
    /// Keeps the k largest.
    pub top_k: Option<u32>,
    /// Keeps the most probable that reach it.
    pub top_p: Option<f32>,
    /// ln of the share of the largest probability that is kept.
    pub min_p_log: Option<f32>,
}

/// Penalties of tokens that stand before the draw.
#[derive(Clone, Copy, Debug)]
pub struct Penalties {
    /// How many of the last tokens count; all when `None`.
    pub last_n: Option<u32>,
    /// Divides positive and multiplies negative logits.
    pub repetition: f32,
    /// Subtracted for each occurrence.
    pub frequency: f32,
    /// Subtracted once.
    pub presence: f32,
}

/// Mask, bias, penalties, temperature, top-k, top-p, min-p, draw: what a plain sampler does, as a program. Bias and penalties
/// stay within the numbers: only the mask and a bias of −∞ leave a token out.
pub fn chain(b: &Builder, settings: Chain) -> Token<'_> {
    let Chain { temperature: t, top_k, top_p, min_p_log, .. } = settings;
    let x = adjusted(b, settings);
    if t == 0.0 {
        return greedy(x);
    }
    let mut x = temperature(x, t);
    if let Some(k) = top_k {
        x = x.keep(x.largest(k as f32));
    }
    if let Some(p) = top_p {
        x = x.keep(x.nucleus(p));
    }
    if let Some(floor) = min_p_log {
        x = x.keep(x.ge(floor));
    }
    x.draw(Source::SEED)
}

/// Mask, bias and penalties of the [`chain`]: what it does to the logits before it draws.
pub fn adjusted(b: &Builder, settings: Chain) -> Row<'_> {
    let Chain { mask, bias, bias_over: over, penalties, .. } = settings;
    let mut x = b.logits();
    if let Some(mask) = mask {
        x = x.keep(b.mask(mask));
    }
    if let Some(bias) = bias {
        let bias = b.bias(bias);
        x = within(x, x + bias).keep(bias.gt(f32::NEG_INFINITY));
    }
    if let Some((set, bias)) = over {
        let set = b.mask(set);
        // Half of the largest number, added to any logit, is a number still.
        let within = bias.clamp(f32::MIN / 2.0, f32::MAX / 2.0);
        x = if bias == f32::NEG_INFINITY { x.keep(!set) } else { bias_over(x, set, within) };
    }
    if let Some(Penalties { last_n, repetition, frequency, presence }) = penalties {
        let counts = b.counts(last_n);
        let scaled = within(x, x.gt(0.0).select(x / repetition, x * repetition));
        let penalty = (counts * frequency + presence).at_least(f32::MIN);
        x = counts.gt(0.0).select(within(scaled, scaled - penalty), x);
    }
    x
}

/// The new value where the old one was a number; not below the smallest number.
fn within<'b>(old: Row<'b>, new: Row<'b>) -> Row<'b> {
    old.gt(f32::NEG_INFINITY).select(new.at_least(f32::MIN), old)
}
