//! Steps with draws whose masks are late: the layers are launched when the step is submitted, all of its draws when the
//! masks are there.
//!
//! What late masks bring is one copy behind the layers: the output rows once more, with the places of the masks, then the
//! masks. An output row whose mask has not come is passed over. The step holds all logits meanwhile, and no other is in
//! the stream behind it.

use trellis_engine::batch::LateMask;

use super::{InFlight, Steps};
use crate::card::Hold;
use crate::model::Llama;
use crate::ops::logits::{NOWHERE, OutputRow, Wants};
use crate::step::outputs::Late;
use crate::step::words::to_words;
use crate::step::{Group, Layout, N_SLOTS, Place};
use crate::{CudaError, Slice, Stream};

/// Bytes of masks that come late in one step: the masks of 256 contexts over 128K tokens.
pub(crate) const LATE_MASK_BYTES_MAX: usize = 4 << 20;
pub(super) const N_LATE_MASK_WORDS_MAX: usize = LATE_MASK_BYTES_MAX / 4;

/// Words of a row that is asked for something.
const OUTPUT_ROW_WORDS: usize = size_of::<OutputRow>() / 4;

/// The rest of a step that waits for masks.
#[derive(Debug)]
pub(super) struct WaitingStep {
    layout: Layout,
    group: Group,
    /// Whether it is captured; one with prompts in it is not.
    is_captured: bool,
    late: Vec<Late>,
    /// Words that come back.
    n_words: usize,
    /// All models compute in one memory, and the logits are in it.
    _hold: Hold,
}

impl Steps {
    /// Whether the step that was filled in last waits for masks. One whose logits are not in memory together, or of which
    /// the host works something out, cannot: its late draws sit out.
    pub(super) fn holds_late_draws(&mut self) -> bool {
        let has_late = !self.lists.outputs.late.is_empty();
        if has_late && !self.lists.can_be_held() {
            self.lists.outputs.sit_out();
            return false;
        }
        has_late
    }

    /// Launches the layers of such a step.
    pub(super) fn run_layers(
        &mut self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
        n_words: usize,
        buffers_idx: usize,
    ) -> Result<WaitingStep, CudaError> {
        let is_captured = self.lists.can_be_captured();
        match is_captured {
            true => self.run_to_logits(stream, llama, kv, layout)?,
            false => {
                self.launch_tapped_layers(stream, llama, kv, layout, buffers_idx)?;
                self.launch_head(stream, llama, layout, self.lists.logits_of())?;
            }
        }
        let late = std::mem::take(&mut self.lists.outputs.late);
        let (group, hold) = (self.group_of(layout), self.card.hold());
        Ok(WaitingStep { layout: *layout, group, is_captured, late, n_words, _hold: hold })
    }

    /// Launches the draws of a step that waits for masks, those without a mask left out; any other has done so, and all of
    /// its late draws sit out. Returns the rows whose masks there was no room for.
    ///
    /// # Errors
    /// The driver refused something.
    pub(crate) fn supply(
        &mut self,
        llama: &Llama,
        step: &mut InFlight,
        masks: &[LateMask<'_>],
    ) -> Result<Vec<usize>, CudaError> {
        let Some(held) = step.held.take() else { return Ok(masks.iter().map(|mask| mask.row_idx).collect()) };
        let mut sat_out = Vec::new();
        let WaitingStep { layout, group, is_captured, late, n_words, _hold } = *held;
        let (late_start, buffers_idx) = (self.regions.late - N_SLOTS, step.buffers_idx);
        let words = &mut self.ring[buffers_idx].late;
        let mut end = (step.rows.len() * OUTPUT_ROW_WORDS).next_multiple_of(2);
        for Late { row_idx, request_idx, output_idx, drawn } in late {
            let row = &mut step.rows[output_idx];
            let mask = masks.iter().find(|mask| mask.row_idx == row_idx).map(|late| late.mask.words());
            match mask.filter(|mask| end + 2 * mask.len() <= words.len()) {
                Some(mask) => {
                    row.mask_start = ((N_SLOTS + late_start + end) / 2) as u32;
                    for (pair, &word) in words[end..].chunks_exact_mut(2).zip(mask) {
                        pair.copy_from_slice(&[word as u32, (word >> 32) as u32]);
                    }
                    end += 2 * mask.len();
                    step.places[request_idx] = drawn;
                }
                None => {
                    sat_out.extend(mask.map(|_| row_idx));
                    sit_out(row);
                    step.places[request_idx] = Place::SatOut;
                }
            }
        }
        words[..step.rows.len() * OUTPUT_ROW_WORDS].copy_from_slice(to_words(&step.rows));
        let memory = self.memory.slice();
        let card = self.card.clone();
        let stream = card.stream();
        self.ring[buffers_idx].drawing.record(&stream)?;
        Layout::slice(memory, late_start, end).upload(&stream, &self.ring[buffers_idx].late[..end])?;
        let rows = Layout::slice(memory, late_start, group.n_outputs * OUTPUT_ROW_WORDS);
        match is_captured {
            true => self.run_draws(&stream, llama, &layout, &group, rows)?,
            false => self.launch_outputs(&stream, llama, &layout, 0, &group, rows)?,
        }
        self.bring_whole(&stream, buffers_idx, &group)?;
        self.bring_back(&stream, buffers_idx, n_words)?;
        Ok(sat_out)
    }

    /// Gives up the step that was launched last. The next one takes its buffers: the others may be those of the step before.
    pub(crate) fn give_up(&mut self, step: &InFlight) {
        self.next_idx = step.buffers_idx;
    }

    /// Whether the layers of a step that waits for masks are done; true of any other.
    ///
    /// # Errors
    /// Something in the step failed.
    pub(crate) fn waits_for_masks(&self, step: &InFlight) -> Result<bool, CudaError> {
        match step.held {
            Some(_) => self.ring[step.buffers_idx].layered.is_done(),
            None => Ok(true),
        }
    }
}

/// Has a row passed over: it is asked for nothing, and what it drew is not kept.
pub(in crate::step) fn sit_out(row: &mut OutputRow) {
    (row.wants, row.drawn_slot) = (Wants::NOTHING, NOWHERE);
}
