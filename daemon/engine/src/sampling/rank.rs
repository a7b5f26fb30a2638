//! The most probable tokens of a row after whatever a sampler makes of it: what a beam search chooses among.
//!
//! As Hugging Face does it: the log-softmax of the logits goes through the processors, and nothing is normalised again. The
//! chain does its steps 1 to 4 to it; a program takes it for the logits and ends in the row. The constraint's mask comes last.

use super::draw::{Before, Scratch, apply_mask};
use super::program::DrawPlace;
use super::select::{Entry, keep_largest};
use super::{Distribution, Sampler, SamplerError, TokenMask};
use crate::batch::{Candidate, OutputFault, Token};

/// The `n` most probable tokens, most probable first, ties by lower token; fewer where no others are above −∞.
///
/// # Errors
/// The logits hold a NaN, or the program leaves nothing to go on with.
pub fn rank(
    logits: &[f32],    // [vocab_size]
    history: &[Token], // the last tokens, at least as many as the sampler looks at
    before: Before,
    sampler: &Sampler,
    within: Option<&TokenMask>,
    n: usize,
    scratch: &mut Scratch,
) -> Result<Vec<Candidate>, OutputFault> {
    let logprobs = Distribution::new(logits)?.logprobs();
    let own = sampler.program.as_ref().and_then(|put_on| put_on.within.as_deref());
    let both;
    let within = match (within, own) {
        (Some(within), Some(own)) => {
            both = within.clone().and(own);
            Some(&both)
        }
        (within, own) => within.or(own),
    };
    let mut row = match &sampler.program {
        Some(put_on) => {
            let start = put_on.program.first();
            let draw = DrawPlace { members: &[], before, seed: sampler.seed, start, within };
            put_on.row(scratch.machine(), &logprobs, history, draw)?
        }
        None => scratch.adjusted(logprobs, history, sampler),
    };
    if let Some(mask) = within {
        apply_mask(mask, &mut row);
    }
    let mut kept = Vec::new();
    keep_largest(&row, n, &mut kept);
    kept.retain(|entry| entry.logit > f32::NEG_INFINITY);
    kept.sort_unstable_by(Entry::by_rank);
    kept.truncate(n);
    Ok(kept.into_iter().map(|entry| Candidate { token: entry.token, logprob: entry.logit }).collect())
}

impl Sampler {
    /// Checks the sampler for a search: its program, if it has one, ends in a row and keeps nothing from token to token; its
    /// chain neither divides nor truncates, of which a search makes no use.
    ///
    /// # Errors
    /// The first thing that is not so, or out of range.
    pub fn validate_for_search(&self, vocab_size: usize) -> Result<(), SamplerError> {
        match &self.program {
            Some(put_on) => put_on.validate_for_row(vocab_size),
            None => {
                let unused = [
                    ("temperature", self.temperature),
                    ("top-k", self.top_k.unwrap_or(0) as f32),
                    ("top-p", self.top_p.filter(|&p| p < 1.0).unwrap_or(0.0)),
                    ("min-p", self.min_p.unwrap_or(0.0)),
                ];
                match unused.into_iter().find(|&(_, value)| value != 0.0) {
                    Some((name, value)) => {
                        Err(SamplerError::OutOfRange { name, value, expected: "none in a beam search" })
                    }
                    None => self.validate(vocab_size),
                }
            }
        }
    }
}
