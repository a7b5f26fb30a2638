//! One draw from a row of logits, in the order that the parent module defines.

use smallvec::SmallVec;

use super::distribution::{Distribution, largest, position_of};
use super::gumbel::{Words, draw_dense, draw_sparse};
use super::maths::{exp, exp_all, of_parts, parts, share_of};
use super::program::{DrawPlace, Left, Machine};
use super::select::{Entry, keep_largest, keep_weight};
use super::{Sampler, TokenMask};
use crate::batch::{Candidate, OutputFault, Token};

/// Buffers that one draw leaves to the next. Holds no state that a result depends on.
#[derive(Debug, Default)]
pub struct Scratch {
    logits: Vec<f32>,  // [vocab_size]
    weights: Vec<f32>, // [vocab_size]
    counts: Vec<u32>,  // [vocab_size], 0 between draws
    seen: Vec<Token>,
    kept: Vec<Entry>,
    others: Vec<Vec<f32>>, // [vocab_size] each
    machine: Machine,
}

impl Scratch {
    /// What runs programs.
    pub(super) fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// A row after the chain's steps 1 to 4.
    pub(super) fn adjusted(&mut self, row: Vec<f32>, history: &[Token], sampler: &Sampler) -> Vec<f32> {
        self.logits = row;
        adjust(sampler.mask.as_deref(), history, sampler, self);
        std::mem::take(&mut self.logits)
    }
}

/// What a context has before a draw.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    /// Its tokens.
    pub n_tokens: usize,
    /// Tokens that it had and that were evicted: the position of the draw, and with it its noise, counts them.
    pub n_evicted: usize,
}

impl Before {
    /// The position of the draw.
    #[must_use]
    pub fn position(&self) -> u64 {
        (self.n_tokens + self.n_evicted) as u64
    }
}

impl From<usize> for Before {
    fn from(n_tokens: usize) -> Self {
        Self { n_tokens, n_evicted: 0 }
    }
}

/// Draws by the sampler's program, a token that `draw.within` allows. A program that does not ask for the constraint's mask
/// sees no others, in no row of logits: they are as little there for its truncations as for its draw.
///
/// # Errors
/// The logits hold a NaN, or the program leaves no token to draw.
///
/// # Panics
/// The sampler has no program.
pub fn sample_by_program(
    logits: &[f32],    // [vocab_size]
    history: &[Token], // the last tokens, at least as many as the program looks at
    sampler: &Sampler,
    draw: DrawPlace<'_>,
    scratch: &mut Scratch,
) -> Result<(Candidate, Left), OutputFault> {
    let distribution = Distribution::new(logits)?;
    let put_on = sampler.program.as_ref().expect("the sampler has a program");
    let Scratch { machine, logits: masked, others, .. } = scratch;
    let (token, left) = match draw.within {
        Some(mask) if !put_on.program.asks_for_constraint() => {
            others.resize_with(draw.members.len().max(others.len()), Vec::new);
            let rows = std::iter::once((logits, masked)).chain(draw.members.iter().copied().zip(others));
            let seen: SmallVec<[&[f32]; 4]> = rows
                .map(|(row, masked)| {
                    masked.clear();
                    masked.extend_from_slice(row);
                    apply_mask(mask, masked);
                    masked.as_slice()
                })
                .collect();
            put_on.draw(machine, seen[0], history, DrawPlace { members: &seen[1..], ..draw })?
        }
        _ => put_on.draw(machine, logits, history, draw)?,
    };
    Ok((Candidate { token, logprob: distribution.logprob(token) }, left))
}

/// Draws the token for `position` from the logits of the position before it.
///
/// `history` is every token of the context before `position`, or as many of the last ones as the penalties look at
/// ([`Sampler::n_penalized`]). The settings must have passed
/// [`Sampler::validate`], and the tokens of the history must be in the vocabulary.
///
/// # Errors
/// The logits hold a NaN, or mask and bias leave no token.
pub fn sample(
    logits: &[f32], // [vocab_size]
    history: &[Token],
    position: u64,
    sampler: &Sampler,
    scratch: &mut Scratch,
) -> Result<Candidate, OutputFault> {
    sample_under(sampler.mask.as_deref(), logits, history, position, sampler, scratch)
}

/// As [`sample`], with this mask in the place of the sampler's.
///
/// # Errors
/// As for [`sample`].
pub fn sample_under(
    mask: Option<&TokenMask>,
    logits: &[f32], // [vocab_size]
    history: &[Token],
    position: u64,
    sampler: &Sampler,
    scratch: &mut Scratch,
) -> Result<Candidate, OutputFault> {
    let distribution = Distribution::new(logits)?;
    let token = if sampler.temperature == 0.0 && mask.is_none() && !adjusts(sampler) {
        distribution.mode()
    } else {
        scratch.logits.clear();
        scratch.logits.extend_from_slice(logits);
        adjust(mask, history, sampler, scratch);
        let max = largest(&scratch.logits).expect("adjusting a number gives a number");
        if max == f32::NEG_INFINITY {
            return Err(OutputFault::NothingToDraw);
        }
        let mode = position_of(&scratch.logits, max);
        if sampler.temperature == 0.0 { mode } else { draw(mode, max, position, sampler, scratch) }
    };
    Ok(Candidate { token, logprob: distribution.logprob(token) })
}

/// Whether any of steps 2 to 4 is on.
fn adjusts(sampler: &Sampler) -> bool {
    !sampler.bias.is_empty() || sampler.penalizes()
}

/// Step 1.
pub(super) fn apply_mask(mask: &TokenMask, logits: &mut [f32]) {
    for (logits, &word) in logits.chunks_mut(64).zip(mask.words()) {
        match word {
            u64::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            word => {
                for (bit, logit) in logits.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Steps 1 to 4.
fn adjust(mask: Option<&TokenMask>, history: &[Token], sampler: &Sampler, scratch: &mut Scratch) {
    let Scratch { logits, counts, seen, .. } = scratch;
    if let Some(mask) = mask {
        apply_mask(mask, logits);
    }
    for &(token, bias) in &sampler.bias {
        let logit = &mut logits[token as usize];
        *logit = if bias == f32::NEG_INFINITY { bias } else { saturate(*logit, *logit + bias) };
    }
    if sampler.penalizes() {
        let n = sampler.n_penalized(history.len());
        counts.resize(logits.len(), 0);
        for &token in &history[history.len() - n..] {
            let count = &mut counts[token as usize];
            if *count == 0 {
                seen.push(token);
            }
            *count += 1;
        }
        for token in seen.drain(..) {
            let count = std::mem::take(&mut counts[token as usize]) as f32;
            let logit = &mut logits[token as usize];
            let r = sampler.repetition_penalty;
            *logit = saturate(*logit, if *logit > 0.0 { *logit / r } else { *logit * r });
            let penalty = count * sampler.frequency_penalty + sampler.presence_penalty;
            *logit = saturate(*logit, *logit - penalty.clamp(f32::MIN, f32::MAX));
        }
    }
}

/// The new value of a logit: −∞ stays, and only the mask and a bias of −∞ lead there.
fn saturate(old: f32, new: f32) -> f32 {
    if old == f32::NEG_INFINITY { old } else { new.clamp(f32::MIN, f32::MAX) }
}

/// Steps 5 to 9. `max` is the largest logit, of token `mode`.
fn draw(mode: Token, max: f32, position: u64, sampler: &Sampler, scratch: &mut Scratch) -> Token {
    let Scratch { logits, weights, kept, .. } = scratch;
    for logit in logits.iter_mut() {
        // Adding 0 makes 0 of −0: the two are equal, and so is their rank.
        *logit = (*logit - max) / sampler.temperature + 0.0;
    }
    let words = Words::new(sampler.seed, position, 0);
    if truncates(sampler) {
        truncate(logits, sampler, weights, kept);
        draw_sparse(kept.iter().map(|e| (e.token, e.logit)), words).expect("truncation keeps the largest")
    } else {
        weights.clear();
        weights.extend_from_slice(logits);
        exp_all(weights);
        draw_dense(logits, weights, mode, 0.0, words)
    }
}

fn truncates(sampler: &Sampler) -> bool {
    sampler.top_k.is_some()
        || sampler.top_p.is_some_and(|p| p < 1.0)
        || sampler.min_p.is_some_and(|p| p > 0.0)
}

/// Steps 6 to 8, over logits whose largest is 0.
fn truncate(logits: &[f32], sampler: &Sampler, weights: &mut Vec<f32>, kept: &mut Vec<Entry>) {
    let top_p = sampler.top_p.filter(|&p| p < 1.0);
    let min_logit = sampler.min_p.map_or(f32::NEG_INFINITY, f32::ln);
    let weight = match (sampler.top_k, top_p) {
        (Some(k), _) => {
            keep_largest(logits, k as usize, kept);
            kept.iter().map(|e| parts(exp(e.logit))).sum()
        }
        (None, Some(p)) => {
            weights.clear();
            weights.extend_from_slice(logits);
            exp_all(weights);
            let weight: u64 = weights.iter().map(|&weight| parts(weight)).sum();
            // Tokens this light weigh less than 1 − p together, whatever their number.
            let light = (1.0 - f64::from(p)) * f64::from(of_parts(weight)) / logits.len() as f64;
            keep_from((light.ln() - 1e-3) as f32, logits, kept);
            weight
        }
        (None, None) => {
            keep_from(min_logit, logits, kept);
            0
        }
    };
    if let Some(p) = top_p {
        keep_weight(kept, share_of(p, weight));
    }
    kept.retain(|entry| entry.logit >= min_logit);
}

/// Keeps the logits above −∞ from this one on.
fn keep_from(floor: f32, logits: &[f32], kept: &mut Vec<Entry>) {
    kept.clear();
    let above = logits.iter().enumerate().filter(|&(_, &logit)| logit >= floor && logit > f32::NEG_INFINITY);
    kept.extend(above.map(|(token, &logit)| Entry { token: token as Token, logit }));
}
