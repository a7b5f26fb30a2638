//! What of contexts stays on the device between steps: their page tables, and the tokens of their pages.
//!
//! - Comes in: rows, each with the pages of its context and how many of them are as they were.
//! - Goes out: where each page table begins, and edits that bring tables and tokens up to date.
//! - Must not happen: an edit for what the device has; work that follows the length of a context whose pages stay.
//!
//! A table has a place for as many entries as it may soon need. Places are handed out one behind the other, and all
//! anew when there are none left: contexts with work are then told once more, those without have gone.
//!
//! Every step notes the tokens that it computes beside their pages, and page copies take them along, so that edits are needed
//! only for pages that came from elsewhere.

use std::ops::Range;

use trellis_engine::batch::{PageCopy, PageId};

use super::histories::{Histories, n_copied_pages};
use super::row::StepRow;
use super::words::to_words;
use crate::ops::attention::PAGE_LEN;
use crate::ops::edits::{EDIT_WORDS, Edit, N_WORDS_MAX, Target};

/// The fewest entries that a table has room for.
const N_ENTRIES_MIN: usize = 16;

/// Words that the tokens of one page take in a step at most.
pub(super) const PAGE_EDIT_WORDS: usize = EDIT_WORDS + PAGE_LEN;

/// Which parts of tables and tokens the device has.
#[derive(Debug)]
pub(crate) struct Slots {
    /// First word of the tables, in the memory of steps.
    start: usize,
    /// Words of all tables.
    n_words: usize,
    /// Words that were handed out, from the start on.
    n_used: usize,
    /// Entries of the longest table.
    n_entries_max: usize,
    tables: Vec<Table>, // by slot
    /// A bit for each page: whether its tokens are beside it, as far as they have been computed.
    known: Vec<u64>,
    /// How often pages have lost their bit.
    n_lost: u64,
    /// What draws look at where tokens were evicted.
    histories: Histories,
}

/// The page table of a slot.
#[derive(Clone, Debug, Default)]
struct Table {
    /// First word.
    start: usize,
    /// Words; none without a place.
    capacity: usize,
    /// Entries from the first on that the device has.
    n_entries: usize,
    /// Pages that have their tokens beside them, if no page has lost them since.
    known: Range<usize>,
    /// [`Slots::n_lost`] at the time.
    n_lost: u64,
}

/// There is no place left for a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct TablesFull;

/// Edits of one step; kept from step to step for their memory.
#[derive(Debug, Default)]
pub(super) struct EditList {
    edits: Vec<Edit>,
    /// Edits that write words of the memory of steps itself.
    moves: Vec<Edit>,
    words: Vec<u32>,
}

impl Slots {
    /// For tables in so many words from word `start` on of the memory of steps. They have room for the longest tables of a
    /// whole step. The table of what is copied of histories begins at word `copied`.
    pub(crate) fn new(
        start: usize,
        n_words: usize,
        n_entries_max: usize,
        n_pages: usize,
        copied: usize,
    ) -> Self {
        let known = vec![0; n_pages.div_ceil(64)];
        let histories = Histories::new(copied, n_pages);
        Self { start, n_words, n_used: 0, n_entries_max, tables: Vec::new(), known, n_lost: 0, histories }
    }

    /// Begins a step: the page copies, which are made before everything else, then what rows pack.
    pub(super) fn begin_step(&mut self, copies: &[PageCopy], rows: &[StepRow<'_>]) {
        self.histories.begin_step();
        self.copy(copies);
        self.lose_tokens(rows.iter().flat_map(StepRow::packs).map(|pack| pack.to));
    }

    /// Words of the tables of steps of so many rows.
    pub(crate) fn n_words(n_rows_max: usize, n_entries_max: usize) -> usize {
        n_rows_max * n_entries_max.max(N_ENTRIES_MIN)
    }

    /// Forgets all that the device has, because it is not known any more.
    pub(crate) fn forget(&mut self) {
        self.forget_tables();
        self.known.fill(0);
        self.n_lost += 1;
    }

    /// Gives back the places of all tables.
    pub(super) fn forget_tables(&mut self) {
        self.tables.clear();
        self.n_used = 0;
    }

    /// Notes that pages come from elsewhere, without their tokens.
    pub(crate) fn lose_tokens(&mut self, pages: impl Iterator<Item = PageId>) {
        for page in pages {
            self.known[page.0 as usize / 64] &= !(1 << (page.0 % 64));
            self.n_lost += 1;
        }
    }

    /// Takes in page copies.
    fn copy(&mut self, copies: &[PageCopy]) {
        for &PageCopy { src, dst } in copies {
            match self.knows(src) {
                true => self.note_known(dst),
                false => self.lose_tokens(std::iter::once(dst)),
            }
        }
    }

    /// Takes in a row with pages: gives its table a place, and brings it up to date; returns where it begins.
    ///
    /// # Errors
    /// There is no place left; the row has changed nothing then.
    pub(super) fn place(&mut self, row: &StepRow<'_>, edits: &mut EditList) -> Result<usize, TablesFull> {
        let n_entries = row.n_pages();
        let slot = row.slot.0 as usize;
        if slot >= self.tables.len() {
            self.tables.resize(slot + 1, Table::default());
        }
        let table = &mut self.tables[slot];
        let n_same = row.n_same_pages.min(table.n_entries);
        if table.capacity < n_entries {
            let capacity =
                n_entries.next_power_of_two().clamp(N_ENTRIES_MIN, self.n_entries_max.max(N_ENTRIES_MIN));
            if self.n_used + capacity > self.n_words {
                return Err(TablesFull);
            }
            *table = Table { start: self.start + self.n_used, capacity, ..Table::default() };
            self.n_used += capacity;
        } else {
            table.n_entries = n_same;
            table.known.end = table.known.end.min(n_same);
        }
        let told = &row.pages[table.n_entries.min(n_entries)..n_entries];
        let ids = told.iter().map(|page| page.0);
        edits.push(Target::MEMORY, table.start + table.n_entries, ids);
        table.n_entries = table.n_entries.max(n_entries);
        let start = table.start;
        // What is written from its beginning is known in full.
        let first_whole = row.first_cell().div_ceil(PAGE_LEN);
        for &page in &row.pages[first_whole.min(n_entries)..n_entries] {
            self.note_known(page);
        }
        Ok(start)
    }

    /// Words that bringing the last `n_tokens` tokens before `end` beside their pages takes.
    pub(super) fn n_token_words(&self, row: &StepRow<'_>, n_tokens: usize, end: usize) -> usize {
        match row.evicted {
            None => PAGE_EDIT_WORDS * self.unknown(row, n_tokens, end).count(),
            Some(_) if n_tokens == 0 => 0,
            // One more for a token that only the device has.
            Some(_) => PAGE_EDIT_WORDS * (n_copied_pages(row, n_tokens, end) + 1),
        }
    }

    /// Brings those tokens, at least one, to where a draw finds them by a page table; returns where that begins. `table` is
    /// that of the row's pages. Nothing where it has none, or where there is no room.
    pub(super) fn bring_tokens(
        &mut self,
        row: &StepRow<'_>,
        table: Option<usize>,
        n_tokens: usize,
        end: usize,
        edits: &mut EditList,
    ) -> Option<usize> {
        if row.evicted.is_some() {
            return self.histories.bring(row, n_tokens, end, edits);
        }
        let table_start = table?;
        let missing: Vec<usize> = self.unknown(row, n_tokens, end).collect();
        for page_idx in missing {
            let (page, start) = (row.pages[page_idx], page_idx * PAGE_LEN);
            edits.push(
                Target::PAGE_TOKENS,
                page.0 as usize * PAGE_LEN,
                row.known_tokens(start, start + PAGE_LEN),
            );
            self.note_known(page);
        }
        let table = &mut self.tables[row.slot.0 as usize];
        let looked_at = (end - n_tokens) / PAGE_LEN..end.div_ceil(PAGE_LEN);
        table.known = match table.n_lost == self.n_lost && table.known.contains(&looked_at.start) {
            true => table.known.start..table.known.end.max(looked_at.end),
            false => looked_at,
        };
        table.n_lost = self.n_lost;
        Some(table_start)
    }

    /// Pages of tokens that draws among holes may still look at in this step.
    pub(super) fn n_copied_pages_left(&self) -> usize {
        self.histories.n_left()
    }

    /// Which pages of a row lack tokens among those.
    fn unknown<'a>(
        &'a self,
        row: &'a StepRow<'_>,
        n_tokens: usize,
        end: usize,
    ) -> impl Iterator<Item = usize> + 'a {
        let first = (end - n_tokens) / PAGE_LEN;
        let table = self.tables.get(row.slot.0 as usize).filter(|table| table.n_lost == self.n_lost);
        let known = table.map(|table| table.known.clone()).filter(|known| known.contains(&first));
        let first = known.map_or(first, |known| known.end.min(row.n_same_pages).max(first));
        (first..end.div_ceil(PAGE_LEN)).filter(move |&page_idx| {
            let is_written = page_idx * PAGE_LEN >= row.start;
            !is_written && row.pages.get(page_idx).is_some_and(|&page| !self.knows(page))
        })
    }

    fn knows(&self, page: PageId) -> bool {
        self.known[page.0 as usize / 64] >> (page.0 % 64) & 1 == 1
    }

    fn note_known(&mut self, page: PageId) {
        self.known[page.0 as usize / 64] |= 1 << (page.0 % 64);
    }
}

impl EditList {
    pub(super) fn clear(&mut self) {
        self.edits.clear();
        self.moves.clear();
        self.words.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.edits.len()
    }

    /// Has `words` written from word `to` on.
    pub(super) fn push(&mut self, into: Target, to: usize, words: impl Iterator<Item = u32>) {
        let first = self.words.len();
        self.words.extend(words);
        for start in (first..self.words.len()).step_by(N_WORDS_MAX) {
            let n_words = (self.words.len() - start).min(N_WORDS_MAX) as u32;
            let to = u32::try_from(to + start - first).expect("tables and tokens are counted in 32 bits");
            self.edits.push(Edit { from: start as u32, to, n_words, into });
        }
    }

    /// Has a word of the memory of steps written to word `to`.
    pub(super) fn move_word(&mut self, from: usize, into: Target, to: usize) {
        let [from, to] = [from, to].map(|word| u32::try_from(word).expect("words are counted in 32 bits"));
        self.moves.push(Edit { from, to, n_words: 1, into });
    }

    /// Has words written that stay in the memory of steps, from word `to` on.
    pub(super) fn bring(&mut self, to: usize, words: &[u32]) {
        self.push(Target::MEMORY, to, words.iter().copied());
    }

    /// Words that bringing so many takes.
    pub(super) fn n_brought_words(n_words: usize) -> usize {
        n_words + EDIT_WORDS * n_words.div_ceil(N_WORDS_MAX)
    }

    /// The edits and behind them what they write, where the first lies at word `start` of the memory of steps.
    pub(super) fn finish(&mut self, start: usize) -> [&[u32]; 2] {
        let words = start + (self.edits.len() + self.moves.len()) * EDIT_WORDS;
        self.edits.iter_mut().for_each(|edit| edit.from += words as u32);
        self.edits.append(&mut self.moves);
        [to_words(&self.edits), &self.words]
    }

    /// Words that both take at most, in steps whose tables have so many entries in all.
    pub(super) fn n_words_max(n_rows: usize, n_entries: usize) -> usize {
        n_entries + EDIT_WORDS * (n_rows + n_entries.div_ceil(N_WORDS_MAX))
    }
}
