//! Where everything lies in the memory that the host fills for a step.
//!
//! Words of 32 bits: first a token for each slot, which only the device writes; then what one copy brings: counts, the
//! tokens with their positions and pages, the rows with their page tables, the work of attention, what is asked for,
//! and a tail of what the samplers need. All places but those in the tail follow from [`Dims`] alone, so that a
//! captured launch finds them again.

use crate::Slice;
use crate::ops::common::Rows;
use crate::ops::logits::OutputRow;

/// Contexts whose drawn tokens stay on the device; others are decoded without looking ahead.
pub(crate) const N_SLOTS: usize = 1 << 16;

/// Counts before those of the groups.
const N_COUNTS: usize = 4;
/// Words of a row that is asked for something.
const OUTPUT_ROW_WORDS: usize = size_of::<OutputRow>() / 4;

/// The lengths of a step's lists; of a captured one, the most that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Dims {
    pub(crate) n_tokens: usize,
    pub(crate) n_rows: usize,
    /// Entries of a row of the page table.
    pub(crate) page_table_stride: usize,
    /// Tokens that attention takes one by one.
    pub(crate) n_items: usize,
    /// Tiles of tokens that it takes together.
    pub(crate) n_tiles: usize,
    /// Rows of logits, over all groups.
    pub(crate) n_logits_rows: usize,
    /// Output rows, over all groups.
    pub(crate) n_outputs: usize,
    pub(crate) n_groups: usize,
}

/// Places as offsets in words from the start of what is copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) dims: Dims,
    pub(crate) tokens: usize,
    pub(crate) positions: usize,
    pub(crate) kv_pages: usize,
    pub(crate) row_start: usize,
    pub(crate) row_pos0: usize,
    pub(crate) page_table: usize,
    pub(crate) items: usize,
    pub(crate) tiles: usize,
    pub(crate) gather: usize,
    pub(crate) output_rows: usize,
    /// Where the tail begins.
    pub(crate) tail: usize,
}

/// One of the step's counts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    Tokens,
    Items,
    Tiles,
    Copies,
    LogitsRows { group_idx: usize },
    Outputs { group_idx: usize },
}

impl Count {
    pub(crate) fn word(self) -> usize {
        match self {
            Self::Tokens => 0,
            Self::Items => 1,
            Self::Tiles => 2,
            Self::Copies => 3,
            Self::LogitsRows { group_idx } => N_COUNTS + 2 * group_idx,
            Self::Outputs { group_idx } => N_COUNTS + 2 * group_idx + 1,
        }
    }
}

impl Layout {
    pub(crate) fn of(dims: Dims) -> Self {
        let mut end = N_COUNTS + 2 * dims.n_groups;
        let mut take = |n_words: usize| {
            // 16 bytes: what the widest access needs.
            let start = end.next_multiple_of(4);
            end = start + n_words;
            start
        };
        Self {
            dims,
            tokens: take(dims.n_tokens),
            positions: take(dims.n_tokens),
            kv_pages: take(dims.n_tokens),
            row_start: take(dims.n_rows + 1),
            row_pos0: take(dims.n_rows),
            page_table: take(dims.n_rows * dims.page_table_stride),
            items: take(2 * dims.n_items),
            tiles: take(2 * dims.n_tiles),
            gather: take(dims.n_logits_rows),
            output_rows: take(dims.n_outputs * OUTPUT_ROW_WORDS),
            tail: take(0),
        }
    }

    /// The place of `n` words from `start` on in a step's memory.
    pub(crate) fn slice(memory: Slice, start: usize, n: usize) -> Slice {
        memory.part(4 * (N_SLOTS + start), 4 * n)
    }

    /// The tokens of the slots.
    pub(crate) fn slots(memory: Slice) -> Slice {
        memory.part(0, 4 * N_SLOTS)
    }

    /// A count on the device, with the most that it can be.
    pub(crate) fn count(memory: Slice, count: Count, n_max: usize) -> Rows {
        Rows { n_max, n: Self::slice(memory, count.word(), 1) }
    }

    /// The output rows `start..start + n`.
    pub(crate) fn output_rows(&self, memory: Slice, start: usize, n: usize) -> Slice {
        Self::slice(memory, self.output_rows + start * OUTPUT_ROW_WORDS, n * OUTPUT_ROW_WORDS)
    }
}
