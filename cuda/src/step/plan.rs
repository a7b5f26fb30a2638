//! A step, written out for the device.

use trellis_engine::batch::PageCopy;

use super::layout::{Count, Dims, Layout, N_SLOTS};
use super::outputs::{OutputPlan, Room};
use super::row::StepRow;
use crate::ops::attention::{PAGE_LEN, RowSpan, Tile, plan_tiles};
use crate::words::to_words;

/// Entries of the page table of the shortest contexts; from there on powers of two, so that few launches have to be
/// captured.
const PAGE_TABLE_STRIDE_MIN: usize = 8;

/// The lists of one step; kept from step to step for their memory.
#[derive(Debug, Default)]
pub(crate) struct StepPlan {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    kv_pages: Vec<i32>,
    row_start: Vec<i32>,
    row_pos0: Vec<i32>,
    page_tables: Vec<i32>,
    page_table_ends: Vec<usize>,
    items: Vec<i32>,
    spans: Vec<RowSpan>,
    tiles: Vec<Tile>,
    copies: Vec<u32>,
    pub(crate) outputs: OutputPlan,
}

impl StepPlan {
    /// Takes in the rows of a step; attention takes up to `tile_len` tokens of a row together.
    pub(crate) fn fill(&mut self, rows: &[StepRow<'_>], copies: &[PageCopy], tile_len: usize, room: Room) {
        for list in [&mut self.tokens, &mut self.positions, &mut self.kv_pages, &mut self.row_start] {
            list.clear();
        }
        for list in [&mut self.row_pos0, &mut self.page_tables, &mut self.items] {
            list.clear();
        }
        self.page_table_ends.clear();
        self.spans.clear();
        self.copies.clear();
        self.outputs.clear();
        self.copies.extend(copies.iter().flat_map(|copy| [copy.src.0, copy.dst.0]));
        self.row_start.push(0);
        for (row_idx, row) in rows.iter().enumerate() {
            let (start, end) = (row.start, row.end());
            self.outputs.push(row, self.tokens.len(), room);
            self.tokens.extend(row.words(start, end));
            self.positions.extend(start as i32..end as i32);
            self.kv_pages.extend((start..end).map(|position| row.pages[position / PAGE_LEN].0 as i32));
            self.row_start.push(self.tokens.len() as i32);
            self.row_pos0.push(start as i32);
            self.page_tables.extend(row.pages[..end.div_ceil(PAGE_LEN)].iter().map(|page| page.0 as i32));
            self.page_table_ends.push(self.page_tables.len());
            if row.n_tokens() == 1 {
                self.items.extend([row_idx as i32, 0]);
            } else {
                self.spans.push(RowSpan { row_idx, n_tokens: row.n_tokens(), pos0: start });
            }
        }
        // The window of a layer only bounds the work of a tile, which orders them.
        plan_tiles(&self.spans, tile_len, None, &mut self.tiles);
    }

    pub(crate) fn n_copies(&self) -> usize {
        self.copies.len() / 2
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.row_pos0.len()
    }

    /// The lengths of the lists as they are.
    pub(crate) fn dims(&self) -> Dims {
        let starts = [0].into_iter().chain(self.page_table_ends.iter().copied());
        let n_pages_max =
            starts.zip(&self.page_table_ends).map(|(start, end)| end - start).max().unwrap_or(0);
        Dims {
            n_tokens: self.tokens.len(),
            n_rows: self.n_rows(),
            page_table_stride: Self::page_table_stride(n_pages_max),
            n_items: self.items.len() / 2,
            n_tiles: self.tiles.len(),
            n_logits_rows: self.outputs.gather.len(),
            n_outputs: self.outputs.rows.len(),
            n_groups: self.outputs.groups.len(),
        }
    }

    /// Entries of a row of the page table, for contexts of up to so many pages.
    pub(crate) fn page_table_stride(n_pages: usize) -> usize {
        n_pages.next_power_of_two().max(PAGE_TABLE_STRIDE_MIN)
    }

    /// Whether every row is one token whose logits stand in its own row, so that a captured launch can serve it.
    pub(crate) fn is_plain_decode(&self) -> bool {
        let [group] = &self.outputs.groups[..] else { return false };
        self.tiles.is_empty()
            && !group.has_host_work
            && group.n_outputs <= self.n_rows()
            && self.outputs.gather.iter().enumerate().all(|(idx, &token_idx)| idx == token_idx as usize)
            && self.outputs.gather.len() == self.n_rows()
    }

    /// Writes the step as `layout` has it, which may have room for more; returns the words that count, and the place
    /// of the page copies among them.
    pub(crate) fn write(&mut self, layout: &Layout, memory: &mut [u32]) -> Written {
        let dims = layout.dims;
        let mut put = |start: usize, words: &[u32]| memory[start..start + words.len()].copy_from_slice(words);
        let n_copies = self.n_copies() as u32;
        put(Count::Tokens.word(), &[self.tokens.len() as u32]);
        put(Count::Items.word(), &[self.items.len() as u32 / 2]);
        put(Count::Tiles.word(), &[self.tiles.len() as u32]);
        put(Count::Copies.word(), &[n_copies]);
        for (group_idx, group) in self.outputs.groups.iter().enumerate() {
            put(Count::LogitsRows { group_idx }.word(), &[group.n_logits_rows as u32]);
            put(Count::Outputs { group_idx }.word(), &[group.n_outputs as u32]);
        }
        put(layout.tokens, to_words(&self.tokens));
        put(layout.positions, to_words(&self.positions));
        put(layout.kv_pages, to_words(&self.kv_pages));
        put(layout.row_start, to_words(&self.row_start));
        put(layout.row_pos0, to_words(&self.row_pos0));
        put(layout.items, to_words(&self.items));
        put(layout.gather, to_words(&self.outputs.gather));
        let mut start = 0;
        for (row_idx, &end) in self.page_table_ends.iter().enumerate() {
            put(
                layout.page_table + row_idx * dims.page_table_stride,
                to_words(&self.page_tables[start..end]),
            );
            start = end;
        }
        for (idx, tile) in self.tiles.iter().enumerate() {
            put(layout.tiles + 2 * idx, to_words(&tile.words()));
        }
        let mut end = layout.tail;
        put(end, to_words(&self.outputs.score_tokens));
        end = (end + self.outputs.score_tokens.len()).next_multiple_of(2);
        let tail = self.outputs.finish(N_SLOTS + end);
        put(end, tail);
        end += tail.len();
        put(layout.output_rows, to_words(&self.outputs.rows));
        put(end, &self.copies);
        Written { copies: end, n_words: end + self.copies.len(), n_extra_words: self.outputs.n_extra_words() }
    }

    /// Words that [`StepPlan::write`] needs at most, for steps of so many tokens, rows and pages.
    pub(crate) fn n_words_max(dims: Dims) -> usize {
        Layout::of(dims).tail + super::N_SCORES_MAX + super::outputs::N_TAIL_WORDS_MAX + 2 * dims.n_rows + 8
    }
}

/// What was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    /// Where the pairs of page copies begin.
    pub(crate) copies: usize,
    /// Words to copy to the device.
    pub(crate) n_words: usize,
    /// Words of scores and top lists that come back.
    pub(crate) n_extra_words: usize,
}
