//! Draws that wait for their masks: the layers and the head are done when a step is submitted, these when it is collected.

use std::sync::Arc;

use rayon::prelude::*;

use crate::batch::{LateMask, Output, OutputFault, Token};
use crate::sampling::program::{DrawPlace, DrawState};
use crate::sampling::{Before, Sampler, Scratch, TokenMask, sample_by_program, sample_under};

/// A draw of the step under way, with all that it needs but the mask.
pub(super) struct LateDraw {
    pub(super) row_idx: usize,
    /// Its place among the outputs of the step.
    pub(super) output_idx: usize,
    pub(super) logits: Vec<f32>, // [vocab_size]
    /// As far as the sampler looks at it.
    pub(super) history: Vec<Token>,
    pub(super) before: Before,
    pub(super) by: By,
    pub(super) mask: Option<TokenMask>,
}

/// What it draws by.
pub(super) enum By {
    Chain(Arc<Sampler>),
    /// From here on.
    Program(Box<Sampler>, DrawState),
}

impl LateDraw {
    fn draw(&self, mask: &TokenMask, scratch: &mut Scratch) -> Result<Output, OutputFault> {
        let Self { logits, history, before, .. } = self;
        match &self.by {
            By::Chain(sampler) => {
                let position = before.position();
                sample_under(Some(mask), logits, history, position, sampler, scratch).map(Output::Sampled)
            }
            By::Program(sampler, start) => {
                let (before, seed, start) = (*before, sampler.seed, *start);
                let draw = DrawPlace { members: &[], before, seed, start, within: Some(mask) };
                sample_by_program(logits, history, sampler, draw, scratch)
                    .map(|(candidate, left)| Output::Programmed(candidate, Box::new(left)))
            }
        }
    }
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
            let drawn = draw.draw(draw.mask.as_ref()?, scratch);
            Some((draw.output_idx, drawn.unwrap_or_else(Output::Failed)))
        })
        .flatten_iter()
        .collect();
    for (output_idx, output) in drawn {
        outputs[output_idx] = output;
    }
}
