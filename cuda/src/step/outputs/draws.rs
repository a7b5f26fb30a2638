//! Draws as output rows: by the chain, by programs, and what both bring along.

use std::borrow::Cow;

use trellis_engine::batch::{OutputKind, OutputRequest};
use trellis_engine::sampling::{Sampler, TokenMask};

use super::{ByProgram, N_TAIL_WORDS_MAX, Outputs, Room, TablePlace};
use crate::ops::logits::{NOWHERE, OutputRow, Wants};
use crate::ops::sample::ordered_biases;
use crate::step::given::Keeps;
use crate::step::histories::n_copied_pages;
use crate::step::layout::N_SLOTS;
use crate::step::programs::{DrawPlace, N_DRAW_WORDS_MAX};
use crate::step::row::StepRow;
use crate::step::slots::{PAGE_EDIT_WORDS, Slots};
use crate::step::words::to_words;

impl Outputs {
    /// A program's draw as an output row; `None` when the host has to make it.
    pub(super) fn programmed(
        &mut self,
        row: &StepRow<'_>,
        position: usize,
        by: ByProgram<'_>,
        room: Room,
        place: &mut TablePlace<'_>,
    ) -> Option<OutputRow> {
        let ByProgram { sampler, start, within, logits_row, others } = by;
        let is_possible = self.has_room(room)
            && room.n_plane_sets > 0
            && (row.slot.0 as usize) < N_SLOTS
            && self.programs.can_start(row.slot, self.n_rows, start);
        let put_on = sampler.program.as_ref()?;
        let given = place.given.place(put_on, Keeps::to(within)).filter(|_| is_possible)?;
        let end = position + 1;
        let n_words = N_DRAW_WORDS_MAX + n_mask_words(within.mask().map(|mask| &**mask));
        let table_start = self.bring_history(row, sampler, end, n_words, place)?;
        let group = self.groups.last().expect("the row has a group");
        let at = DrawPlace {
            slot: row.slot,
            row_idx: self.n_rows,
            start,
            n_tokens: end,
            logits_row,
            others,
            n_evicted: row.n_evicted(),
            table_start,
            states_start: room.program_states,
            output_row: self.rows.len() - group.outputs_start,
            group_start: group.programs_start,
        };
        let program_row = (self.programs.rows.len() - group.programs_start) as u32;
        self.programs.push(sampler, at, &given, &mut self.tail);
        Some(OutputRow {
            wants: Wants::PROGRAM,
            drawn_slot: if end == row.end() && !row.is_node() { row.slot.0 } else { NOWHERE },
            program_row,
            mask_start: within.mask().map_or(NOWHERE, |mask| self.push_mask(mask)),
            ..OutputRow::default()
        })
    }

    /// Brings the tokens that a draw looks at beside their pages; returns where the page table begins, or nothing where this
    /// step has no room for them and `n_words` of the tail.
    fn bring_history(
        &mut self,
        row: &StepRow<'_>,
        sampler: &Sampler,
        end: usize,
        n_words: usize,
        place: &mut TablePlace<'_>,
    ) -> Option<usize> {
        let n_window = sampler.n_history(end);
        let n_token_words = place.slots.n_token_words(row, n_window, end);
        if self.tail.len() + self.n_token_words + n_words + n_token_words > N_TAIL_WORDS_MAX {
            return None;
        }
        if n_window == 0 {
            return Some(0);
        }
        let table_start = place.slots.bring_tokens(row, place.table, n_window, end, place.edits)?;
        self.n_token_words += n_token_words;
        Some(table_start)
    }

    /// Pages of tokens that the draws of these rows look at, where tokens were evicted. What the draw of a row looks at that
    /// looks back furthest is there for its others.
    pub(in crate::step) fn n_copied_pages(rows: &[StepRow<'_>]) -> usize {
        let n_pages = |row: &StepRow<'_>, request: &OutputRequest<'_>| {
            let end = request.position + 1;
            draw_of(request).map_or(0, |(sampler, _)| n_copied_pages(row, sampler.n_history(end), end))
        };
        let holed = rows.iter().filter(|row| row.evicted.is_some());
        holed.filter_map(|row| row.requests.iter().map(|request| n_pages(row, request)).max()).sum()
    }

    /// Words that the draws of these rows need at most, behind so many page copies.
    pub(in crate::step) fn n_tail_words(rows: &[StepRow<'_>], n_copies: usize, slots: &Slots) -> usize {
        let n_words = |row: &StepRow<'_>, request: &OutputRequest<'_>| {
            let Some((sampler, n_words)) = draw_of(request) else { return 0 };
            let end = request.position + 1;
            n_words + slots.n_token_words(row, sampler.n_history(end), end)
        };
        let of_row =
            |row: &StepRow<'_>| row.requests.iter().map(|request| n_words(row, request)).sum::<usize>();
        rows.iter().map(of_row).sum::<usize>() + n_copies * PAGE_EDIT_WORDS
    }

    pub(super) fn draw(
        &mut self,
        row: &StepRow<'_>,
        position: usize,
        sampler: &Sampler,
        mask: Option<&TokenMask>,
        place: &mut TablePlace<'_>,
    ) -> Option<OutputRow> {
        let end = position + 1;
        let table_start = self.bring_history(row, sampler, end, n_draw_words(sampler, mask), place)?;
        let n_window = sampler.n_penalized(end);
        let is_last = end == row.end() && !row.is_node() && (row.slot.0 as usize) < N_SLOTS;
        let mut output = OutputRow {
            drawn_slot: if is_last { row.slot.0 } else { NOWHERE },
            table_start: table_start as u32,
            n_history: n_window as u32,
            history_end: end as u32,
            n_bias: sampler.bias.len() as u32,
            // Places in words of the tail; `finish` makes them places in the step's memory.
            bias_start: self.tail.len() as u32,
            ..OutputRow::draw(sampler, (end + row.n_evicted()) as u64)
        };
        if !sampler.bias.is_empty() {
            self.tail.extend_from_slice(to_words(&ordered_biases(&sampler.bias)));
        }
        if let Some(mask) = mask {
            output.mask_start = self.push_mask(mask);
        }
        Some(output)
    }

    /// Where a mask begins in the tail, behind whatever is there, which is a whole number of pairs of words.
    fn push_mask(&mut self, mask: &TokenMask) -> u32 {
        let start = self.tail.len() as u32;
        self.tail.extend(mask.words().iter().flat_map(|&word| [word as u32, (word >> 32) as u32]));
        start
    }
}

/// The sampler of a request that draws, and the words that it needs besides the history.
fn draw_of<'a>(request: &'a OutputRequest<'_>) -> Option<(&'a Sampler, usize)> {
    match &request.kind {
        OutputKind::Sample(sampler) => Some((*sampler, n_draw_words(sampler, sampler.mask.as_deref()))),
        OutputKind::Masked { sampler, mask } => {
            Some((&***sampler, n_draw_words(sampler, mask.map(|mask| &**mask))))
        }
        OutputKind::Program { sampler, within, .. } => {
            Some((*sampler, N_DRAW_WORDS_MAX + n_mask_words(within.mask().map(|mask| &**mask))))
        }
        OutputKind::Ranked { sampler, within, .. } if sampler.program.is_none() => {
            let mask = within.map(|mask| &**mask).or(sampler.mask.as_deref());
            Some((&***sampler, n_draw_words(sampler, mask)))
        }
        _ => None,
    }
}

/// Words of biases and mask that a draw needs.
fn n_draw_words(sampler: &Sampler, mask: Option<&TokenMask>) -> usize {
    2 * sampler.bias.len() + n_mask_words(mask)
}

/// What both masks allow.
pub(super) fn both<'a>(
    one: Option<&'a TokenMask>,
    other: Option<&'a TokenMask>,
) -> Option<Cow<'a, TokenMask>> {
    match (one, other) {
        (Some(one), Some(other)) => Some(Cow::Owned(one.clone().and(other))),
        (one, other) => one.or(other).map(Cow::Borrowed),
    }
}

fn n_mask_words(mask: Option<&TokenMask>) -> usize {
    2 * mask.map_or(0, |mask| mask.words().len())
}
