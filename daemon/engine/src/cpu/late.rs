//! Draws that wait for their masks: the layers and the head are done when a step is submitted, these when it is collected.

use std::sync::Arc;

use rayon::prelude::*;

use crate::batch::{LateMask, Output, Token};
use crate::sampling::{Sampler, Scratch, TokenMask, sample_under};

/// A draw of the step under way, with all that it needs but the mask.
pub(super) struct LateDraw {
    pub(super) row_idx: usize,
    /// Its place among the outputs of the step.
    pub(super) output_idx: usize,
    pub(super) logits: Vec<f32>, // [vocab_size]
    /// As far as the penalties look at it.
    pub(super) history: Vec<Token>,
    pub(super) position: u64,
    pub(super) sampler: Arc<Sampler>,
    pub(super) mask: Option<TokenMask>,
}

/// Takes in the masks that have come.
pub(super) fn supply(draws: &mut [LateDraw], masks: &[LateMask<'_>]) {
    for LateMask { row_idx, mask } in masks {
        let draw = draws.iter_mut().find(|draw| draw.row_idx == *row_idx);
        draw.expect("the row makes a late draw").mask = Some((*mask).clone());
    }
}

/// Draws under the masks that have come; what sits out keeps the output that says so.
pub(super) fn draw(draws: Vec<LateDraw>, outputs: &mut [Output]) {
    let drawn: Vec<(usize, Output)> = draws
        .par_iter()
        .map_init(Scratch::default, |scratch, draw| {
            let LateDraw { output_idx, logits, history, position, sampler, mask, .. } = draw;
            let mask = mask.as_ref()?;
            let drawn = sample_under(Some(mask), logits, history, *position, sampler, scratch);
            Some((*output_idx, drawn.map_or_else(Output::Failed, Output::Sampled)))
        })
        .flatten_iter()
        .collect();
    for (output_idx, output) in drawn {
        outputs[output_idx] = output;
    }
}
