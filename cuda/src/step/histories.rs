//! The tokens that draws look at in contexts from which some were evicted, and behind the nodes of trees of guesses.
//!
//! Elsewhere the tokens of a context lie beside its pages, page by page. Where tokens are gone, what is left does not: a step
//! that draws there brings the tokens that are looked at, into pages of tokens that belong to no page of keys. They have a
//! table, which says of each entry that its page is the next one; a row's tokens lie as the table of a whole context would
//! have them, and it begins that much before.

use trellis_engine::backend::{PAGE_LEN, n_history_pages};
use trellis_engine::batch::SlotId;

use super::row::StepRow;
use super::slots::EditList;
use crate::ops::edits::Target;

/// Pages of tokens that the draws of a step look at in such contexts: 256K tokens. The engine plans no step with more; of a
/// row that needs more alone, the host draws.
pub(crate) const N_COPIED_PAGES: usize = 1 << 14;

/// Where the tokens of a step's rows were put.
#[derive(Debug)]
pub(super) struct Histories {
    /// First word of the table, in the memory of steps.
    table: usize,
    /// The page of tokens that its first entry names.
    first_page: usize,
    /// Pages that are taken.
    n_used: usize,
    last: Option<Copied>,
}

/// Tokens of the row that was taken in last.
#[derive(Clone, Copy, Debug)]
struct Copied {
    slot: SlotId,
    /// Where the row begins: the nodes of a tree are rows of one slot, each with tokens of its own.
    first_cell: usize,
    /// The first page of its tokens that was copied, and where it went.
    page_idx: usize,
    place: usize,
}

/// The entries of the table behind `n_pages` pages of keys.
pub(crate) fn table(n_pages: usize) -> Vec<u32> {
    (n_pages..n_pages + N_COPIED_PAGES).map(|page| page as u32).collect()
}

/// Pages that have the last `n_tokens` tokens before `end`, and those of the row behind them.
pub(super) fn n_copied_pages(row: &StepRow<'_>, n_tokens: usize, end: usize) -> usize {
    n_history_pages(n_tokens, end, row.end())
}

impl Histories {
    /// With the table at word `table`, behind `n_pages` pages of keys.
    pub(super) fn new(table: usize, n_pages: usize) -> Self {
        Self { table, first_page: n_pages, n_used: 0, last: None }
    }

    pub(super) fn begin_step(&mut self) {
        (self.n_used, self.last) = (0, None);
    }

    /// Pages that are not taken.
    pub(super) fn n_left(&self) -> usize {
        N_COPIED_PAGES - self.n_used
    }

    /// Brings the last `n_tokens` tokens before `end`, at least one; returns where the table begins in which they have their
    /// places, or nothing where there is no room.
    pub(super) fn bring(
        &mut self,
        row: &StepRow<'_>,
        n_tokens: usize,
        end: usize,
        edits: &mut EditList,
    ) -> Option<usize> {
        let page_idx = (end - n_tokens) / PAGE_LEN;
        let is_there = |copied: &Copied| {
            (copied.slot, copied.first_cell) == (row.slot, row.first_cell()) && copied.page_idx <= page_idx
        };
        let copied = match self.last.filter(is_there) {
            Some(copied) => copied,
            None => self.copy(row, page_idx, n_copied_pages(row, n_tokens, end), edits)?,
        };
        Some(self.table + copied.place - copied.page_idx)
    }

    fn copy(
        &mut self,
        row: &StepRow<'_>,
        page_idx: usize,
        n_pages: usize,
        edits: &mut EditList,
    ) -> Option<Copied> {
        let place = self.n_used;
        if place + n_pages > N_COPIED_PAGES {
            return None;
        }
        self.n_used += n_pages;
        let start = page_idx * PAGE_LEN;
        let to = (self.first_page + place) * PAGE_LEN;
        edits.push(Target::PAGE_TOKENS, to, row.known_tokens(start, row.end()));
        if row.has_drawn() {
            // The step before has left it with the slot.
            edits.move_word(row.slot.0 as usize, Target::PAGE_TOKENS, to + row.end() - 1 - start);
        }
        let copied = Copied { slot: row.slot, first_cell: row.first_cell(), page_idx, place };
        self.last = Some(copied);
        Some(copied)
    }
}
