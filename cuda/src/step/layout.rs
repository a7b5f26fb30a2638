//! Where everything lies in the memory that the host fills for a step.
//!
//! Words of 32 bits: first a token for each slot, which only the device writes; then what one copy brings: counts, the
//! tokens with their positions and cells, the work of attention, what is asked for, and a tail of what the samplers need
//! and of edits; then what late masks bring; then the page tables, which stay. All places but those in the tail follow from
//! [`Dims`] alone, so that a captured launch finds them again.

use crate::Slice;
use crate::ops::attention::{AttentionWork, DeviceShares, Form, N_FORMS};
use crate::ops::attention_plan::PlanSize;
use crate::ops::common::RowCount;
use crate::ops::logits::OutputRow;
use crate::ops::program::ProgramRow;
use crate::ops::shares::{CUT_WORDS, ListSize, SHARE_WORDS};

/// Contexts whose drawn tokens stay on the device; others are decoded without looking ahead.
pub(crate) const N_SLOTS: usize = 1 << 16;

/// Counts before those of the lists and of the groups.
const N_COUNTS: usize = 2;
/// Words of a row that is asked for something.
const OUTPUT_ROW_WORDS: usize = size_of::<OutputRow>() / 4;
/// And of one that a program draws for.
const PROGRAM_ROW_WORDS: usize = size_of::<ProgramRow>() / 4;

/// The lengths of a step's lists; of a captured one, the most that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Dims {
    pub(crate) n_tokens: usize,
    /// Windows that layers have; each has lists of its own.
    pub(crate) n_windows: usize,
    /// Lists of attention.
    pub(crate) lists: PlanSize,
    /// Rows of logits, over all groups.
    pub(crate) n_logits_rows: usize,
    /// Output rows, over all groups.
    pub(crate) n_outputs: usize,
    /// Those of them that programs draw for.
    pub(crate) n_programs: usize,
    pub(crate) n_groups: usize,
    pub(crate) steering: Steers,
}

/// Whether something is added to any token of a step between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Steers {
    None,
    Some,
}

impl Dims {
    /// Whether tokens were evicted from any of the contexts.
    pub(crate) fn has_holes(&self) -> bool {
        self.lists.0[Form::Holed as usize].n_workers > 0
    }
}

/// Places as offsets in words from the start of what is copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) dims: Dims,
    pub(crate) tokens: usize,
    pub(crate) positions: usize,
    /// Which cell takes each token.
    pub(crate) kv_cells: usize,
    /// Where the holes of its context are described; none where no context has holes.
    pub(crate) holes: usize,
    /// Where what is added to each token lies; nothing where no token is steered.
    pub(crate) steering: usize,
    lists: usize,
    /// For each row of logits, where its hidden state comes from.
    pub(crate) gather: usize,
    /// And which slot keeps it.
    pub(crate) keeps: usize,
    pub(crate) output_rows: usize,
    program_rows: usize,
    /// The first row of each chain of programs.
    pub(crate) chains: usize,
    /// Where the tail begins.
    pub(crate) tail: usize,
}

/// One of the step's counts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    Tokens,
    Copies,
    Workers { window_idx: usize, form: Form },
    Cuts { window_idx: usize, form: Form },
    LogitsRows { group_idx: usize },
    Outputs { group_idx: usize },
    Chains { group_idx: usize },
}

impl Layout {
    pub(crate) fn of(dims: Dims) -> Self {
        let mut end = N_COUNTS + 2 * N_FORMS * dims.n_windows + 3 * dims.n_groups;
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
            kv_cells: take(dims.n_tokens),
            holes: take(if dims.has_holes() { dims.n_tokens } else { 0 }),
            steering: take(if dims.steering == Steers::Some { dims.n_tokens } else { 0 }),
            lists: take(dims.n_windows * dims.lists.0.into_iter().map(list_words).sum::<usize>()),
            gather: take(dims.n_logits_rows),
            keeps: take(dims.n_logits_rows),
            output_rows: take(dims.n_outputs * OUTPUT_ROW_WORDS),
            program_rows: take(dims.n_programs * PROGRAM_ROW_WORDS),
            chains: take(dims.n_programs),
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

    /// The place of a count.
    pub(crate) fn word(&self, count: Count) -> usize {
        let of_list = |window_idx, form| N_COUNTS + 2 * (N_FORMS * window_idx + form as usize);
        let of_group = |group_idx| N_COUNTS + 2 * N_FORMS * self.dims.n_windows + 3 * group_idx;
        match count {
            Count::Tokens => 0,
            Count::Copies => 1,
            Count::Workers { window_idx, form } => of_list(window_idx, form),
            Count::Cuts { window_idx, form } => of_list(window_idx, form) + 1,
            Count::LogitsRows { group_idx } => of_group(group_idx),
            Count::Outputs { group_idx } => of_group(group_idx) + 1,
            Count::Chains { group_idx } => of_group(group_idx) + 2,
        }
    }

    /// A count on the device, with the most that it can be.
    pub(crate) fn count(&self, memory: Slice, count: Count, n_max: usize) -> RowCount {
        RowCount { n_max, n: Self::slice(memory, self.word(count), 1) }
    }

    /// Where the shares of a list and its cut tiles begin.
    pub(crate) fn list(&self, window_idx: usize, form: Form) -> [usize; 2] {
        let sizes = self.dims.lists.0;
        let of_window: usize = sizes.into_iter().map(list_words).sum();
        let before: usize = sizes[..form as usize].iter().copied().map(list_words).sum();
        let shares = self.lists + window_idx * of_window + before;
        [shares, shares + SHARE_WORDS * sizes[form as usize].n_shares]
    }

    /// The lists of a window on the device.
    pub(crate) fn attention(&self, memory: Slice, window_idx: usize) -> AttentionWork {
        let list = |form| {
            let ListSize { n_shares, n_workers, n_cuts } = self.dims.lists.0[form as usize];
            let [shares, cuts] = self.list(window_idx, form);
            (n_workers > 0).then(|| DeviceShares {
                shares: Self::slice(memory, shares, SHARE_WORDS * n_shares),
                workers: self.count(memory, Count::Workers { window_idx, form }, n_workers),
                cut_list: Self::slice(memory, cuts, CUT_WORDS * n_cuts),
                cuts: self.count(memory, Count::Cuts { window_idx, form }, n_cuts),
            })
        };
        AttentionWork { lists: Form::ALL.map(list) }
    }

    /// The output rows `start..start + n`.
    pub(crate) fn output_rows(&self, memory: Slice, start: usize, n: usize) -> Slice {
        Self::slice(memory, self.output_rows + start * OUTPUT_ROW_WORDS, n * OUTPUT_ROW_WORDS)
    }

    /// Where row `start` of those that programs draw for begins.
    pub(crate) fn program_row(&self, start: usize) -> usize {
        self.program_rows + start * PROGRAM_ROW_WORDS
    }

    /// The rows `start..start + n` of those that programs draw for.
    pub(crate) fn program_rows(&self, memory: Slice, start: usize, n: usize) -> Slice {
        Self::slice(memory, self.program_row(start), n * PROGRAM_ROW_WORDS)
    }
}

/// Words of a list; a multiple of four, as the lists' alignment.
fn list_words(size: ListSize) -> usize {
    SHARE_WORDS * size.n_shares + CUT_WORDS * size.n_cuts
}
