//! The lists of a step, and how they are written out for the device.

use trellis_engine::batch::PageCopy;

use super::layout::{Count, Dims, Layout, N_SLOTS};
use super::outputs::{Outputs, Room};
use super::row::StepRow;
use super::words::to_words;
use crate::ops::attention::{Cuttings, Form, N_FEW_TOKENS_MAX, PAGE_LEN};
use crate::ops::attention_plan::AttentionPlan;
use crate::ops::shares::{PageEntry, RowSpan, Share};

/// The lists of one step; kept from step to step for their memory.
#[derive(Debug)]
pub(crate) struct StepLists {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    kv_pages: Vec<i32>,
    /// Page tables of the rows, one behind the other.
    entries: Vec<PageEntry>,
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
            kv_pages: Vec::new(),
            entries: Vec::new(),
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
        cuttings: &Cuttings,
        room: Room,
    ) {
        for list in [&mut self.tokens, &mut self.positions, &mut self.kv_pages] {
            list.clear();
        }
        self.entries.clear();
        self.rows.clear();
        self.copies.clear();
        self.outputs.clear();
        self.copies.extend(copies.iter().flat_map(|copy| [copy.src.0, copy.dst.0]));
        for row in rows {
            let (start, end) = (row.start, row.end());
            let token = self.tokens.len();
            self.outputs.push(row, token, room);
            self.tokens.extend(row.words(start, end));
            self.positions.extend(start as i32..end as i32);
            self.kv_pages.extend((start..end).map(|position| row.pages[position / PAGE_LEN].0 as i32));
            let entries = self.entries.len();
            self.rows.push(RowSpan { token, n_tokens: row.n_tokens(), position: start, entries });
            self.entries.extend(row.pages[..end.div_ceil(PAGE_LEN)].iter().map(|page| PageEntry(page.0)));
        }
        self.attention.plan(&self.rows, cuttings);
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
            n_groups: self.outputs.groups.len(),
        }
    }

    /// Whether a captured launch can serve the step: rows of few tokens whose logits are in memory together, and nothing
    /// for the host to answer.
    pub(crate) fn can_be_captured(&self) -> bool {
        let [group] = &self.outputs.groups[..] else { return false };
        !group.has_host_work && self.rows.iter().all(|row| row.n_tokens <= N_FEW_TOKENS_MAX)
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
        }
        put(layout.tokens, to_words(&self.tokens));
        put(layout.positions, to_words(&self.positions));
        put(layout.kv_pages, to_words(&self.kv_pages));
        put(layout.gather, to_words(&self.outputs.gather));
        let mut end = layout.tail;
        put(end, to_words(&self.outputs.score_tokens));
        end = (end + self.outputs.score_tokens.len()).next_multiple_of(2);
        let tail = self.outputs.finish(N_SLOTS + end);
        put(end, tail);
        end += tail.len();
        put(layout.output_rows, to_words(&self.outputs.rows));
        put(end, &self.copies);
        let copies = end;
        end += self.copies.len();
        put(end, to_words(&self.entries));
        self.write_attention(layout, (N_SLOTS + end) as u32, memory);
        end += self.entries.len();
        Written { copies, n_words: end, n_extra_words: self.outputs.n_extra_words() }
    }

    /// Writes the lists of attention; the page tables begin at word `entries` of the step's memory.
    fn write_attention(&self, layout: &Layout, entries: u32, memory: &mut [u32]) {
        for window_idx in 0..layout.dims.n_windows {
            for form in Form::ALL {
                let list = self.attention.list(window_idx, form);
                memory[layout.word(Count::Workers { window_idx, form })] = list.n_workers as u32;
                let n_cuts = if form.sums_apart() { list.cuts.len() } else { 0 };
                memory[layout.word(Count::Cuts { window_idx, form })] = n_cuts as u32;
                let [mut at, cuts] = layout.list(window_idx, form);
                for share in &list.shares {
                    let placed = Share { entries: share.entries + entries, ..*share };
                    let words = to_words(std::slice::from_ref(&placed));
                    memory[at..at + words.len()].copy_from_slice(words);
                    at += words.len();
                }
                let words = to_words(&list.cuts[..n_cuts]);
                memory[cuts..cuts + words.len()].copy_from_slice(words);
            }
        }
    }

    /// Words that [`StepLists::write`] needs at most, for steps of so many tokens, page copies and entries of page tables.
    pub(crate) fn n_words_max(dims: Dims, n_copies: usize, n_entries: usize) -> usize {
        let n_tail_words = super::N_SCORES_MAX + super::outputs::N_TAIL_WORDS_MAX;
        Layout::of(dims).tail + n_tail_words + 2 * n_copies + n_entries + 8
    }
}

/// Which tokens have rows of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LogitsOf {
    /// Each one, its own.
    EachToken,
    /// Those that are gathered.
    Some,
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
