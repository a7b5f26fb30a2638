//! What the host works out of a step: rows of logits and hidden states are brought to it on the way.

use std::collections::HashMap;

use trellis_engine::batch::{Output, OutputFault};
use trellis_engine::sampling::Scratch;

use super::Steps;
use crate::model::Llama;
use crate::ops::common::Dtype;
use crate::step::by_host::output_of;
use crate::step::{Place, StepRow};
use crate::{CudaError, Stream};

/// Rows that are fetched for requests of one place: logits (0) or hidden states (1), by row.
pub(super) type Fetched = HashMap<(usize, usize), Vec<f32>>;

impl Steps {
    /// Brings rows of logits or hidden states of a group to the host, for the places that are wanted.
    pub(super) fn fetch(
        &self,
        stream: &Stream,
        llama: &Llama,
        group: usize,
        is_wanted: impl Fn(Place) -> bool,
    ) -> Result<Fetched, CudaError> {
        let mut fetched = Fetched::new();
        let vocab_size = llama.config.vocab_size;
        for &place in self.lists.outputs.places.iter().filter(|place| is_wanted(**place)) {
            match place {
                Place::Host { group_idx, logits_row }
                | Place::Full { group_idx, logits_row, full_idx: None, .. }
                    if group_idx == group =>
                {
                    if let std::collections::hash_map::Entry::Vacant(entry) = fetched.entry((0, logits_row)) {
                        let mut row = vec![0f32; vocab_size];
                        let logits =
                            self.activations.logits.part(4 * logits_row * vocab_size, 4 * vocab_size);
                        logits.download(stream, &mut row)?;
                        entry.insert(row);
                    }
                }
                Place::Hidden { group_idx, logits_row } if group_idx == group => {
                    fetched.insert((1, logits_row), self.fetch_hidden(stream, llama, logits_row)?);
                }
                _ => {}
            }
        }
        Ok(fetched)
    }

    fn fetch_hidden(&self, stream: &Stream, llama: &Llama, row: usize) -> Result<Vec<f32>, CudaError> {
        let n = llama.config.hidden_size;
        let n_bytes = n * llama.dtype.n_bytes();
        let slice = self.activations.hidden.part(row * n_bytes, n_bytes);
        match llama.dtype {
            Dtype::F32 => {
                let mut values = vec![0f32; n];
                slice.download(stream, &mut values)?;
                Ok(values)
            }
            Dtype::F16 => {
                let mut values = vec![half::f16::ZERO; n];
                slice.download(stream, &mut values)?;
                Ok(values.into_iter().map(half::f16::to_f32).collect())
            }
            Dtype::Bf16 => {
                let mut values = vec![half::bf16::ZERO; n];
                slice.download(stream, &mut values)?;
                Ok(values.into_iter().map(half::bf16::to_f32).collect())
            }
        }
    }

    /// Works out what no kernel does, from what was fetched before (`raw`) and after the kernels.
    pub(super) fn outputs_by_host(
        &self,
        rows: &[StepRow<'_>],
        group: usize,
        raw: &Fetched,
        after: &Fetched,
        by_host: &mut HashMap<usize, Output>,
    ) {
        let mut scratch = Scratch::default();
        let requests = rows.iter().flat_map(|row| row.requests.iter().map(move |request| (row, request)));
        for (request_idx, ((row, request), &place)) in requests.zip(&self.lists.outputs.places).enumerate() {
            let output = match place {
                Place::Full { group_idx, logits_row, full_idx: None, .. } if group_idx == group => {
                    Output::Full(after[&(0, logits_row)].clone())
                }
                Place::Hidden { group_idx, logits_row } if group_idx == group => {
                    let state = &after[&(1, logits_row)];
                    match state.iter().any(|x| x.is_nan()) {
                        true => Output::Failed(OutputFault::NotANumber),
                        false => Output::Embedding(state.clone()),
                    }
                }
                Place::Host { group_idx, logits_row } if group_idx == group => {
                    let history =
                        row.known_before(request.position + 1).expect("what the host draws after, it knows");
                    output_of(request.kind, &raw[&(0, logits_row)], history, &mut scratch)
                }
                _ => continue,
            };
            by_host.insert(request_idx, output);
        }
    }
}
