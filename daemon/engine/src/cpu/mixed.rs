//! Draws that take the logits of several rows into account.

use rayon::prelude::*;

use super::output::looked_at;
use super::plan::Question;
use crate::batch::{Others, Output, OutputFault, OutputKind, Start, Within};
use crate::sampling::program::{DrawPlace, DrawState};
use crate::sampling::{Sampler, Scratch, TokenMask, sample_by_program};

/// The mixtures of a step, in the order of their rows.
#[derive(Default)]
pub(super) struct Mixtures<'a> {
    /// The one whose rows come next.
    open: Option<Mixture<'a>>,
    /// Those that have all their rows.
    ready: Vec<Mixture<'a>>,
}

/// A draw, and what it has of the rows that it needs.
struct Mixture<'a> {
    question: &'a Question<'a>,
    output_idx: usize,
    sampler: &'a Sampler,
    start: DrawState,
    within: Option<&'a TokenMask>,
    n_others: usize,
    logits: Vec<f32>,      // [vocab_size], of the first member
    others: Vec<Vec<f32>>, // [n_others][vocab_size]
}

impl<'a> Mixtures<'a> {
    /// Takes in the logits of a row's place: nothing, where it is no member's.
    ///
    /// # Panics
    /// The rows of a mixture do not lie one behind the other.
    pub(super) fn take(&mut self, question: &'a Question<'a>, logits: &[f32]) {
        for &(output_idx, kind) in &question.requests {
            match *kind {
                OutputKind::Program { sampler, start, within, others: Others::Rows(n_others @ 1..) } => {
                    assert!(self.open.is_none(), "the others of the mixture before it are missing");
                    let Start::At(start) = start else { unreachable!("one step is under way at a time") };
                    let within = match within {
                        Within::All => None,
                        Within::Mask(mask) => Some(&**mask),
                        Within::Late => unreachable!("a mixture does not wait for its mask"),
                    };
                    self.open = Some(Mixture {
                        question,
                        output_idx,
                        sampler,
                        start,
                        within,
                        n_others,
                        logits: logits.to_vec(),
                        others: Vec::with_capacity(n_others),
                    });
                }
                OutputKind::Mixed => {
                    let open = self.open.as_mut().expect("it is behind the first member");
                    assert_eq!(question.row_idx, open.question.row_idx + open.others.len() + 1);
                    open.others.push(logits.to_vec());
                    if open.others.len() == open.n_others {
                        self.ready.extend(self.open.take());
                    }
                }
                _ => {}
            }
        }
    }

    /// Makes the draws whose rows are all there.
    pub(super) fn draw(&mut self, outputs: &mut [Output]) {
        let ready = std::mem::take(&mut self.ready).into_par_iter();
        let drawn: Vec<(usize, Output)> = ready
            .map_init(Scratch::default, |scratch, mixture| {
                (mixture.output_idx, mixture.draw(scratch).unwrap_or_else(Output::Failed))
            })
            .collect();
        for (output_idx, output) in drawn {
            outputs[output_idx] = output;
        }
    }
}

impl Mixture<'_> {
    fn draw(&self, scratch: &mut Scratch) -> Result<Output, OutputFault> {
        let Self { question, sampler, start, within, .. } = *self;
        let members: Vec<&[f32]> = self.others.iter().map(Vec::as_slice).collect();
        let draw =
            DrawPlace { members: &members, before: question.before(), seed: sampler.seed, start, within };
        let history = looked_at(question, sampler);
        let (candidate, left) = sample_by_program(&self.logits, &history, sampler, draw, scratch)?;
        Ok(Output::Programmed(candidate, Box::new(left)))
    }
}
