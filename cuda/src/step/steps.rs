//! Puts steps into the stream: one copy to the device, the launches, one copy back.

mod beside;
mod fetched;
mod graphs;
mod host_buffers;
mod late;
mod launches;
mod program_memory;
mod sizes;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result;
use trellis_engine::backend::Collected;
use trellis_engine::batch::{Output, OutputFault, OutputKind, PageCopy, PageId, SlotId};
use trellis_engine::model::ModelConfig;
use trellis_engine::sampling::Scratch;
use trellis_engine::sampling::program::DrawState;
use trellis_engine::{KeptRow, N_TREE_NODES_MAX};

use self::beside::Beside;
use self::graphs::GraphKey;
use self::host_buffers::HostBuffers;
pub(crate) use self::late::LATE_MASK_BYTES_MAX;
use self::late::WaitingStep;
pub(super) use self::late::sit_out;
use self::program_memory::ProgramMemory;
pub(crate) use self::sizes::StepLimits;
use self::sizes::{
    Regions, n_entries_max, n_output_words, n_outputs_max, page_tokens_bytes, states_bytes, token_bucket,
};
use super::captured::{Captured, CapturedLimits};
use super::given::{Given, Keeps};
use super::histories::{self, N_COPIED_PAGES};
use super::outputs::{N_TAIL_WORDS_MAX, Outputs};
use super::whole::{Reading, RowWords, hidden_state};
use super::words::from_words;
use super::{
    Count, Dims, Layout, N_SLOTS, Place, Returned, ReturnedStarts, Room, Slots, Steers, StepLists, StepRow,
    whole_bytes,
};
use crate::blas::bucket;
use crate::driver::{Graph, check};
use crate::kept::KeptRows;
use crate::memory::{Driver, Pool, Reserved};
use crate::model::{ActivationSizes, Activations, Llama, LogitsOf, LogitsRows};
use crate::ops::attention::Attention;
use crate::ops::common::Dtype;
use crate::ops::edits::EDIT_WORDS;
use crate::ops::logits::OutputRow;
use crate::{Buffer, Card, CudaError, Event, Slice, Stream, Timing};

/// Steps whose copies to and from the host have memory of their own: those that can be under way.
pub(crate) const N_UNDER_WAY: usize = 2;

/// Hidden states between layers that one step brings back at least: eight of each place of a verification.
const N_TAPS_MIN: usize = 8 * (1 + N_TREE_NODES_MAX);

/// Captured steps that are kept: there are a few for each bucket of rows, and half of the memory that a model leaves free
/// beside its pages may be theirs.
const CAPTURED_LIMITS: CapturedLimits = CapturedLimits { n_max: 256, n_bytes_max: 256 << 20 };

/// The memory of a model's steps, and the steps captured so far.
#[derive(Debug)]
pub(crate) struct Steps {
    limits: StepLimits,
    /// Dropped before the memory that they point to.
    captured: Captured<GraphKey, Graph>,
    /// Whether a step could not be captured: that is said once.
    has_warned: bool,
    memory: Buffer, // words; see `Regions`
    regions: Regions,
    /// Which page tables the memory holds, and which pages have their tokens beside them.
    slots: Slots,
    /// What of programs the memory holds.
    given: Given,
    /// Whether all that the step's programs are given has a place.
    all_given: bool,
    has_program_kernel: bool,
    program_memory: ProgramMemory,
    /// The tokens of all pages.
    page_tokens: Buffer, // i32 [n_pages, PAGE_LEN]
    beside: Beside,
    /// The last hidden state of each slot that was asked about.
    states: Buffer, // f32 [n_states, hidden_size]
    /// Rows of logits that models leave for each other.
    kept_rows: Arc<KeptRows>,
    returned: Buffer, // output rows, what programs gave, scores, top lists
    arrivals: Buffer,
    activations: Activations,
    _arena: Arc<Reserved>,
    ring: Vec<HostBuffers>,
    next_idx: usize,
    lists: StepLists,
    row_words: RowWords,
    hidden_size: usize,
    dtype: Dtype,
    card: Card,
    /// Time that the device has spent in steps.
    busy: Duration,
    #[cfg(test)]
    n_by_host: usize,
    #[cfg(test)]
    leaves_programs: bool,
}

/// A step in the stream.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    buffers_idx: usize,
    starts: ReturnedStarts,
    /// Where the numbers of attention begin.
    masses: usize,
    /// Where the output for each request lies.
    places: Vec<Place>,
    rows: Vec<OutputRow>,
    /// What the host reads out of rows that come back whole, by request.
    readings: Vec<(usize, Reading)>,
    /// Outputs that the host worked out, by request.
    by_host: HashMap<usize, Output>,
    /// What is left to launch, for a step that waits for masks.
    held: Option<Box<WaitingStep>>,
    /// Whether its layers and its draws were launched apart.
    was_held: bool,
}

impl Steps {
    /// Bytes of device memory besides the activations, for a model whose layers have these windows: each list in blocks
    /// of its own.
    pub(crate) fn n_bytes(attention: &Attention, config: &ModelConfig, limits: StepLimits) -> usize {
        let memory = 4 * Regions::of(attention, config, limits).end;
        let kept = [page_tokens_bytes(limits), states_bytes(config, limits)];
        let [planes, meetings] = ProgramMemory::n_bytes(config, limits);
        [memory, 4 * n_output_words(limits), attention.arrivals_bytes(), kept[0], kept[1], planes, meetings]
            .map(Pool::<Driver>::block_bytes)
            .iter()
            .sum()
    }

    /// What the activations of these steps are laid out for.
    pub(crate) fn size(attention: &Attention, limits: StepLimits) -> ActivationSizes {
        ActivationSizes {
            n_tokens: limits.n_tokens_max,
            n_logits_rows: limits.n_logits_rows,
            partial_bytes: attention.partial_bytes(),
        }
    }

    /// Takes the memory, and fills it in a stream of the caller's.
    ///
    /// # Errors
    /// There is not enough.
    pub(crate) fn new(
        card: &Card,
        stream: &Stream,
        llama: &Llama,
        limits: StepLimits,
    ) -> Result<Self, CudaError> {
        let gpu = card.gpu();
        let attention = &llama.kernels().attention;
        let size = Self::size(attention, limits);
        let config = &llama.config;
        let regions = Regions::of(attention, config, limits);
        let n_bytes = Activations::n_bytes(&llama.config, llama.dtype, size);
        let arena = card.step_memory(n_bytes)?;
        let what = "the lists of a step";
        let memory = gpu.allocate(what, 4 * regions.end)?;
        let page_tokens = gpu.allocate("tokens of pages", page_tokens_bytes(limits))?;
        page_tokens.slice().fill(stream, 0)?;
        let n_table_words = regions.program_states - regions.tables;
        let slots =
            Slots::new(regions.tables, n_table_words, n_entries_max(limits), limits.n_pages, regions.copied);
        let program_memory = ProgramMemory::new(gpu, stream, config, limits)?;
        let arrivals = gpu.allocate(what, attention.arrivals_bytes())?;
        arrivals.slice().fill(stream, 0)?;
        memory.slice().fill(stream, 0)?;
        let table = histories::table(limits.n_pages);
        memory.slice().part(4 * regions.copied, 4 * table.len()).upload(stream, &table)?;
        // The stream of the steps does not wait for this one.
        stream.synchronize()?;
        let (vocab_size, hidden_size, dtype) =
            (llama.config.vocab_size, llama.config.hidden_size, llama.dtype);
        let n_whole_words = whole_bytes(vocab_size) / 4;
        let host = |_| {
            Ok(HostBuffers {
                input: gpu.pinned(regions.late - N_SLOTS)?,
                output: gpu.pinned(n_output_words(limits))?,
                late: gpu.pinned(regions.tables - regions.late)?,
                whole: gpu.pinned(n_whole_words)?,
                states: gpu.pinned(n_whole_words.max(N_TAPS_MIN * hidden_size))?,
                begun: Event::new(gpu, Timing::On)?,
                layered: Event::new(gpu, Timing::On)?,
                drawing: Event::new(gpu, Timing::On)?,
                computed: Event::new(gpu, Timing::On)?,
                done: Event::new(gpu, Timing::Off)?,
            })
        };
        Ok(Self {
            limits,
            memory,
            given: Given::new(regions.given..regions.copied, config.vocab_size),
            all_given: true,
            has_program_kernel: false,
            regions,
            slots,
            program_memory,
            page_tokens,
            beside: Beside::new(gpu)?,
            states: gpu.allocate("hidden states of contexts", states_bytes(&llama.config, limits))?,
            kept_rows: card.kept_rows(vocab_size)?,
            returned: gpu.allocate(what, 4 * n_output_words(limits))?,
            arrivals,
            activations: Activations::place(arena.slice(), &llama.config, llama.dtype, size),
            _arena: arena,
            ring: (0..N_UNDER_WAY).map(host).collect::<Result<_, CudaError>>()?,
            next_idx: 0,
            lists: StepLists::new(&llama.config.windows),
            captured: Captured::new(CAPTURED_LIMITS),
            has_warned: false,
            row_words: RowWords::new(vocab_size, hidden_size, dtype),
            hidden_size,
            dtype,
            card: card.clone(),
            busy: Duration::ZERO,
            #[cfg(test)]
            n_by_host: 0,
            #[cfg(test)]
            leaves_programs: false,
        })
    }

    /// Puts a step into the stream. The host waits only for what it has to work out itself.
    ///
    /// # Errors
    /// The driver refused something.
    pub(crate) fn launch(
        &mut self,
        llama: &Llama,
        kv: Slice,
        rows: &[StepRow<'_>],
        copies: &[PageCopy],
    ) -> Result<InFlight, CudaError> {
        self.fill(llama, rows, copies);
        let holds = self.holds_late_draws();
        let exact = self.lists.dims();
        let is_captured = self.lists.can_be_captured();
        let dims = if is_captured { self.bucketed(llama, exact) } else { exact };
        // Nothing is loaded while a step is captured.
        if dims.has_holes() {
            llama.kernels().attention.load_holed()?;
        }
        if dims.steering == Steers::Some {
            llama.kernels().steer.load()?;
        }
        let groups = &self.lists.outputs.groups;
        groups.iter().try_for_each(|group| llama.kernels().logits.load(group.stages))?;
        let layout = Layout::of(dims);
        let buffers_idx = self.next_idx;

        let card = self.card.clone();
        let stream = card.stream();
        assert!(!card.is_held(), "a step behind one that waits for masks would write over its logits");
        card.note_step();
        let host = &mut self.ring[buffers_idx];
        host.done.synchronize()?;
        let written = self.lists.write(&layout, &mut host.input);
        let memory = self.memory.slice();
        Layout::slice(memory, 0, written.n_words).upload(&stream, &host.input[..written.n_words])?;
        host.begun.record(&stream)?;
        self.copy_pages(&stream, llama, kv, &layout, written.copies)?;
        self.pack(&stream, llama, kv)?;
        let n_edits = self.lists.n_edits();
        let edits = Layout::slice(memory, written.edits, n_edits * EDIT_WORDS);
        llama.kernels().edits.run(&stream, n_edits, edits, memory, self.page_tokens.slice())?;
        let mut by_host = HashMap::new();
        let starts = ReturnedStarts::of(dims.n_outputs, dims.n_programs);
        let n_words = starts.extra + written.n_extra_words;
        let mut held = None;
        match (is_captured, holds) {
            (_, true) => {
                held = Some(Box::new(self.run_layers(&stream, llama, kv, &layout, n_words, buffers_idx)?));
            }
            (true, false) => {
                self.run_whole(&stream, llama, kv, &layout)?;
                let group = self.group_of(&layout);
                self.bring_whole(&stream, buffers_idx, &group)?;
            }
            (false, _) => by_host = self.run(&stream, llama, kv, &layout, rows, buffers_idx)?,
        }
        match held {
            Some(_) => self.ring[buffers_idx].layered.record(&stream)?,
            None => self.bring_back(&stream, buffers_idx, n_words)?,
        }
        let outputs = &mut self.lists.outputs;
        let (places, rows) = (std::mem::take(&mut outputs.places), std::mem::take(&mut outputs.rows));
        let readings = std::mem::take(&mut outputs.readings);
        let masses = starts.extra + outputs.n_list_words();
        #[cfg(test)]
        {
            self.n_by_host += by_host.len();
        }
        // A step that failed leaves its buffers to the next one: the others are those of the step before.
        self.next_idx = (buffers_idx + 1) % self.ring.len();
        let was_held = held.is_some();
        Ok(InFlight { buffers_idx, starts, masses, places, rows, readings, by_host, held, was_held })
    }

    /// Puts the copy of what a step returns into the stream.
    fn bring_back(&mut self, stream: &Stream, buffers_idx: usize, n_words: usize) -> Result<(), CudaError> {
        let returned = self.returned.slice().part(0, 4 * n_words);
        let host = &mut self.ring[buffers_idx];
        host.computed.record(stream)?;
        // SAFETY: both have room for the words; `wait` reads the host's only after the copy is done, and so
        // does `launch` before it uses them again.
        check("cuMemcpyDtoHAsync", || unsafe {
            result::memcpy_dtoh_async(&mut host.output[..n_words], returned.address, stream.raw())
        })?;
        host.done.record(stream)
    }

    /// Begins a step: gives what is added to its tokens a place on the device, then what its programs are given, as far as
    /// there is room.
    pub(crate) fn begin(&mut self, rows: &[StepRow<'_>], n_layers: usize) {
        self.given.begin_step();
        let steered = rows.iter().filter(|row| !row.is_of_head()).filter_map(|row| row.steered);
        self.given.place_steerings(steered.map(|steered| steered.steering), n_layers);
        (self.all_given, self.has_program_kernel) = (true, false);
        let card = self.card.clone();
        for request in rows.iter().flat_map(|row| row.requests) {
            if let OutputKind::Program { sampler, within, others, .. } = &request.kind {
                others.kept().iter().for_each(|row| self.kept_rows.check(row));
                let put_on = sampler.program.as_ref().expect("it draws by a program");
                // It may become ready at any time, and this step goes one way.
                self.has_program_kernel = self.has_program_kernel || card.programs().is_some();
                #[cfg(test)]
                {
                    self.has_program_kernel &= !self.leaves_programs;
                }
                let is_given =
                    self.has_program_kernel && self.given.place(put_on, Keeps::to(*within)).is_some();
                // The host makes no late draw: one that the device cannot make sits out.
                self.all_given &= is_given || request.kind.is_late();
            }
        }
    }

    /// Whether the device may have no room for what the draws of a step need, so that the host would draw, which it can
    /// only after tokens that it knows.
    pub(crate) fn may_draw_on_host(&self, rows: &[StepRow<'_>], copies: &[PageCopy]) -> bool {
        !self.all_given
            || Outputs::n_tail_words(rows, copies.len(), &self.slots) > N_TAIL_WORDS_MAX
            || Outputs::n_copied_pages(rows) > N_COPIED_PAGES
    }

    /// A place for a row of logits that stays on the device.
    pub(crate) fn keep_row(&self) -> Option<KeptRow> {
        self.kept_rows.take()
    }

    /// Notes where the last draw of a slot by a program ended, which the device may not know.
    pub(crate) fn note_left(&mut self, slot: SlotId, state: DrawState) {
        self.lists.outputs.programs.note_left(slot, state);
    }

    /// Notes that these pages get their contents from elsewhere than a step.
    pub(crate) fn lose_tokens(&mut self, pages: impl Iterator<Item = PageId>) {
        self.slots.lose_tokens(pages);
    }

    /// Forgets what the device has of contexts: it is not known after a step that failed.
    pub(crate) fn forget_slots(&mut self) {
        self.slots.forget();
        self.given.forget();
    }

    /// Whether it is known that a step is done. What went wrong, waiting for it says.
    pub(crate) fn is_done(&self, step: &InFlight) -> bool {
        step.held.is_none() && self.ring[step.buffers_idx].done.is_done().unwrap_or(true)
    }

    /// Waits for a step and takes its outputs, in the order of its requests.
    ///
    /// # Errors
    /// Something in the step failed.
    pub(crate) fn wait(&mut self, mut step: InFlight) -> Result<Collected, CudaError> {
        let host = &self.ring[step.buffers_idx];
        host.done.synchronize()?;
        let elapsed_ms = match step.was_held {
            // The time that it waited for masks was no work.
            true => host.begun.elapsed_ms(&host.layered)? + host.drawing.elapsed_ms(&host.computed)?,
            false => host.begun.elapsed_ms(&host.computed)?,
        };
        let elapsed = Duration::from_secs_f32(elapsed_ms.max(0.0) * 1e-3);
        self.busy += elapsed;
        let returned = Returned { words: &host.output, starts: step.starts };
        let places = std::mem::take(&mut step.places);
        let mut readings: HashMap<usize, Reading> = std::mem::take(&mut step.readings).into_iter().collect();
        let mut scratch = Scratch::default();
        let mut output = |(request_idx, place): (usize, Place)| {
            let by_host = step.by_host.remove(&request_idx);
            let output = match place {
                Place::Drawn { output_idx } => returned.drawn(output_idx).map(Output::Sampled),
                Place::Programmed { output_idx, program_idx, n_drawn } => {
                    returned.programmed(output_idx, program_idx, n_drawn)
                }
                Place::Top { output_idx } => returned.top(output_idx, &step.rows[output_idx]),
                Place::Ranked { output_idx } => returned.ranked(output_idx, &step.rows[output_idx]),
                Place::Scores { output_idx } => returned.scores(output_idx, &step.rows[output_idx]),
                Place::Full { output_idx, start: Some(start), .. } => {
                    returned.check(output_idx).and_then(|()| {
                        let row: &[f32] = from_words(&host.whole, start, self.row_words.logits);
                        match readings.remove(&request_idx) {
                            Some(reading) => reading.read(row, &mut scratch),
                            None => Ok(Output::Full(row.to_vec())),
                        }
                    })
                }
                Place::Raw { start } => {
                    let row: &[f32] = from_words(&host.whole, start, self.row_words.logits);
                    let reading = readings.remove(&request_idx).expect("it says what is made of the row");
                    reading.read(row, &mut scratch)
                }
                Place::Hidden { start: Some(start), .. } => {
                    hidden_state(&host.whole[start..], self.hidden_size, self.dtype).map(Output::Embedding)
                }
                Place::Tapped { state } => {
                    let state = &host.states[state * self.hidden_size..][..self.hidden_size];
                    match state.iter().any(|x| x.is_nan()) {
                        true => Err(OutputFault::NotANumber),
                        false => Ok(Output::Embedding(state.to_vec())),
                    }
                }
                Place::Attention { start, n } => {
                    let masses: &[f32] = from_words(&host.output, step.masses + start, n);
                    match masses.iter().any(|x| x.is_nan()) {
                        true => Err(OutputFault::NotANumber),
                        false => Ok(Output::Attention(masses.to_vec())),
                    }
                }
                Place::Full { output_idx, start: None, .. } => {
                    returned.check(output_idx).map(|()| by_host.expect("fetched with the step"))
                }
                Place::Hidden { start: None, .. } | Place::Host { .. } => {
                    Ok(by_host.expect("worked out with the step"))
                }
                Place::Kept { output_idx } => returned.check(output_idx).map(|()| Output::Kept),
                Place::Mixed | Place::MixedByHost { .. } => Ok(Output::Mixed),
                Place::SatOut => Ok(Output::SatOut),
                Place::Late { .. } => unreachable!("a step is let draw before it is waited for"),
                Place::Unset => unreachable!("every request has a place"),
            };
            output.unwrap_or_else(Output::Failed)
        };
        let outputs = places.into_iter().enumerate().map(&mut output).collect();
        Ok(Collected { outputs, elapsed })
    }

    /// Time that the device has spent in the steps that were waited for, copies to and from the host not counted.
    #[cfg(test)]
    pub(crate) fn busy(&self) -> Duration {
        self.busy
    }

    fn fill(&mut self, llama: &Llama, rows: &[StepRow<'_>], copies: &[PageCopy]) {
        let StepLimits { n_logits_rows, n_states, .. } = self.limits;
        let room = Room {
            n_group_rows: n_logits_rows,
            n_outputs: n_outputs_max(self.limits),
            n_states,
            n_layers: llama.config.n_layers,
            n_whole_words: self.ring[0].whole.len(),
            row_words: self.row_words,
            n_plane_sets: if self.has_program_kernel { self.program_memory.n_plane_sets } else { 0 },
            program_states: self.regions.program_states,
        };
        let Self { lists, slots, given, .. } = self;
        lists.fill(rows, copies, slots, given, &llama.kernels().attention.cuttings(), room);
    }

    /// What a captured step of about that size takes: so few sizes that each is captured once.
    fn bucketed(&self, llama: &Llama, exact: Dims) -> Dims {
        // Verifications: each row of logits is computed, and there are several for a row of the step.
        let bucket_of_rows = if self.lists.has_longer_rows() { token_bucket } else { bucket };
        let n_logits_rows = bucket_of_rows(exact.n_logits_rows).min(self.limits.n_logits_rows);
        let n_tokens = match self.lists.logits_of() {
            _ if exact.n_tokens == 0 => 0,
            LogitsOf::EachToken => n_logits_rows,
            LogitsOf::Some => token_bucket(exact.n_tokens).min(self.limits.n_tokens_max),
        };
        let n_outputs = bucket(exact.n_outputs.max(exact.n_logits_rows)).min(self.limits.n_logits_rows);
        let lists = exact.lists.bucketed(n_tokens, &llama.kernels().attention.cuttings());
        let n_programs = match exact.n_programs {
            0 => 0,
            n => n.next_power_of_two().min(n_outputs),
        };
        Dims { n_tokens, lists, n_logits_rows, n_outputs, n_programs, ..exact }
    }

    fn copy_pages(
        &self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
        start: usize,
    ) -> Result<(), CudaError> {
        let n_copies = self.lists.n_copies();
        if n_copies == 0 {
            return Ok(());
        }
        let memory = self.memory.slice();
        let pairs = Layout::slice(memory, start, 2 * n_copies);
        let count = layout.count(memory, Count::Copies, n_copies);
        let page_bytes = llama.page_len() * llama.dtype.n_bytes();
        llama.kernels().pages.run(stream, count, page_bytes, kv, self.page_tokens.slice(), pairs)
    }

    /// Copies the cells together that rows pack.
    fn pack(&self, stream: &Stream, llama: &Llama, kv: Slice) -> Result<(), CudaError> {
        let head_bytes = llama.config.head_dim * llama.dtype.n_bytes();
        let page_bytes = llama.page_len() * llama.dtype.n_bytes();
        llama.kernels().pages.pack(stream, self.lists.moves(), page_bytes, head_bytes, kv)
    }

    /// Draws that the host has made.
    #[cfg(test)]
    pub(crate) fn n_by_host(&self) -> usize {
        self.n_by_host
    }

    /// Has the host make all draws of programs.
    #[cfg(test)]
    pub(crate) fn leave_programs_to_host(&mut self) {
        self.leaves_programs = true;
    }

    /// Forgets what was captured, so that tests see steps captured again.
    #[cfg(test)]
    pub(crate) fn forget_graphs(&mut self) {
        self.captured = Captured::new(CAPTURED_LIMITS);
    }

    /// Launches a step as it is, group by group; returns what the host had to work out.
    fn run(
        &mut self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
        rows: &[StepRow<'_>],
        buffers_idx: usize,
    ) -> Result<HashMap<usize, Output>, CudaError> {
        self.launch_tapped_layers(stream, llama, kv, layout, buffers_idx)?;
        let mut by_host = HashMap::new();
        for group_idx in 0..self.lists.outputs.groups.len() {
            let group = self.lists.outputs.groups[group_idx].clone();
            let memory = self.memory.slice();
            let count = Count::LogitsRows { group_idx };
            let asked = LogitsRows {
                rows: layout.count(memory, count, group.n_logits_rows),
                kept: self.kept(layout, group.logits_start, group.n_logits_rows),
                logits_of: LogitsOf::Some,
                keeps_hidden: group.keeps_hidden(),
            };
            llama.logits(stream, asked, &self.activations)?;
            let mut fetched = self.fetch(stream, llama, group_idx, Place::is_drawn_from)?;
            self.fetch_kept(stream, rows, group_idx, &mut fetched)?;
            if group.n_outputs > 0 {
                let rows = layout.output_rows(memory, group.outputs_start, group.n_outputs);
                self.launch_outputs(stream, llama, layout, group_idx, &group, rows)?;
            }
            self.bring_whole(stream, buffers_idx, &group)?;
            let rest = |place: Place| place.is_fetched() && !place.is_drawn_from();
            let rest = self.fetch(stream, llama, group_idx, rest)?;
            self.outputs_by_host(rows, group_idx, &fetched, &rest, &mut by_host);
        }
        Ok(by_host)
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        let waited = self.card.gpu().make_current().and_then(|()| self.card.wait_for_steps());
        if let Err(error) = waited {
            tracing::warn!(%error, "the last step failed");
            self.ring.iter_mut().for_each(HostBuffers::lose);
        }
    }
}
