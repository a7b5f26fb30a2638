//! What is asked of a step, as the kernels over logits read it.
//!
//! Positions that are asked about get a row of logits each, in groups of as many as there is memory for; each request
//! gets an output row. A list that no kernel makes, or that is too long, the host reads out of a row that comes back whole.
//! What there is no room for is worked out on the host from the logits, and the step waits for the device.

mod draws;

use trellis_engine::KeptRow;
use trellis_engine::batch::{Others, OutputKind, OutputRequest, Start, Within};
use trellis_engine::sampling::Sampler;
use trellis_engine::sampling::program::DrawState;

use self::draws::both;
use super::given::Given;
use super::masses::Masses;
use super::programs::Programs;
use super::returned::Place;
use super::row::StepRow;
use super::slots::{EditList, Slots};
use super::steps::sit_out;
use super::taps::Taps;
use super::whole::{KeptRun, Reading, RowOf, RowWords, WholeRows};
use crate::kept::KeptPlace;
use crate::ops::logits::{NOWHERE, OutputRow, Stages, Wants};
use crate::ops::program_plan::ProgramKind;
use crate::ops::topn::N_TOP_MAX;

/// Scores that one step returns from the device.
pub(crate) const N_SCORES_MAX: usize = 1 << 16;
/// Entries of top lists that one step returns from the device: the longest list of 256 contexts, and what a beam search
/// over the most beams with eight stop tokens looks at.
pub(crate) const N_TOP_ENTRIES_MAX: usize = 260 * N_TOP_MAX;
/// Words of biases, masks, and tokens that go beside their pages in one step: 8 MiB, the masks of 500 contexts over 128K
/// tokens.
pub(super) const N_TAIL_WORDS_MAX: usize = 1 << 21;
/// Bytes of biases and masks among them.
pub(crate) const MASK_BYTES_MAX: usize = 4 * N_TAIL_WORDS_MAX / 4 * 3;

/// Positions whose logits are in memory together.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// First of its rows of logits among those of the step.
    pub(crate) logits_start: usize,
    pub(crate) n_logits_rows: usize,
    /// First of its output rows among those of the step.
    pub(crate) outputs_start: usize,
    pub(crate) n_outputs: usize,
    /// First of its rows that programs draw for among those of the step, and of their chains.
    pub(crate) programs_start: usize,
    pub(crate) n_programs: usize,
    pub(crate) chains_start: usize,
    pub(crate) n_chains: usize,
    /// Which kernels can run its programs.
    pub(crate) program_kind: ProgramKind,
    pub(crate) stages: Stages,
    /// Whether the host fetches something of it before the next group's logits take its place.
    pub(crate) has_host_work: bool,
    /// Rows that come back whole.
    pub(crate) wholes: Vec<WholeRows>,
    /// Rows that stay on the device.
    pub(crate) kept: Vec<KeptRun>,
}

impl Group {
    /// Whether hidden states after the final norm have to stay in memory.
    pub(crate) fn keeps_hidden(&self) -> bool {
        self.has_host_work || self.wholes.iter().any(|whole| whole.of == RowOf::Hidden)
    }
}

/// A draw that waits for its mask.
#[derive(Clone, Copy, Debug)]
pub(super) struct Late {
    pub(super) row_idx: usize,
    pub(super) request_idx: usize,
    pub(super) output_idx: usize,
    /// Where its output lies once it has drawn.
    pub(super) drawn: Place,
}

/// How a program draws.
#[derive(Clone, Copy, Debug)]
struct ByProgram<'a> {
    sampler: &'a Sampler,
    start: Start,
    within: Within<'a>,
    /// Of the group; those of the others of its mixture are behind it, or were kept.
    logits_row: usize,
    others: Others<'a>,
}

/// All requests of a step.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    /// For each row of logits its token, or `-1 - s` where slot `s` has kept the hidden state.
    pub(crate) gather: Vec<i32>,
    /// And the slot that keeps its hidden state, or -1.
    pub(crate) keeps: Vec<i32>,
    pub(crate) groups: Vec<Group>,
    pub(crate) rows: Vec<OutputRow>,
    /// Where each request's output will lie, in the order of the requests.
    pub(crate) places: Vec<Place>,
    pub(crate) score_tokens: Vec<i32>,
    pub(crate) n_top_entries: usize,
    /// Words of rows that come back whole.
    n_whole_words: usize,
    /// What the host reads out of them, by request.
    pub(super) readings: Vec<(usize, Reading)>,
    /// Draws among them that wait for their masks.
    pub(super) late: Vec<Late>,
    /// Draws among them that programs make.
    pub(crate) programs: Programs,
    /// Where those start that the host makes, by request, as far as it is known before.
    pub(super) host_starts: Vec<(usize, DrawState)>,
    /// Rows to come that are mixed into the draw before them, which the host makes.
    n_mixed_by_host: usize,
    /// Hidden states between layers.
    pub(crate) taps: Taps,
    /// Attention within them.
    pub(crate) masses: Masses,
    /// Rows taken in.
    n_rows: usize,
    /// Biases and masks.
    tail: Vec<u32>,
    /// Words of tokens that go beside their pages.
    n_token_words: usize,
    /// Requests of one row, by position; kept for its memory.
    order: Vec<usize>,
}

/// How many of what fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Rows of logits, and output rows, of a group.
    pub(crate) n_group_rows: usize,
    /// Output rows of a step.
    pub(crate) n_outputs: usize,
    /// Slots that keep hidden states.
    pub(crate) n_states: usize,
    /// Layers of the model.
    pub(crate) n_layers: usize,
    /// Words of rows that come back whole with a step.
    pub(crate) n_whole_words: usize,
    /// Of one such row.
    pub(crate) row_words: RowWords,
    /// Sets of planes for programs; none before their kernel is there.
    pub(crate) n_plane_sets: usize,
    /// First number of the programs' states by slot, in the memory of steps.
    pub(crate) program_states: usize,
}

/// What the row being taken in has on the device: where its page table is, and what brings its history and what its program is
/// given there.
pub(super) struct TablePlace<'a> {
    /// Its first word; none where the row's pages are not on the device.
    pub(super) table: Option<usize>,
    pub(super) slots: &'a mut Slots,
    pub(super) given: &'a mut Given,
    pub(super) edits: &'a mut EditList,
}

impl Outputs {
    pub(super) fn clear(&mut self, room: Room) {
        self.programs.begin_step(room.n_plane_sets);
        self.host_starts.clear();
        self.gather.clear();
        self.keeps.clear();
        self.groups.clear();
        self.rows.clear();
        self.places.clear();
        self.score_tokens.clear();
        self.n_top_entries = 0;
        self.n_whole_words = 0;
        self.readings.clear();
        self.late.clear();
        self.n_mixed_by_host = 0;
        self.taps.clear();
        self.masses.clear();
        self.n_rows = 0;
        self.tail.clear();
        self.n_token_words = 0;
    }

    /// Adds what the first of these rows asks for; its first token is the step's `first_token_idx`-th. The others are the nodes
    /// of the tree of guesses behind it.
    pub(super) fn push(
        &mut self,
        rows: &[StepRow<'_>],
        first_token_idx: usize,
        room: Room,
        mut place: TablePlace<'_>,
    ) {
        let row = &rows[0];
        // Requests of one position share its logits. They come in any order; mostly they are sorted already.
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        let is_of_layers = |request: &OutputRequest<'_>| match request.kind {
            OutputKind::Hidden { n_layers } => n_layers < room.n_layers,
            OutputKind::Attention { .. } => true,
            _ => false,
        };
        order.extend((0..row.requests.len()).filter(|&idx| !is_of_layers(&row.requests[idx])));
        let position_of = |&request_idx: &usize| row.requests[request_idx].position;
        // The host makes all draws of a row's program or none, and so of a tree's: it would not know where the device's ended.
        let n_words = Self::n_tail_words(rows, 0, place.slots);
        let n_requests: usize = rows.iter().map(|row| row.requests.len()).sum();
        let fits_device = self.tail.len() + self.n_token_words + n_words <= N_TAIL_WORDS_MAX
            && self.rows.len() + n_requests <= room.n_outputs
            && (rows.len() == 1 || Self::n_copied_pages(rows) <= place.slots.n_copied_pages_left());
        order.sort_unstable_by_key(|request_idx| (position_of(request_idx), *request_idx));
        let first_place = self.places.len();
        self.places.resize(first_place + row.requests.len(), Place::Unset);
        let Self { taps, places, .. } = self;
        taps.push(row.requests, room.n_layers, (row.start, first_token_idx), |request_idx, state| {
            places[first_place + request_idx] = Place::Tapped { state };
        });
        for (request_idx, request) in row.requests.iter().enumerate() {
            if let OutputKind::Attention { layers } = request.kind {
                self.places[first_place + request_idx] =
                    self.masses.push(row, request.position, layers, first_token_idx, place.table);
                let n_entries = self.n_top_entries + self.masses.n_entries();
                assert!(n_entries <= N_TOP_ENTRIES_MAX, "more attention than a step brings back");
            }
        }
        for requests in order.chunk_by(|a, b| position_of(a) == position_of(b)) {
            let position = position_of(&requests[0]);
            let is_of_head = row.is_of_head() && position + 1 == row.end();
            assert!(
                is_of_head || (row.start..row.end()).contains(&position),
                "output at {position} of a row"
            );
            let n_others: usize = requests.iter().map(|&it| row.requests[it].kind.n_others()).sum();
            let group_idx = self.group_for(requests.len().min(room.n_group_rows), n_others, room);
            let logits_row = self.groups[group_idx].n_logits_rows;
            self.groups[group_idx].n_logits_rows += 1;
            let slot = row.slot.0 as i32;
            let is_kept =
                position + 1 == row.end() && !is_of_head && !row.is_node() && (slot as usize) < room.n_states;
            self.keeps.push(if is_kept { slot } else { -1 });
            self.gather.push(match is_of_head {
                true => -1 - slot,
                false => (first_token_idx + position - row.start) as i32,
            });
            // A row of logits becomes one of log-probabilities once.
            let mut whole = None;
            // The output row of a draw here that waits for nothing.
            let mut drawn = None;
            for &request_idx in requests {
                let request = &row.requests[request_idx];
                if let (&OutputKind::Top { n }, Some(output_idx)) = (&request.kind, drawn)
                    && let Some(place) = self.top_beside_draw(group_idx, output_idx, n)
                {
                    self.places[first_place + request_idx] = place;
                    continue;
                }
                let output = match &request.kind {
                    &OutputKind::Program { sampler, start, within, others } => {
                        let by = ByProgram { sampler, start, within, logits_row, others };
                        let output = match fits_device {
                            true => self.programmed(row, request.position, by, room, &mut place),
                            false => None,
                        };
                        if output.is_none() && !request.kind.is_late() {
                            self.n_mixed_by_host = others.n_rows();
                            let start = self.programs.leave_to_host(row.slot, start);
                            self.host_starts.extend(start.map(|start| (first_place + request_idx, start)));
                        }
                        output
                    }
                    _ => self.output_row(row, request, room, &mut place),
                };
                let output = output.map(|output| OutputRow { logits_row: logits_row as u32, ..output });
                let place = match (&request.kind, output) {
                    (OutputKind::Embedding | OutputKind::Hidden { .. }, _) => Place::Hidden {
                        group_idx,
                        logits_row,
                        start: self.bring(group_idx, RowOf::Hidden, room),
                    },
                    (OutputKind::Keep(row), output) => self.place_kept(group_idx, logits_row, row, output),
                    (OutputKind::Mixed, _) => self.place_mixed(group_idx, logits_row),
                    (kind, Some(output)) if kind.is_late() => {
                        self.place_late(group_idx, output, first_place + request_idx)
                    }
                    (kind, None) if kind.is_late() => Place::SatOut,
                    (_, Some(output)) if output.wants == Wants::FULL => {
                        let reading = Reading::of(&request.kind, None);
                        self.readings.extend(reading.map(|it| (first_place + request_idx, it)));
                        *whole.get_or_insert_with(|| self.place_whole(group_idx, output, room))
                    }
                    (_, Some(output)) => self.place(group_idx, output),
                    (OutputKind::Ranked { .. } | OutputKind::Logits, None) => {
                        match self.bring(group_idx, RowOf::Logits, room) {
                            Some(start) => {
                                let reading =
                                    Reading::of(&request.kind, row.known_before(request.position + 1));
                                self.readings.extend(reading.map(|it| (first_place + request_idx, it)));
                                Place::Raw { start }
                            }
                            None => Place::Host { group_idx, logits_row },
                        }
                    }
                    (_, None) => Place::Host { group_idx, logits_row },
                };
                self.groups[group_idx].has_host_work |= place.is_fetched();
                if let Place::Drawn { output_idx } | Place::Programmed { output_idx, .. } = place {
                    drawn = Some(output_idx);
                }
                self.places[first_place + request_idx] = place;
            }
        }
        self.order = order;
        self.n_rows += 1;
    }

    /// The group that takes a row of logits, so many behind it that are mixed into its draw, and so many output rows.
    fn group_for(&mut self, n_outputs: usize, n_others: usize, room: Room) -> usize {
        let is_room = self.groups.last().is_some_and(|group| {
            group.n_logits_rows + n_others < room.n_group_rows
                // Those that are mixed find no group without room for an output row, which they do not take.
                && group.n_outputs + n_outputs + n_others.min(1) <= room.n_group_rows
        });
        if !is_room {
            self.programs.begin_group();
            self.groups.push(Group {
                logits_start: self.gather.len(),
                n_logits_rows: 0,
                outputs_start: self.rows.len(),
                n_outputs: 0,
                programs_start: self.programs.rows.len(),
                n_programs: 0,
                chains_start: self.programs.chains.len(),
                n_chains: 0,
                program_kind: ProgramKind::Any,
                stages: Stages::default(),
                has_host_work: false,
                wholes: Vec::new(),
                kept: Vec::new(),
            });
        }
        self.groups.len() - 1
    }

    /// Has the row of logits that the group took last come back whole; returns its first word among those that do, if there
    /// is room.
    fn bring(&mut self, group_idx: usize, of: RowOf, room: Room) -> Option<usize> {
        let (start, n_words) = (self.n_whole_words, room.row_words.of(of));
        if start + n_words > room.n_whole_words {
            return None;
        }
        self.n_whole_words += n_words;
        let group = &mut self.groups[group_idx];
        let row = group.n_logits_rows - 1;
        match group.wholes.last_mut() {
            Some(last)
                if last.of == of
                    && last.row + last.n_rows == row
                    && last.start + last.n_rows * n_words == start =>
            {
                last.n_rows += 1;
            }
            _ => group.wholes.push(WholeRows { of, row, n_rows: 1, start }),
        }
        Some(start)
    }

    fn place_whole(&mut self, group_idx: usize, output: OutputRow, room: Room) -> Place {
        let (output_idx, logits_row) = (self.rows.len(), output.logits_row as usize);
        self.place(group_idx, output);
        Place::Full { output_idx, group_idx, logits_row, start: self.bring(group_idx, RowOf::Logits, room) }
    }

    fn place(&mut self, group_idx: usize, output: OutputRow) -> Place {
        let group = &mut self.groups[group_idx];
        group.stages = group.stages.and(Stages::of(&[output]));
        group.n_outputs += 1;
        let output_idx = self.rows.len();
        self.rows.push(output);
        match output.wants {
            Wants::PROGRAM => {
                group.n_programs = self.programs.rows.len() - group.programs_start;
                group.n_chains = self.programs.chains.len() - group.chains_start;
                group.program_kind = self.programs.kind(group.programs_start);
                let program_idx = self.programs.rows.len() - 1;
                Place::Programmed {
                    output_idx,
                    program_idx,
                    n_drawn: self.programs.rows[program_idx].n_drawn,
                }
            }
            Wants::TOP => Place::Top { output_idx },
            Wants::RANKED => Place::Ranked { output_idx },
            Wants::SCORES => Place::Scores { output_idx },
            _ => Place::Drawn { output_idx },
        }
    }

    /// Has a row of logits stay on the device; the output row says whether it is one of numbers.
    fn place_kept(
        &mut self,
        group_idx: usize,
        logits_row: usize,
        row: &KeptRow,
        output: Option<OutputRow>,
    ) -> Place {
        let idx = row.get::<KeptPlace>().idx;
        let kept = &mut self.groups[group_idx].kept;
        match kept.last_mut() {
            Some(last)
                if last.row + last.n_rows == logits_row
                    && last.idx as usize + last.n_rows == idx as usize =>
            {
                last.n_rows += 1;
            }
            _ => kept.push(KeptRun { row: logits_row, idx, n_rows: 1 }),
        }
        match output {
            Some(output) => {
                let output_idx = self.rows.len();
                self.place(group_idx, output);
                Place::Kept { output_idx }
            }
            None => Place::Host { group_idx, logits_row },
        }
    }

    /// Gives a place to a row of logits that is mixed into the draw of one before it.
    fn place_mixed(&mut self, group_idx: usize, logits_row: usize) -> Place {
        match self.n_mixed_by_host.checked_sub(1) {
            None => Place::Mixed,
            Some(n_left) => {
                self.n_mixed_by_host = n_left;
                Place::MixedByHost { group_idx, logits_row }
            }
        }
    }

    /// Has the output row of a draw return the most probable tokens too, so that its logits are looked through once; `None`
    /// where the list is too long, or there is no room.
    fn top_beside_draw(&mut self, group_idx: usize, output_idx: usize, n: usize) -> Option<Place> {
        if !self.has_room_for_list(n) {
            return None;
        }
        let drawn = self.rows[output_idx];
        let wants = drawn.wants.and(Wants::TOP);
        self.rows[output_idx] = self.list(n, OutputRow { wants, ..drawn });
        self.groups[group_idx].stages.top = true;
        Some(Place::Top { output_idx })
    }

    /// Gives a place to a draw of the row being taken in that waits for its mask.
    fn place_late(&mut self, group_idx: usize, output: OutputRow, request_idx: usize) -> Place {
        let output_idx = self.rows.len();
        let drawn = self.place(group_idx, output);
        self.late.push(Late { row_idx: self.n_rows, request_idx, output_idx, drawn });
        Place::Late { output_idx }
    }

    /// Has the draws that wait for their masks sit out.
    pub(super) fn sit_out(&mut self) {
        for Late { request_idx, output_idx, .. } in self.late.drain(..) {
            sit_out(&mut self.rows[output_idx]);
            self.places[request_idx] = Place::SatOut;
        }
    }

    /// The request as an output row; `None` when the host has to work it out.
    fn output_row(
        &mut self,
        row: &StepRow<'_>,
        request: &OutputRequest<'_>,
        room: Room,
        place: &mut TablePlace<'_>,
    ) -> Option<OutputRow> {
        if !self.has_room(room) {
            return None;
        }
        match &request.kind {
            OutputKind::Sample(sampler) => {
                self.draw(row, request.position, sampler, sampler.mask.as_deref(), place)
            }
            OutputKind::Masked { sampler, mask } => {
                self.draw(row, request.position, sampler, mask.map(|mask| &**mask), place)
            }
            OutputKind::Top { n } if self.has_room_for_list(*n) => {
                Some(self.list(*n, OutputRow { wants: Wants::TOP, ..OutputRow::default() }))
            }
            OutputKind::Ranked { sampler, within, n }
                if sampler.program.is_none() && self.has_room_for_list(*n) =>
            {
                let mask = both(sampler.mask.as_deref(), within.map(|mask| &**mask));
                let drawn = self.draw(row, request.position, sampler, mask.as_deref(), place)?;
                Some(self.list(*n, OutputRow { wants: Wants::RANKED, drawn_slot: NOWHERE, ..drawn }))
            }
            OutputKind::Scores(tokens) if self.score_tokens.len() + tokens.len() <= N_SCORES_MAX => {
                let score_start = self.score_tokens.len() as u32;
                self.score_tokens.extend(tokens.iter().map(|&token| token as i32));
                let n_scores = tokens.len() as u32;
                Some(OutputRow { wants: Wants::SCORES, score_start, n_scores, ..OutputRow::default() })
            }
            // No scores: whether all are numbers.
            OutputKind::Keep(_) => Some(OutputRow { wants: Wants::SCORES, ..OutputRow::default() }),
            OutputKind::Top { .. } | OutputKind::Scores(_) | OutputKind::Full => {
                Some(OutputRow { wants: Wants::FULL, ..OutputRow::default() })
            }
            _ => None,
        }
    }

    /// Whether a list of so many tokens is one that a kernel makes, and there is room for it.
    fn has_room_for_list(&self, n: usize) -> bool {
        n <= N_TOP_MAX && self.n_top_entries + self.masses.n_entries() + n <= N_TOP_ENTRIES_MAX
    }

    /// Gives an output row a list of so many tokens.
    fn list(&mut self, n: usize, row: OutputRow) -> OutputRow {
        let top_start = self.n_top_entries as u32;
        self.n_top_entries += n;
        OutputRow { top_start, n_top: n as u32, ..row }
    }

    /// Whether there is an output row left.
    fn has_room(&self, room: Room) -> bool {
        let n_outputs = self.groups.last().map_or(0, |group| group.n_outputs);
        self.rows.len() < room.n_outputs && n_outputs < room.n_group_rows
    }

    /// The tail, after the places in it and in what comes back are told to the rows: the tail begins at word
    /// `tail_start` of the step's memory, which is even.
    pub(super) fn finish(&mut self, tail_start: usize) -> &[u32] {
        self.programs.finish(tail_start);
        let tail_start = tail_start as u32;
        let top_start = self.top_start() as u32;
        for row in &mut self.rows {
            row.bias_start = (row.bias_start + tail_start) / 2;
            if row.mask_start != NOWHERE {
                row.mask_start = (row.mask_start + tail_start) / 2;
            }
            row.top_start += top_start;
        }
        &self.tail
    }

    /// The first entry of the top lists, which lie behind the scores, in entries.
    fn top_start(&self) -> usize {
        self.score_tokens.len().div_ceil(2)
    }

    /// Words that come back behind the output rows.
    pub(super) fn n_extra_words(&self) -> usize {
        self.n_list_words() + self.masses.n_words()
    }

    /// Those of scores and lists, before those of attention.
    pub(super) fn n_list_words(&self) -> usize {
        match self.n_top_entries {
            0 => self.score_tokens.len(),
            n => 2 * (self.top_start() + n),
        }
    }
}
