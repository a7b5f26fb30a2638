//! Rows of logits and hidden states on their way to the host: with the step, or at once where the host works something out.

use std::collections::HashMap;

use cudarc::driver::result;
use trellis_engine::KeptRow;
use trellis_engine::batch::{Others, Output, OutputFault, OutputKind, Start};
use trellis_engine::sampling::Scratch;

use super::{InFlight, Steps};
use crate::driver::check;
use crate::kept::KeptPlace;
use crate::model::Llama;
use crate::ops::common::Dtype;
use crate::step::by_host::{Logits, output_of};
use crate::step::whole::{KeptRun, Reading, RowOf, WholeRows};
use crate::step::{Group, Layout, Place, StepRow};
use crate::{CudaError, Slice, Stream};

/// Rows that are fetched for requests of one place: logits (0) or hidden states (1), by row, or kept rows (2), by their places.
pub(super) type Fetched = HashMap<(usize, usize), Vec<f32>>;

impl InFlight {
    /// Whether the host answered something of it: a token that it drew the device does not have.
    pub(crate) fn has_host_work(&self) -> bool {
        !self.by_host.is_empty()
    }
}

impl Steps {
    /// Puts copies of the rows of a group that come back whole or are kept into the stream: what follows writes over them, and comes a
    /// hundredth of a millisecond later for each half of a megabyte.
    pub(super) fn bring_whole(
        &mut self,
        stream: &Stream,
        buffers_idx: usize,
        group: &Group,
    ) -> Result<(), CudaError> {
        let Self { ring, activations, row_words, kept_rows, .. } = self;
        for &KeptRun { row, idx, n_rows } in &group.kept {
            let to = kept_rows.rows(idx, n_rows);
            let from = activations.logits.part(4 * row * row_words.logits, to.n_bytes);
            // SAFETY: both are so long, and live until the stream is waited for; steps that read the places are in this
            // stream too.
            check("cuMemcpyDtoDAsync", || unsafe {
                result::memcpy_dtod_async(to.address, from.address, to.n_bytes, stream.raw())
            })?;
        }
        for &WholeRows { of, row, n_rows, start } in &group.wholes {
            let n = row_words.of(of);
            let rows = match of {
                RowOf::Logits => activations.logits,
                RowOf::Hidden => activations.hidden,
            };
            let rows = rows.part(4 * row * n, 4 * n_rows * n);
            // SAFETY: as in `bring_back`.
            check("cuMemcpyDtoHAsync", || unsafe {
                let to = &mut ring[buffers_idx].whole[start..start + n_rows * n];
                result::memcpy_dtoh_async(to, rows.address, stream.raw())
            })?;
        }
        Ok(())
    }

    /// Launches the layers of a step that is not captured, and the copies of hidden states between them.
    pub(super) fn launch_tapped_layers(
        &mut self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
        buffers_idx: usize,
    ) -> Result<(), CudaError> {
        let tensors = self.tensors(kv, layout);
        let Self { ring, activations, lists, .. } = self;
        let (taps, states) = (&lists.outputs.taps, &mut ring[buffers_idx].states);
        let width = llama.config.hidden_size;
        assert!(taps.n_states() * width <= states.len(), "more hidden states than a step brings back");
        llama.layers(stream, &tensors, activations, |n_layers| {
            taps.after(n_layers).try_for_each(|tap| {
                let rows = activations.residual.part(4 * tap.token * width, 4 * tap.n_tokens * width);
                // SAFETY: as in `bring_back`.
                check("cuMemcpyDtoHAsync", || unsafe {
                    let to = &mut states[tap.state * width..(tap.state + tap.n_tokens) * width];
                    result::memcpy_dtoh_async(to, rows.address, stream.raw())
                })
            })
        })
    }

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
                | Place::MixedByHost { group_idx, logits_row }
                | Place::Full { group_idx, logits_row, start: None, .. }
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
                Place::Hidden { group_idx, logits_row, start: None } if group_idx == group => {
                    fetched.insert((1, logits_row), self.fetch_hidden(stream, llama, logits_row)?);
                }
                _ => {}
            }
        }
        Ok(fetched)
    }

    /// Brings the kept rows to the host with which it draws.
    pub(super) fn fetch_kept(
        &self,
        stream: &Stream,
        rows: &[StepRow<'_>],
        group: usize,
        fetched: &mut Fetched,
    ) -> Result<(), CudaError> {
        let requests = rows.iter().flat_map(|row| row.requests);
        for (request, place) in requests.zip(&self.lists.outputs.places) {
            let (Place::Host { group_idx, .. }, OutputKind::Program { others, .. }) = (place, &request.kind)
            else {
                continue;
            };
            for row in others.kept().iter().filter(|_| *group_idx == group) {
                let idx = row.get::<KeptPlace>().idx;
                let mut values = vec![0f32; self.row_words.logits];
                self.kept_rows.rows(idx, 1).download(stream, &mut values)?;
                fetched.insert((2, idx as usize), values);
            }
        }
        Ok(())
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
        &mut self,
        rows: &[StepRow<'_>],
        group: usize,
        raw: &Fetched,
        after: &Fetched,
        by_host: &mut HashMap<usize, Output>,
    ) {
        let Self { lists, .. } = self;
        let mut scratch = Scratch::default();
        let first_requests = rows.iter().scan(0, |n_before, row| {
            let first = *n_before;
            *n_before += row.requests.len();
            Some(first)
        });
        let first_requests: Vec<usize> = first_requests.collect();
        let rows = rows.iter().enumerate();
        let requests =
            rows.flat_map(|(row_idx, row)| row.requests.iter().map(move |request| (row_idx, row, request)));
        for (request_idx, ((row_idx, row, request), place)) in
            requests.zip(lists.outputs.places.clone()).enumerate()
        {
            let output = match place {
                Place::Full { group_idx, logits_row, start: None, .. } if group_idx == group => {
                    let row = &after[&(0, logits_row)];
                    let reading = Reading::of(&request.kind, None);
                    let read = reading.map(|reading| reading.read(row, &mut scratch));
                    read.map_or_else(|| Output::Full(row.clone()), |read| read.unwrap_or_else(Output::Failed))
                }
                Place::Hidden { group_idx, logits_row, start: None } if group_idx == group => {
                    let state = &after[&(1, logits_row)];
                    match state.iter().any(|x| x.is_nan()) {
                        true => Output::Failed(OutputFault::NotANumber),
                        false => Output::Embedding(state.clone()),
                    }
                }
                Place::Host { group_idx, logits_row } if group_idx == group => {
                    let history =
                        row.known_before(request.position + 1).expect("what the host draws after, it knows");
                    let outputs = &mut lists.outputs;
                    let known = outputs.host_starts.iter().find(|(idx, _)| *idx == request_idx);
                    let start = known.map(|&(_, start)| start);
                    // Else the host has made the draw before it, just now.
                    let start = start.or_else(|| match request.kind {
                        OutputKind::Program { start: Start::After { n_rows }, .. } => {
                            match by_host.get(&first_requests[row_idx - n_rows]) {
                                Some(Output::Programmed(_, left)) => Some(left.next),
                                _ => None,
                            }
                        }
                        _ => outputs.programs.left_on_host(row.slot),
                    });
                    let start = start.unwrap_or_default();
                    let row_of = |idx: usize| raw[&(0, idx)].as_slice();
                    let others: Vec<&[f32]> = match request.kind {
                        OutputKind::Program { others: Others::Kept(rows), .. } => {
                            let idx = |row: &KeptRow| row.get::<KeptPlace>().idx as usize;
                            rows.iter().map(|row| raw[&(2, idx(row))].as_slice()).collect()
                        }
                        _ => (1..=request.kind.n_others()).map(|idx| row_of(logits_row + idx)).collect(),
                    };
                    let logits = Logits { own: row_of(logits_row), others: &others };
                    let n_evicted = row.n_evicted();
                    let output = output_of(&request.kind, logits, history, n_evicted, start, &mut scratch);
                    if let Output::Programmed(_, it_left) = &output {
                        outputs.programs.note_left(row.slot, it_left.next);
                    }
                    output
                }
                _ => continue,
            };
            by_host.insert(request_idx, output);
        }
    }
}
