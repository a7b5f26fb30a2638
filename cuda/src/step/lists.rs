//! The lists of a step, and how they are written out for the device.

use trellis_engine::batch::PageCopy;

use super::given::Given;
use super::layout::{Count, Dims, Layout, N_SLOTS, Steers};
use super::outputs::{Outputs, Room, TablePlace};
use super::row::StepRow;
use super::slots::{EditList, Slots, TablesFull};
use super::words::to_words;
use crate::model::LogitsOf;
use crate::ops::attention::{Cuttings, Form, N_FEW_TOKENS_MAX, PAGE_LEN};
use crate::ops::attention_holes::Holes;
use crate::ops::attention_plan::AttentionPlan;
use crate::ops::pages::{CellMove, cell_of, moves};
use crate::ops::shares::RowSpan;
use crate::ops::steer::NOWHERE;

/// The lists of one step; kept from step to step for their memory.
#[derive(Debug)]
pub(crate) struct StepLists {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    kv_cells: Vec<u32>,
    /// For each token where the holes of its context are described, in words from the first; for one without holes nothing
    /// looks.
    hole_places: Vec<u32>,
    holes: Holes,
    /// For each token up to the last steered one where what is added to it lies.
    steering: Vec<u32>,
    /// Cells that are copied together before all else.
    moves: Vec<CellMove>,
    /// Where the page table of each row begins.
    tables: Vec<Option<usize>>,
    /// What the slots are told.
    edits: EditList,
    rows: Vec<RowSpan>,
    attention: AttentionPlan,
    copies: Vec<u32>,
    pub(crate) outputs: Outputs,
}

impl StepLists {
    /// For a model whose layers have these windows.
    pub(crate) fn new(windows: &[Option<usize>]) -> Self {
        Self {
            tokens: Vec::new(),
            positions: Vec::new(),
            kv_cells: Vec::new(),
            hole_places: Vec::new(),
            holes: Holes::default(),
            steering: Vec::new(),
            moves: Vec::new(),
            tables: Vec::new(),
            edits: EditList::default(),
            rows: Vec::new(),
            attention: AttentionPlan::new(windows),
            copies: Vec::new(),
            outputs: Outputs::default(),
        }
    }

    /// Takes in the rows of a step; attention cuts them as `cuttings` says.
    pub(crate) fn fill(
        &mut self,
        rows: &[StepRow<'_>],
        copies: &[PageCopy],
        slots: &mut Slots,
        given: &mut Given,
        cuttings: &Cuttings,
        room: Room,
    ) {
        slots.begin_step(copies, rows);
        // Before anything else, since all of it may have to be done anew.
        if self.place_tables(rows, slots).is_err() {
            slots.forget_tables();
            self.place_tables(rows, slots).expect("there is room for the tables of a whole step");
        }
        self.tokens.clear();
        self.positions.clear();
        self.kv_cells.clear();
        self.hole_places.clear();
        self.holes.clear();
        self.steering.clear();
        self.moves.clear();
        self.moves.extend(rows.iter().flat_map(StepRow::packs).flat_map(moves));
        self.rows.clear();
        self.copies.clear();
        self.outputs.clear(room);
        self.copies.extend(copies.iter().flat_map(|copy| [copy.src.0, copy.dst.0]));
        for (row_idx, row) in rows.iter().enumerate() {
            let (start, end) = (row.start, row.end());
            let token = self.tokens.len();
            let table = self.tables[row_idx];
            let n_nodes = match row.is_node() {
                true => 0,
                false => rows[row_idx + 1..].iter().take_while(|row| row.is_node()).count(),
            };
            let of_tree = &rows[row_idx..=row_idx + n_nodes];
            self.outputs.push(
                of_tree,
                token,
                room,
                TablePlace { table, slots, given, edits: &mut self.edits },
            );
            let Some(entries) = table.filter(|_| !row.is_of_head()) else { continue };
            let (n_tokens, rotation, first_cell) = (row.n_tokens(), row.rotation(), row.first_cell());
            self.tokens.extend(row.words(start, end));
            self.positions.extend(rotation as i32..(rotation + n_tokens) as i32);
            let cell = |cell: usize| cell_of(row.pages[cell / PAGE_LEN], cell % PAGE_LEN);
            self.kv_cells.extend((first_cell..first_cell + n_tokens).map(cell));
            let holes = row.evicted.map_or(0, |evicted| self.holes.push(evicted) as u32);
            self.hole_places.resize(self.tokens.len(), holes);
            if let Some(steered) = &row.steered {
                let n_before = steered.from.saturating_sub(start);
                self.steering.resize(token + n_before, NOWHERE);
                let place = given.steering(steered.steering).expect("it was given a place before");
                self.steering.resize(self.tokens.len(), place);
            }
            let has_holes = row.evicted.is_some();
            let n_pages_alike = row.n_pages_alike;
            self.rows.push(RowSpan {
                token,
                n_tokens,
                position: first_cell,
                entries,
                n_pages_alike,
                has_holes,
            });
        }
        for (to, words) in given.brought().parts() {
            self.edits.bring(to, words);
        }
        self.attention.plan(&self.rows, cuttings);
    }

    /// Gives the rows' page tables their places; rows without pages have none.
    fn place_tables(&mut self, rows: &[StepRow<'_>], slots: &mut Slots) -> Result<(), TablesFull> {
        self.edits.clear();
        self.tables.clear();
        for row in rows {
            let table = match row.pages {
                [] => None,
                _ => Some(slots.place(row, &mut self.edits)?),
            };
            self.tables.push(table);
        }
        Ok(())
    }

    pub(crate) fn n_edits(&self) -> usize {
        self.edits.len()
    }

    /// Cells that are copied together, after the page copies.
    pub(crate) fn moves(&self) -> &[CellMove] {
        &self.moves
    }

    pub(crate) fn n_copies(&self) -> usize {
        self.copies.len() / 2
    }

    /// The lengths of the lists as they are.
    pub(crate) fn dims(&self) -> Dims {
        Dims {
            n_tokens: self.tokens.len(),
            n_windows: self.attention.n_windows(),
            lists: self.attention.size(),
            n_logits_rows: self.outputs.gather.len(),
            n_outputs: self.outputs.rows.len(),
            n_programs: self.outputs.programs.rows.len(),
            n_groups: self.outputs.groups.len(),
            steering: if self.steering.is_empty() { Steers::None } else { Steers::Some },
        }
    }

    /// Whether a captured launch can serve the step: rows of few tokens whose logits are in memory together, and nothing
    /// for the host to answer.
    pub(crate) fn can_be_captured(&self) -> bool {
        self.can_be_held()
            && self.outputs.taps.is_empty()
            && self.outputs.masses.is_empty()
            && self.rows.iter().all(|row| row.n_tokens <= N_FEW_TOKENS_MAX)
    }

    /// Whether the logits can wait for masks: they are in memory together, and there is nothing for the host to answer.
    pub(crate) fn can_be_held(&self) -> bool {
        let [group] = &self.outputs.groups[..] else { return false };
        !group.has_host_work
    }

    /// Whether a row has several tokens.
    pub(crate) fn has_longer_rows(&self) -> bool {
        self.rows.iter().any(|row| row.n_tokens > 1)
    }

    /// Where the rows of logits come from.
    pub(crate) fn logits_of(&self) -> LogitsOf {
        let is_same = |(idx, &token_idx): (usize, &i32)| idx == token_idx as usize;
        let is_each = self.outputs.gather.len() == self.tokens.len();
        match is_each && self.outputs.gather.iter().enumerate().all(is_same) {
            true => LogitsOf::EachToken,
            false => LogitsOf::Some,
        }
    }

    /// Writes the step as `layout` has it, which may have room for more; returns the words that count, and the place
    /// of the page copies among them.
    pub(crate) fn write(&mut self, layout: &Layout, memory: &mut [u32]) -> Written {
        let mut put = |start: usize, words: &[u32]| memory[start..start + words.len()].copy_from_slice(words);
        let n_copies = self.n_copies() as u32;
        put(layout.word(Count::Tokens), &[self.tokens.len() as u32]);
        put(layout.word(Count::Copies), &[n_copies]);
        for (group_idx, group) in self.outputs.groups.iter().enumerate() {
            put(layout.word(Count::LogitsRows { group_idx }), &[group.n_logits_rows as u32]);
            put(layout.word(Count::Outputs { group_idx }), &[group.n_outputs as u32]);
            put(layout.word(Count::Chains { group_idx }), &[group.n_chains as u32]);
        }
        put(layout.tokens, to_words(&self.tokens));
        put(layout.positions, to_words(&self.positions));
        put(layout.kv_cells, &self.kv_cells);
        if layout.dims.steering == Steers::Some {
            self.steering.resize(self.tokens.len(), NOWHERE);
            put(layout.steering, &self.steering);
        }
        put(layout.gather, to_words(&self.outputs.gather));
        put(layout.keeps, to_words(&self.outputs.keeps));
        let mut end = layout.tail;
        put(end, to_words(&self.outputs.score_tokens));
        end = (end + self.outputs.score_tokens.len()).next_multiple_of(2);
        let tail = self.outputs.finish(N_SLOTS + end);
        put(end, tail);
        end += tail.len();
        put(layout.output_rows, to_words(&self.outputs.rows));
        put(layout.program_row(0), to_words(&self.outputs.programs.rows));
        put(layout.chains, &self.outputs.programs.chains);
        put(end, &self.copies);
        let copies = end;
        end += self.copies.len();
        if layout.dims.has_holes() {
            let first = (N_SLOTS + end) as u32;
            self.hole_places.iter_mut().for_each(|place| *place += first);
            put(layout.holes, &self.hole_places);
            put(end, self.holes.words());
            end += self.holes.words().len();
        }
        // Edits are read 16 bytes at a time.
        end = end.next_multiple_of(4);
        let edits = end;
        for words in self.edits.finish(N_SLOTS + edits) {
            put(end, words);
            end += words.len();
        }
        self.write_attention(layout, memory);
        Written { copies, edits, n_words: end, n_extra_words: self.outputs.n_extra_words() }
    }

    fn write_attention(&self, layout: &Layout, memory: &mut [u32]) {
        for window_idx in 0..layout.dims.n_windows {
            for form in Form::ALL {
                let list = self.attention.list(window_idx, form);
                memory[layout.word(Count::Workers { window_idx, form })] = list.n_workers as u32;
                let n_cuts = if form.sums_apart() { list.cuts.len() } else { 0 };
                memory[layout.word(Count::Cuts { window_idx, form })] = n_cuts as u32;
                let [shares, cuts] = layout.list(window_idx, form);
                for (start, words) in
                    [(shares, to_words(&list.shares)), (cuts, to_words(&list.cuts[..n_cuts]))]
                {
                    memory[start..start + words.len()].copy_from_slice(words);
                }
            }
        }
    }

    /// Words that [`StepLists::write`] needs at most, for steps of so many tokens, rows, entries of their page tables, and
    /// words that programs are given.
    pub(crate) fn n_words_max(dims: Dims, n_rows: usize, n_entries: usize, n_given: usize) -> usize {
        let n_tail_words = super::N_SCORES_MAX + super::outputs::N_TAIL_WORDS_MAX + n_given;
        // A row has one page copied at most.
        let n_holes = Holes::n_words_max(n_rows, n_entries);
        Layout::of(dims).tail
            + n_tail_words
            + 2 * n_rows
            + n_holes
            + EditList::n_words_max(n_rows, n_entries)
            + 12
    }
}

/// What was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    /// Where the pairs of page copies begin.
    pub(crate) copies: usize,
    /// Where the edits begin.
    pub(crate) edits: usize,
    /// Words to copy to the device.
    pub(crate) n_words: usize,
    /// Words of scores and top lists that come back.
    pub(crate) n_extra_words: usize,
}
