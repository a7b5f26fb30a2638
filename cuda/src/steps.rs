//! Puts steps into the stream: one copy to the device, the launches, one copy back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result;
use trellis_engine::batch::{Output, OutputKind, PageCopy};
use trellis_engine::sampling::{Distribution, Scratch, sample};

use crate::activations::{Activations, StepSize};
use crate::blas::bucket;
use crate::device::{Event, Timing, check};
use crate::graph::Graph;
use crate::llama::{Llama, LogitsRows, StepTensors};
use crate::ops::attention::{Contexts, PAGE_LEN, Tiles};
use crate::ops::attention_decode::{AttentionDecode, DecodeWorkspace};
use crate::ops::common::{Dtype, Rows};
use crate::ops::embedding::TokenIds;
use crate::ops::logits::{LogitsBuffers, OutputRow, RowOutput, Stages};
use crate::step::{
    Answers, Count, Dims, Group, Layout, N_SCORES_MAX, N_SLOTS, N_TOP_ENTRIES_MAX, Place, Room, StepPlan,
    StepRow,
};
use crate::{Buffer, Card, CudaError, Pinned, Slice, Stream};

/// Steps whose copies to and from the host have memory of their own. Three can be under way: a guess, what it left out,
/// and the guess behind them.
const N_UNDER_WAY: usize = 4;

/// Captured steps that are kept; there are a few for each bucket of rows.
const N_GRAPHS_MAX: usize = 256;

/// Sizes of the steps of one model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepLimits {
    pub(crate) n_tokens_max: usize,
    pub(crate) n_rows_max: usize,
    pub(crate) n_positions_max: usize,
    /// Rows of logits in memory at once.
    pub(crate) n_logits_rows: usize,
}

/// The memory of a model's steps, and the steps captured so far.
#[derive(Debug)]
pub(crate) struct Steps {
    limits: StepLimits,
    /// Dropped before the memory that they point to.
    graphs: HashMap<GraphKey, Captured>,
    memory: Buffer,  // words, laid out as `step::Layout` says
    answers: Buffer, // output rows, scores, top lists
    arrivals: Buffer,
    activations: Activations,
    _arena: Arc<Buffer>,
    ring: Vec<Turn>,
    next_turn: usize,
    plan: StepPlan,
    card: Card,
    /// Time that the device has spent in steps.
    busy: Duration,
}

/// Host memory of one step under way.
#[derive(Debug)]
struct Turn {
    input: Pinned<u32>,
    output: Pinned<u32>,
    begun: Event,
    computed: Event,
    done: Event,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GraphKey {
    dims: Dims,
    n_splits: usize,
    stages: Stages,
}

/// A step is captured when it comes the second time: the first launch of a kernel may have to load it.
#[derive(Debug)]
enum Captured {
    Seen,
    Ready(Graph),
}

/// A step in the stream.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    turn_idx: usize,
    /// Where scores and top lists begin among the words that come back.
    extra: usize,
    /// Where the answer to each request lies.
    places: Vec<Place>,
    rows: Vec<OutputRow>,
    /// Answers that the host worked out, by request.
    by_host: HashMap<usize, Output>,
}

/// A row of logits that is fetched for requests of one place.
type Fetched = HashMap<(usize, usize), Vec<f32>>;

impl Steps {
    /// Bytes of device memory besides the activations.
    pub(crate) fn n_bytes(decode: &AttentionDecode, limits: StepLimits) -> usize {
        let arrivals = decode.arrivals_bytes(limits.n_rows_max);
        4 * (N_SLOTS + n_input_words(limits) + n_output_words(limits)) + arrivals
    }

    /// What the activations of these steps are laid out for.
    pub(crate) fn size(decode: &AttentionDecode, n_multiprocessors: usize, limits: StepLimits) -> StepSize {
        // A launch is cut for what its page tables have room for.
        let n_pages = limits.n_positions_max.div_ceil(PAGE_LEN);
        let n_positions = StepPlan::page_table_stride(n_pages) * PAGE_LEN;
        let partial_bytes = (1..=limits.n_rows_max).map(|n_items| {
            let n_splits = decode.n_splits(n_multiprocessors, n_items, n_positions);
            decode.partial_bytes(n_items, n_splits)
        });
        StepSize {
            n_tokens: limits.n_tokens_max,
            n_logits_rows: limits.n_logits_rows,
            partial_bytes: partial_bytes.max().unwrap_or(0),
        }
    }

    /// Takes the memory.
    ///
    /// # Errors
    /// There is not enough.
    pub(crate) fn new(card: &Card, llama: &Llama, limits: StepLimits) -> Result<Self, CudaError> {
        let gpu = card.gpu();
        let size = Self::size(&llama.kernels().attention_decode, gpu.n_multiprocessors(), limits);
        let n_bytes = Activations::n_bytes(&llama.config, llama.dtype, size);
        let arena = card.step_memory(n_bytes)?;
        let what = "the lists of a step";
        let memory = gpu.allocate(what, 4 * (N_SLOTS + n_input_words(limits)))?;
        let arrivals_bytes = llama.kernels().attention_decode.arrivals_bytes(limits.n_rows_max);
        let arrivals = gpu.allocate(what, arrivals_bytes)?;
        {
            let stream = card.turn();
            arrivals.slice().fill(&stream, 0)?;
            memory.slice().fill(&stream, 0)?;
            stream.synchronize()?;
        }
        let turn = |_| {
            Ok(Turn {
                input: gpu.pinned(n_input_words(limits))?,
                output: gpu.pinned(n_output_words(limits))?,
                begun: Event::new(gpu, Timing::On)?,
                computed: Event::new(gpu, Timing::On)?,
                done: Event::new(gpu, Timing::Off)?,
            })
        };
        Ok(Self {
            limits,
            memory,
            answers: gpu.allocate(what, 4 * n_output_words(limits))?,
            arrivals,
            activations: Activations::place(arena.slice(), &llama.config, llama.dtype, size),
            _arena: arena,
            ring: (0..N_UNDER_WAY).map(turn).collect::<Result<_, CudaError>>()?,
            next_turn: 0,
            plan: StepPlan::default(),
            graphs: HashMap::new(),
            card: card.clone(),
            busy: Duration::ZERO,
        })
    }

    /// Puts a step into the stream. The host waits only for what it has to answer itself.
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
        let exact = self.plan.dims();
        let is_captured = self.plan.is_plain_decode();
        let dims = if is_captured { self.bucketed(exact) } else { exact };
        let layout = Layout::of(dims);
        let turn_idx = self.next_turn;
        self.next_turn = (turn_idx + 1) % self.ring.len();

        let card = self.card.clone();
        let stream = card.turn();
        let turn = &mut self.ring[turn_idx];
        turn.done.synchronize()?;
        let written = self.plan.write(&layout, &mut turn.input);
        let memory = self.memory.slice();
        Layout::slice(memory, 0, written.n_words).upload(&stream, &turn.input[..written.n_words])?;
        turn.begun.record(&stream)?;
        self.copy_pages(&stream, llama, kv, written.copies)?;
        let mut by_host = HashMap::new();
        if is_captured {
            self.run_captured(&stream, llama, kv, &layout)?;
        } else {
            by_host = self.run(&stream, llama, kv, &layout, rows)?;
        }
        let extra = Answers::extra_start(dims.n_outputs);
        let n_words = extra + written.n_extra_words;
        let answers = self.answers.slice().part(0, 4 * n_words);
        let turn = &mut self.ring[turn_idx];
        turn.computed.record(&stream)?;
        // SAFETY: both have room for the words; `wait` keeps everybody from the host's until the copy is done, and so
        // does `launch` before it uses the turn again.
        check("cuMemcpyDtoHAsync", unsafe {
            result::memcpy_dtoh_async(&mut turn.output[..n_words], answers.address, stream.raw())
        })?;
        turn.done.record(&stream)?;
        let outputs = &mut self.plan.outputs;
        let (places, rows) = (std::mem::take(&mut outputs.places), std::mem::take(&mut outputs.rows));
        Ok(InFlight { turn_idx, extra, places, rows, by_host })
    }

    /// Whether a step of these rows needs nothing of the host: only then may it run before the host has seen the tokens
    /// of the step before.
    pub(crate) fn needs_no_host(&mut self, llama: &Llama, rows: &[StepRow<'_>]) -> bool {
        self.fill(llama, rows, &[]);
        self.plan.is_plain_decode()
    }

    /// Waits for a step and takes its answers, in the order of its requests.
    ///
    /// # Errors
    /// Something in the step failed.
    pub(crate) fn wait(&mut self, mut step: InFlight) -> Result<Vec<Output>, CudaError> {
        let turn = &self.ring[step.turn_idx];
        turn.done.synchronize()?;
        self.busy += Duration::from_secs_f32(turn.begun.elapsed_ms(&turn.computed)?.max(0.0) * 1e-3);
        let answers = Answers { words: &turn.output, extra: step.extra };
        let places = std::mem::take(&mut step.places);
        let mut answer = |(request_idx, place): (usize, Place)| {
            let by_host = step.by_host.remove(&request_idx);
            let answer = match place {
                Place::Drawn { output_idx } => answers.drawn(output_idx).map(Output::Sampled),
                Place::Top { output_idx } => answers.top(output_idx, &step.rows[output_idx]),
                Place::Scores { output_idx } => answers.scores(output_idx, &step.rows[output_idx]),
                Place::Full { output_idx, .. } => {
                    answers.check(output_idx).map(|()| by_host.expect("fetched with the step"))
                }
                Place::Hidden { .. } | Place::Host { .. } => Ok(by_host.expect("worked out with the step")),
                Place::Unset => unreachable!("every request has a place"),
            };
            answer.unwrap_or_else(Output::Failed)
        };
        Ok(places.into_iter().enumerate().map(&mut answer).collect())
    }

    /// Time that the device has spent in the steps that were waited for, copies to and from the host not counted.
    #[cfg(test)]
    pub(crate) fn busy(&self) -> Duration {
        self.busy
    }

    fn fill(&mut self, llama: &Llama, rows: &[StepRow<'_>], copies: &[PageCopy]) {
        let room = Room { n_group_rows: self.limits.n_logits_rows, n_outputs: n_outputs_max(self.limits) };
        self.plan.fill(rows, copies, llama.kernels().attention_prefill.tile_len(), room);
    }

    /// What a captured step of that many rows takes: so few sizes that each is captured once.
    fn bucketed(&self, exact: Dims) -> Dims {
        let n_rows = bucket(exact.n_rows).min(self.limits.n_logits_rows);
        Dims { n_tokens: n_rows, n_rows, n_items: n_rows, n_logits_rows: n_rows, n_outputs: n_rows, ..exact }
    }

    fn copy_pages(&self, stream: &Stream, llama: &Llama, kv: Slice, start: usize) -> Result<(), CudaError> {
        let n_copies = self.plan.n_copies();
        if n_copies == 0 {
            return Ok(());
        }
        let memory = self.memory.slice();
        let pairs = Layout::slice(memory, start, 2 * n_copies);
        let count = Layout::count(memory, Count::Copies, n_copies);
        llama.kernels().pages.run(stream, count, llama.page_len() * llama.dtype.n_bytes(), kv, pairs)
    }

    fn run_captured(
        &mut self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
    ) -> Result<(), CudaError> {
        let n_splits = self.n_splits(llama, layout.dims);
        let group = &self.plan.outputs.groups[0];
        let key = GraphKey { dims: layout.dims, n_splits, stages: group.stages };
        let group = Group {
            n_logits_rows: layout.dims.n_logits_rows,
            n_outputs: layout.dims.n_outputs,
            ..group.clone()
        };
        if self.graphs.len() >= N_GRAPHS_MAX && !self.graphs.contains_key(&key) {
            self.graphs.clear();
        }
        let launch = || {
            llama.layers(stream, &self.tensors(llama, kv, layout, n_splits), &self.activations)?;
            let rows =
                Layout::count(self.memory.slice(), Count::LogitsRows { group_idx: 0 }, group.n_logits_rows);
            let asked = LogitsRows { rows, gather: None, keeps_hidden: false };
            llama.logits(stream, asked, &self.activations)?;
            self.answer(stream, llama, layout, 0, &group)
        };
        match self.graphs.get(&key) {
            Some(Captured::Ready(graph)) => graph.launch(stream),
            Some(Captured::Seen) => {
                match Graph::capture(stream, launch) {
                    Ok(graph) => {
                        graph.launch(stream)?;
                        self.graphs.insert(key, Captured::Ready(graph));
                        Ok(())
                    }
                    // Nothing of it ran. Graphs only save time, so their memory goes first.
                    Err(error @ CudaError::OutOfMemory { .. }) => {
                        tracing::warn!(%error, "a step runs without a graph");
                        launch()?;
                        self.graphs.clear();
                        Ok(())
                    }
                    Err(error) => Err(error),
                }
            }
            None => {
                launch()?;
                self.graphs.insert(key, Captured::Seen);
                Ok(())
            }
        }
    }

    /// Launches a step as it is, group by group; returns what the host had to answer.
    fn run(
        &self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
        rows: &[StepRow<'_>],
    ) -> Result<HashMap<usize, Output>, CudaError> {
        let n_splits = self.n_splits(llama, layout.dims);
        llama.layers(stream, &self.tensors(llama, kv, layout, n_splits), &self.activations)?;
        let mut by_host = HashMap::new();
        for (group_idx, group) in self.plan.outputs.groups.iter().enumerate() {
            let memory = self.memory.slice();
            let count = Count::LogitsRows { group_idx };
            let asked = LogitsRows {
                rows: Layout::count(memory, count, group.n_logits_rows),
                gather: Some(Layout::slice(memory, layout.gather + group.logits_start, group.n_logits_rows)),
                keeps_hidden: group.has_host_work,
            };
            llama.logits(stream, asked, &self.activations)?;
            let fetched =
                self.fetch(stream, llama, group_idx, |place| matches!(place, Place::Host { .. }))?;
            if group.n_outputs > 0 {
                self.answer(stream, llama, layout, group_idx, group)?;
            }
            let rest = |place| matches!(place, Place::Full { .. } | Place::Hidden { .. });
            let rest = self.fetch(stream, llama, group_idx, rest)?;
            self.answer_by_host(rows, group_idx, &fetched, &rest, &mut by_host);
        }
        Ok(by_host)
    }

    fn n_splits(&self, llama: &Llama, dims: Dims) -> usize {
        let n_positions = dims.page_table_stride * PAGE_LEN;
        let n_multiprocessors = self.card.gpu().n_multiprocessors();
        llama.kernels().attention_decode.n_splits(n_multiprocessors, dims.n_items.max(1), n_positions)
    }

    fn tensors(&self, llama: &Llama, kv: Slice, layout: &Layout, n_splits: usize) -> StepTensors {
        let Dims { n_tokens, n_rows, page_table_stride, n_items, n_tiles, .. } = layout.dims;
        let memory = self.memory.slice();
        let slice = |start, n| Layout::slice(memory, start, n);
        let list =
            |count, n, start| Tiles { count: Layout::count(memory, count, n), list: slice(start, 2 * n) };
        let partial_bytes = llama.kernels().attention_decode.partial_bytes(n_items, n_splits);
        let workspace = DecodeWorkspace {
            arrivals: self.arrivals.slice(),
            partial: self.activations.partial.part(0, partial_bytes),
        };
        StepTensors {
            tokens: Layout::count(memory, Count::Tokens, n_tokens),
            ids: TokenIds { ids: slice(layout.tokens, n_tokens), slots: Layout::slots(memory) },
            positions: slice(layout.positions, n_tokens),
            kv_pages: slice(layout.kv_pages, n_tokens),
            contexts: Contexts {
                n_rows_max: n_rows,
                row_start: slice(layout.row_start, n_rows + 1),
                row_pos0: slice(layout.row_pos0, n_rows),
                page_table: slice(layout.page_table, n_rows * page_table_stride),
                page_table_stride,
            },
            items: (n_items > 0).then(|| (list(Count::Items, n_items, layout.items), n_splits, workspace)),
            tiles: (n_tiles > 0).then(|| list(Count::Tiles, n_tiles, layout.tiles)),
            kv,
        }
    }

    /// Launches the kernels over a group's logits.
    fn answer(
        &self,
        stream: &Stream,
        llama: &Llama,
        layout: &Layout,
        group_idx: usize,
        group: &Group,
    ) -> Result<(), CudaError> {
        let memory = self.memory.slice();
        let (start, n) = (group.outputs_start, group.n_outputs);
        let extra = 4 * Answers::extra_start(layout.dims.n_outputs);
        let answers = self.answers.slice();
        let extra = answers.part(extra, answers.n_bytes - extra);
        let Rows { n: n_rows, .. } = Layout::count(memory, Count::Outputs { group_idx }, n);
        let buffers = LogitsBuffers {
            logits: self.activations.logits,
            rows: layout.output_rows(memory, start, n),
            n_rows,
            history: memory,
            biases: memory,
            masks: memory,
            score_tokens: Layout::slice(memory, layout.tail, N_SCORES_MAX),
            scratch: self.activations.scratch,
            outputs: answers.part(start * size_of::<RowOutput>(), n * size_of::<RowOutput>()),
            top: extra,
            scores: extra,
        };
        // SAFETY: the plan keeps rows of logits below those of the group, and places in the tail, in the slots and in
        // what comes back inside the memory that was taken for the most there can be; the engine keeps tokens below
        // the vocabulary. All of it lives as long as `self`, which waits for the stream before it goes.
        unsafe { llama.kernels().logits.run(stream, &buffers, n, llama.config.vocab_size, group.stages) }
    }

    /// Brings rows of logits or hidden states of a group to the host, for the places that are wanted.
    fn fetch(
        &self,
        stream: &Stream,
        llama: &Llama,
        group: usize,
        is_wanted: impl Fn(Place) -> bool,
    ) -> Result<Fetched, CudaError> {
        let mut fetched = Fetched::new();
        let vocab_size = llama.config.vocab_size;
        for &place in self.plan.outputs.places.iter().filter(|place| is_wanted(**place)) {
            match place {
                Place::Host { group_idx, logits_row } | Place::Full { group_idx, logits_row, .. }
                    if group_idx == group =>
                {
                    if let std::collections::hash_map::Entry::Vacant(entry) = fetched.entry((0, logits_row)) {
                        let mut row = vec![0f32; vocab_size];
                        let logits =
                            self.activations.logits.part(4 * logits_row * vocab_size, 4 * vocab_size);
                        logits.download(stream, &mut row)?;
                        entry.insert(row);
                    }
                }
                Place::Hidden { group_idx, logits_row } if group_idx == group => {
                    fetched.insert((1, logits_row), self.fetch_hidden(stream, llama, logits_row)?);
                }
                _ => {}
            }
        }
        Ok(fetched)
    }

    fn fetch_hidden(&self, stream: &Stream, llama: &Llama, row: usize) -> Result<Vec<f32>, CudaError> {
        let n = llama.config.hidden_size;
        let n_bytes = n * llama.dtype.n_bytes();
        let slice = self.activations.hidden.part(row * n_bytes, n_bytes);
        match llama.dtype {
            Dtype::F32 => {
                let mut values = vec![0f32; n];
                slice.download(stream, &mut values)?;
                Ok(values)
            }
            Dtype::F16 => {
                let mut values = vec![half::f16::ZERO; n];
                slice.download(stream, &mut values)?;
                Ok(values.into_iter().map(half::f16::to_f32).collect())
            }
            Dtype::Bf16 => {
                let mut values = vec![half::bf16::ZERO; n];
                slice.download(stream, &mut values)?;
                Ok(values.into_iter().map(half::bf16::to_f32).collect())
            }
        }
    }

    /// Answers what no kernel answers, from what was fetched before (`raw`) and after the kernels.
    fn answer_by_host(
        &self,
        rows: &[StepRow<'_>],
        group: usize,
        raw: &Fetched,
        after: &Fetched,
        by_host: &mut HashMap<usize, Output>,
    ) {
        let mut scratch = Scratch::default();
        let requests = rows.iter().flat_map(|row| row.requests.iter().map(move |request| (row, request)));
        for (request_idx, ((row, request), &place)) in requests.zip(&self.plan.outputs.places).enumerate() {
            let output = match place {
                Place::Full { group_idx, logits_row, .. } if group_idx == group => {
                    Output::Full(after[&(0, logits_row)].clone())
                }
                Place::Hidden { group_idx, logits_row } if group_idx == group => {
                    let state = &after[&(1, logits_row)];
                    match state.iter().any(|x| x.is_nan()) {
                        true => Output::Failed(trellis_engine::batch::OutputFault::NotANumber),
                        false => Output::Embedding(state.clone()),
                    }
                }
                Place::Host { group_idx, logits_row } if group_idx == group => {
                    let history =
                        row.known(request.position + 1).expect("a guess leaves nothing to the host");
                    answer(request.kind, &raw[&(0, logits_row)], history, &mut scratch)
                }
                _ => continue,
            };
            by_host.insert(request_idx, output);
        }
    }
}

/// What the definition says of a row of logits.
fn answer(kind: &OutputKind<'_>, logits: &[f32], history: &[u32], scratch: &mut Scratch) -> Output {
    let answer = match kind {
        OutputKind::Sample(sampler) => {
            sample(logits, history, history.len() as u64, sampler, scratch).map(Output::Sampled)
        }
        OutputKind::Top { n } => Distribution::new(logits).map(|distribution| Output::Top {
            candidates: distribution.top(*n),
            entropy: distribution.entropy(),
        }),
        OutputKind::Scores(tokens) => Distribution::new(logits).map(|distribution| {
            Output::Scores(tokens.iter().map(|&token| distribution.logprob(token)).collect())
        }),
        _ => Distribution::new(logits).map(|distribution| Output::Full(distribution.logprobs())),
    };
    answer.unwrap_or_else(Output::Failed)
}

/// Output rows that one step has at most; what is asked beyond them the host answers.
fn n_outputs_max(limits: StepLimits) -> usize {
    limits.n_tokens_max + limits.n_rows_max
}

fn n_input_words(limits: StepLimits) -> usize {
    let n_pages = limits.n_positions_max.div_ceil(PAGE_LEN);
    let n_tokens = limits.n_tokens_max;
    StepPlan::n_words_max(Dims {
        n_tokens,
        n_rows: limits.n_rows_max,
        page_table_stride: StepPlan::page_table_stride(n_pages),
        n_items: limits.n_rows_max,
        n_tiles: n_tokens,
        n_logits_rows: n_tokens,
        n_outputs: n_outputs_max(limits),
        n_groups: n_tokens,
    })
}

fn n_output_words(limits: StepLimits) -> usize {
    Answers::extra_start(n_outputs_max(limits)) + N_SCORES_MAX + 2 * N_TOP_ENTRIES_MAX + 4
}

impl InFlight {
    /// Whether the device drew every token by itself, and so has it.
    pub(crate) fn is_all_on_device(&self) -> bool {
        self.by_host.is_empty()
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        let waited = self.card.gpu().make_current().and_then(|()| self.card.turn().synchronize());
        if let Err(error) = waited {
            tracing::warn!(%error, "the last step failed");
        }
    }
}
