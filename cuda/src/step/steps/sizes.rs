//! How much memory steps take, and what lies where in it.

use trellis_engine::N_STRETCHES_MAX;
use trellis_engine::model::ModelConfig;
use trellis_engine::sampling::program::N_STATE_MAX;

use super::late::N_LATE_MASK_WORDS_MAX;
use crate::blas::bucket;
use crate::ops::attention::{Attention, PAGE_LEN};
use crate::ops::attention_plan::{PlanSize, distinct};
use crate::ops::logits::OutputRow;
use crate::ops::program::planes_bytes;
use crate::step::given::{n_brought_words, n_kept_words};
use crate::step::{
    Dims, N_COPIED_PAGES, N_SCORES_MAX, N_SLOTS, N_TOP_ENTRIES_MAX, ReturnedStarts, Slots, Steers, StepLists,
};

/// Bytes of rows of the history for programs.
const PLANES_BYTES_MAX: usize = 64 << 20;

/// Sizes of the steps of one model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepLimits {
    pub(crate) n_tokens_max: usize,
    pub(crate) n_rows_max: usize,
    pub(crate) n_positions_max: usize,
    /// Rows of logits in memory at once.
    pub(crate) n_logits_rows: usize,
    /// Pages that have addresses.
    pub(crate) n_pages: usize,
    /// Slots that keep hidden states.
    pub(crate) n_states: usize,
}

/// What lies where in the memory of steps, in words: the tokens of the slots and what one copy brings, as [`Layout`] says;
/// behind it what late masks bring, page tables, and what programs leave and are given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    pub(super) late: usize,
    pub(super) tables: usize,
    /// Eight numbers for each slot.
    pub(super) program_states: usize,
    pub(super) given: usize,
    /// The table of copied histories.
    pub(super) copied: usize,
    pub(super) end: usize,
}

impl Regions {
    pub(super) fn of(attention: &Attention, config: &ModelConfig, limits: StepLimits) -> Self {
        let n_table_words = Slots::n_words(limits.n_rows_max, n_entries_max(limits));
        let late = N_SLOTS + n_input_words(attention, config, limits);
        let tables = late + n_late_words(limits);
        let program_states = (tables + n_table_words).next_multiple_of(4);
        let given = program_states + N_STATE_MAX * N_SLOTS;
        let copied = (given + n_kept_words(config.vocab_size)).next_multiple_of(4);
        Self { late, tables, program_states, given, copied, end: copied + N_COPIED_PAGES }
    }
}

/// Output rows that one step has at most; what is asked beyond them the host works out.
pub(super) fn n_outputs_max(limits: StepLimits) -> usize {
    limits.n_tokens_max + limits.n_rows_max
}

pub(super) fn n_input_words(attention: &Attention, config: &ModelConfig, limits: StepLimits) -> usize {
    let n_tokens = limits.n_tokens_max;
    let dims = Dims {
        n_tokens,
        n_windows: distinct(&config.windows).len(),
        lists: PlanSize::most(n_tokens, &attention.cuttings()),
        // A row that asks the head alone has logits and no token.
        n_logits_rows: n_outputs_max(limits),
        n_outputs: n_outputs_max(limits),
        n_programs: n_outputs_max(limits),
        n_groups: n_outputs_max(limits),
        steering: Steers::Some,
    };
    let n_entries = limits.n_rows_max * n_entries_max(limits);
    // What follows them begins as aligned as they do.
    let n_given = n_brought_words(config.vocab_size);
    StepLists::n_words_max(dims, limits.n_rows_max, n_entries, n_given).next_multiple_of(4)
}

/// Entries of the longest page table. Tokens that were evicted and whose positions were kept count as positions, so that a
/// page with any of them has room in their number; and where positions closed up, which is before each stretch but the
/// first at most, two pages are there in part.
pub(super) fn n_entries_max(limits: StepLimits) -> usize {
    limits.n_positions_max.div_ceil(PAGE_LEN) + 2 * N_STRETCHES_MAX
}

pub(super) fn page_tokens_bytes(limits: StepLimits) -> usize {
    (limits.n_pages + N_COPIED_PAGES) * PAGE_LEN * 4
}

pub(super) fn states_bytes(config: &ModelConfig, limits: StepLimits) -> usize {
    limits.n_states * config.hidden_size * 4
}

/// Words of output rows that late masks amend, and of the masks.
pub(super) fn n_late_words(limits: StepLimits) -> usize {
    (limits.n_logits_rows * (size_of::<OutputRow>() / 4) + N_LATE_MASK_WORDS_MAX).next_multiple_of(4)
}

/// Sets of planes: more than programs run at once on a device, where rows of the vocabulary are not long.
pub(super) fn n_plane_sets(config: &ModelConfig, limits: StepLimits) -> usize {
    (PLANES_BYTES_MAX / planes_bytes(1, config.vocab_size)).clamp(1, limits.n_logits_rows.max(1))
}

/// Token counts of captured steps with rows of several tokens: from 64 on at most an eighth more than there are, since
/// every one of them is computed.
pub(super) fn token_bucket(n_tokens: usize) -> usize {
    match n_tokens {
        0..=16 => bucket(n_tokens),
        _ => n_tokens.next_multiple_of((n_tokens.next_power_of_two() / 16).max(8)),
    }
}

pub(super) fn n_output_words(limits: StepLimits) -> usize {
    let n_outputs = n_outputs_max(limits);
    ReturnedStarts::of(n_outputs, n_outputs).extra + N_SCORES_MAX + 2 * N_TOP_ENTRIES_MAX + 4
}
