//! The draws of a step that programs make, as the kernel of logit programs reads them.
//!
//! Draws of which each takes on what the one before it left are a chain, which one cluster works out in order; so are those of
//! a tree, of which each leaves its state in a place of its own. So are draws that share planes of the history, of which there
//! are fewer sets than rows.

use smallvec::SmallVec;
use trellis_engine::batch::{Others, SlotId, Start};
use trellis_engine::sampling::Sampler;
use trellis_engine::sampling::program::{
    DrawState, N_HANDLES_MAX, N_MEMBERS_MAX, N_PARAMETERS_MAX, N_STATE_MAX,
};

use super::given::Places;
use super::words::to_words;
use crate::kept::KeptPlace;
use crate::ops::logits::NOWHERE;
use crate::ops::program::{KEPT_ROW, ProgramRow};
use crate::ops::program_plan::ProgramKind;

/// Words that a draw brings at most besides what is kept: parameters, places of masks and biases, rows of the others of a
/// mixture, the state.
pub(super) const N_DRAW_WORDS_MAX: usize =
    1 + N_PARAMETERS_MAX + 3 * N_HANDLES_MAX + N_MEMBERS_MAX + N_STATE_MAX;

/// The draws of programs in a step.
#[derive(Debug, Default)]
pub(crate) struct Programs {
    pub(crate) rows: Vec<ProgramRow>,
    /// The first row of each chain, over all groups; rows count from the first of their group.
    pub(crate) chains: Vec<u32>,
    /// Chains of the group being taken in.
    open: Vec<Chain>,
    /// Which kernels can run all programs of the group being taken in, if it has any.
    kind: Option<ProgramKind>,
    /// Those of them that have planes: their indices.
    with_planes: Vec<usize>,
    /// The one among them that takes the next row that wants planes, when there is no set left.
    next_with_planes: usize,
    /// Sets of planes that there are.
    n_sets: usize,
    /// The slot and the chain of the row taken in last.
    last: Option<(SlotId, usize)>,
    /// Where the last draw of each slot ended.
    ends: Vec<Option<Ended>>, // by slot
    /// Where the draws of this step end, by the rows of the step that they are of, in their order.
    row_ends: Vec<RowEnd>,
    /// Rows that start where one ended that left its state in the slot, and not in the tail.
    starts_in_slot: Vec<usize>,
    /// Rows that leave their state in the tail.
    ends_in_tail: Vec<usize>,
}

/// Where a draw of this step ends.
#[derive(Clone, Copy, Debug)]
struct RowEnd {
    row_idx: usize,
    /// Where its state lies, in numbers of the memory of steps, or in words of the tail.
    state: u32,
    is_in_tail: bool,
    n_drawn: u32,
}

/// Where the last draw of a slot by a program ended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ended {
    /// Its state is in the slot, on the device.
    OnDevice { n_drawn: u32 },
    /// The host made the draw, or took it in.
    OnHost(DrawState),
    /// The host makes it within this step.
    WithStep,
}

#[derive(Clone, Copy, Debug)]
struct Chain {
    last_row: usize,
    planes: Option<u32>,
}

/// Where a program draws.
#[derive(Clone, Copy, Debug)]
pub(super) struct DrawPlace<'a> {
    pub(super) slot: SlotId,
    /// Which row of the step it is of.
    pub(super) row_idx: usize,
    pub(super) start: Start,
    /// Tokens before the one that is drawn.
    pub(super) n_tokens: usize,
    /// Its row of logits in the group. Those of the others of its mixture are behind it, or were kept.
    pub(super) logits_row: usize,
    pub(super) others: Others<'a>,
    /// Tokens that were evicted, which the position counts too.
    pub(super) n_evicted: usize,
    /// First word of the page table.
    pub(super) table_start: usize,
    /// First number of the states of slots.
    pub(super) states_start: usize,
    /// Its row in the output rows of the group, and in those of programs of the step the first of the group.
    pub(super) output_row: usize,
    pub(super) group_start: usize,
}

impl Programs {
    /// For so many sets of planes.
    pub(super) fn begin_step(&mut self, n_sets: usize) {
        self.rows.clear();
        self.chains.clear();
        self.row_ends.clear();
        self.starts_in_slot.clear();
        self.ends_in_tail.clear();
        self.n_sets = n_sets;
        self.begin_group();
    }

    /// Rows of one group are in no chain with those of another.
    pub(super) fn begin_group(&mut self) {
        self.open.clear();
        self.kind = None;
        self.with_planes.clear();
        self.next_with_planes = 0;
        self.last = None;
    }

    /// Which kernels can run the group being taken in, whose rows begin there. One alone works out chains of several rows.
    pub(super) fn kind(&self, group_start: usize) -> ProgramKind {
        let is_each_alone = self.open.len() == self.rows.len() - group_start;
        self.kind.filter(|_| is_each_alone).unwrap_or(ProgramKind::Any)
    }

    /// Where the last draw of a slot ended, if the host knows.
    pub(super) fn left_on_host(&self, slot: SlotId) -> Option<DrawState> {
        match self.ended(slot) {
            Some(Ended::OnHost(state)) => Some(state),
            _ => None,
        }
    }

    /// Whether the device can start a draw there, of a row of the step.
    pub(super) fn can_start(&self, slot: SlotId, row_idx: usize, start: Start) -> bool {
        match start {
            Start::At(_) => true,
            Start::After { n_rows } => self.end_of(row_idx - n_rows).is_some(),
            Start::Before | Start::Drawn => !matches!(self.ended(slot), None | Some(Ended::WithStep)),
        }
    }

    /// Where the first draw of a row of this step ends, if the device makes it.
    fn end_of(&self, row_idx: usize) -> Option<RowEnd> {
        let idx = self.row_ends.partition_point(|end| end.row_idx < row_idx);
        self.row_ends.get(idx).copied().filter(|end| end.row_idx == row_idx)
    }

    fn ended(&self, slot: SlotId) -> Option<Ended> {
        self.ends.get(slot.0 as usize).copied().flatten()
    }

    fn note(&mut self, slot: SlotId, ended: Ended) {
        let idx = slot.0 as usize;
        if idx >= self.ends.len() {
            self.ends.resize(idx + 1, None);
        }
        self.ends[idx] = Some(ended);
    }

    /// The host makes this draw within the step. Returns where it starts, if that is known before.
    pub(super) fn leave_to_host(&mut self, slot: SlotId, start: Start) -> Option<DrawState> {
        let start = match start {
            Start::At(start) => Some(start),
            Start::Before | Start::Drawn => self.left_on_host(slot),
            Start::After { .. } => None,
        };
        self.note(slot, Ended::WithStep);
        self.last = None;
        start
    }

    /// The host knows where the last draw of a slot ended.
    pub(crate) fn note_left(&mut self, slot: SlotId, state: DrawState) {
        self.note(slot, Ended::OnHost(state));
    }

    /// Takes a draw in; its words go behind the tail. Returns the number of tokens that were drawn before it.
    pub(super) fn push(
        &mut self,
        sampler: &Sampler,
        at: DrawPlace<'_>,
        given: &Places,
        tail: &mut Vec<u32>,
    ) -> u32 {
        let put_on = sampler.program.as_ref().expect("it draws by a program");
        let DrawPlace { slot, n_tokens, n_evicted, logits_row, others, states_start, group_start, .. } = at;
        let members: SmallVec<[u32; N_MEMBERS_MAX]> = match others {
            Others::Rows(n) => (0..n).map(|idx| (logits_row + 1 + idx) as u32).collect(),
            Others::Kept(rows) => rows.iter().map(|row| KEPT_ROW | row.get::<KeptPlace>().idx).collect(),
        };
        let of_slot = (states_start + 8 * slot.0 as usize) as u32;
        let after = match at.start {
            Start::After { n_rows } => Some(self.end_of(at.row_idx - n_rows).expect("it can start")),
            _ => None,
        };
        let (n_drawn, state) = match (at.start, self.ended(slot)) {
            (Start::After { .. }, _) => (after.map_or(0, |end| end.n_drawn), None),
            (Start::At(start), _) | (_, Some(Ended::OnHost(start))) => (start.n_drawn, Some(start.numbers)),
            (_, Some(Ended::OnDevice { n_drawn })) => (n_drawn, None),
            (_, ended) => unreachable!("a draw that {ended:?} starts on the host"),
        };
        let mut bring = |words: &[u32]| {
            let start = tail.len() as u32;
            tail.extend_from_slice(words);
            start
        };
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let (row_idx, n_history) = (self.rows.len(), put_on.program.n_history(n_tokens));
        let (state_in, state_out) = match after {
            None => (state.map_or(NOWHERE, |numbers| bring(to_words(&numbers))), of_slot),
            Some(end) => {
                if !end.is_in_tail {
                    self.starts_in_slot.push(row_idx);
                }
                self.ends_in_tail.push(row_idx);
                // The slot's would be written over before another that starts there has read it.
                (end.state, bring(&[0; N_STATE_MAX]))
            }
        };
        let row = ProgramRow {
            program: given.plan,
            output_row: at.output_row as u32,
            next: NOWHERE,
            planes: 0,
            seed: halves(sampler.seed),
            position: halves((n_tokens + n_evicted) as u64),
            n_tokens: n_tokens as u32,
            n_drawn,
            table_start: at.table_start as u32,
            n_history: n_history as u32,
            // Places in words of the tail, here and below; `finish` makes them places in the memory of steps.
            biases_start: bring(to_words(&given.biases)),
            n_biases: given.biases.len() as u32,
            parameters_start: bring(to_words(&put_on.parameters)),
            n_parameters: put_on.parameters.len() as u32,
            masks_start: bring(&given.masks),
            n_masks: given.masks.len() as u32,
            members_start: bring(&members),
            n_members: members.len() as u32,
            state_in,
            state_out,
        };
        self.rows.push(row);
        self.kind = self.kind.max(Some(given.kind));
        let n_drawn_after = n_drawn.saturating_add(1);
        let is_in_tail = after.is_some();
        let end = RowEnd { row_idx: at.row_idx, state: state_out, is_in_tail, n_drawn: n_drawn_after };
        self.row_ends.push(end);
        // What follows, pairs of words, begins as evenly as this did.
        tail.resize(tail.len().next_multiple_of(2), 0);
        self.note(slot, Ended::OnDevice { n_drawn: n_drawn_after });
        let goes_on = matches!(at.start, Start::Before | Start::After { .. }) && put_on.program.carries_on();
        let before = self.last.filter(|&(of, _)| of == slot && goes_on);
        let chain_idx = match (before, given.n_planes) {
            (Some((_, chain_idx)), _) => self.append(chain_idx, row_idx, group_start),
            (None, 0) => self.open(row_idx, group_start, None),
            (None, _) if self.with_planes.len() < self.n_sets => {
                let set = self.with_planes.len();
                self.with_planes.push(self.open.len());
                self.open(row_idx, group_start, Some(set as u32))
            }
            (None, _) => {
                let chain_idx = self.with_planes[self.next_with_planes % self.with_planes.len()];
                self.next_with_planes += 1;
                self.append(chain_idx, row_idx, group_start)
            }
        };
        self.rows[row_idx].planes = self.open[chain_idx].planes.unwrap_or(0);
        self.last = Some((slot, chain_idx));
        n_drawn
    }

    fn open(&mut self, row_idx: usize, group_start: usize, planes: Option<u32>) -> usize {
        self.chains.push((row_idx - group_start) as u32);
        self.open.push(Chain { last_row: row_idx, planes });
        self.open.len() - 1
    }

    fn append(&mut self, chain_idx: usize, row_idx: usize, group_start: usize) -> usize {
        let chain = &mut self.open[chain_idx];
        self.rows[chain.last_row].next = (row_idx - group_start) as u32;
        chain.last_row = row_idx;
        chain_idx
    }

    /// Tells the rows where the tail begins, in words of the memory of steps; it is even.
    pub(super) fn finish(&mut self, tail_start: usize) {
        let tail_start = tail_start as u32;
        for &row_idx in &self.ends_in_tail {
            self.rows[row_idx].state_out += tail_start;
        }
        let mut in_slot = self.starts_in_slot.iter().peekable();
        for (row_idx, row) in self.rows.iter_mut().enumerate() {
            row.biases_start = (row.biases_start + tail_start) / 2;
            row.parameters_start += tail_start;
            row.masks_start += tail_start;
            row.members_start += tail_start;
            row.state_in = match row.state_in {
                NOWHERE => row.state_out,
                state if in_slot.next_if(|&&idx| idx == row_idx).is_some() => state,
                state => state + tail_start,
            };
        }
    }
}
