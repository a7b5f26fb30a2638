//! What is asked of rows of logits, on the device: draws, most probable tokens, scores, whole rows.
//!
//! The definition is [`trellis_engine::sampling`]; a draw is the CPU's wherever the logits are equal bit for bit.
//!
//! Everything that changes from step to step lies in device buffers; grids depend on the bucket of rows alone, so
//! that a launch can be captured in a graph.

use trellis_engine::batch::OutputFault;

use super::logits_params::{
    ChooseParams, LogitsFinishParams, LogitsFullParams, LogitsRankedParams, LogitsScanParams,
    SampleBinsParams, SampleDrawParams, SampleTruncateParams, TopNParams,
};
pub(super) use super::logits_sources::N_BINS;
#[cfg(test)]
pub(super) use super::logits_sources::all_sources;
pub use super::logits_sources::sources;
use super::logits_sources::{
    CHOOSE_BLOCKS, CHOOSE_THREADS, CHUNK, DRAW_BLOCKS, FINISH_THREADS, HOPEFUL_MAX, N_CHOOSE_FEW, PART_BYTES,
    SPANS, THREADS, search_source, top_source,
};
pub use super::logits_stages::Stages;
use crate::compile::Deferred;
use crate::{Compiler, CudaError, Event, Gpu, Kernel, Launch, Module, Plain, Slice, Stream};

/// Bits of a token in the order that selection works on.
pub(super) const TOKEN_BITS: u32 = 18;
const ALIGNMENT: usize = 256;

/// Most entries of a vocabulary.
pub const VOCAB_SIZE_MAX: usize = 1 << TOKEN_BITS;
/// For the fields of [`OutputRow`] that may point nowhere.
pub const NOWHERE: u32 = u32::MAX;

/// Why an output row has no result.
pub(super) const FAULT_NONE: u32 = 0;
pub(super) const FAULT_NOT_A_NUMBER: u32 = 1;
pub(super) const FAULT_NOTHING_TO_DRAW: u32 = 2;

/// What an output row returns; several may be asked of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Wants(pub(super) u32);

impl Wants {
    /// Nothing: the row is passed over, and its results are not written.
    pub const NOTHING: Self = Self(0);
    /// A token drawn by the settings of the row.
    pub const SAMPLE: Self = Self(1);
    /// The most probable tokens.
    pub const TOP: Self = Self(2);
    /// The log-probabilities of given tokens.
    pub const SCORES: Self = Self(4);
    /// Log-probabilities in place of the logits.
    pub const FULL: Self = Self(8);
    /// The token that a program has drawn from the row.
    pub const PROGRAM: Self = Self(16);
    /// The most probable tokens after what the settings of the row make of its log-probabilities, as
    /// [`rank`](trellis_engine::sampling::rank) has them.
    pub const RANKED: Self = Self(32);

    /// Both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` is wanted.
    #[must_use]
    pub const fn include(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One output row as the kernels read it. [`OutputRow::draw`] fills in a sampler; places in buffers are the
/// caller's.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OutputRow {
    /// What to return.
    pub wants: Wants,
    /// The row of logits; rows that want different things may share one, but only one of them
    /// [`Wants::FULL`].
    pub logits_row: u32,
    /// 0 for the largest.
    pub temperature: f32,
    /// 0 for all.
    pub top_k: u32,
    /// 1 for all.
    pub top_p: f32,
    /// `ln(min_p)`; −∞ for all.
    pub min_logit: f32,
    /// 1 for none.
    pub repetition_penalty: f32,
    /// 0 for none.
    pub frequency_penalty: f32,
    /// 0 for none.
    pub presence_penalty: f32,
    /// Low word first.
    pub seed: [u32; 2],
    /// Low word first.
    pub position: [u32; 2],
    /// Where the page table of the row's context begins, in words; where there is a history.
    pub table_start: u32,
    /// Tokens of the penalties' window, before [`OutputRow::history_end`]; see [`Sampler::n_penalized`](trellis_engine::sampling::Sampler::n_penalized).
    pub n_history: u32,
    /// Slot that takes the drawn token, or token 0 after a fault; or [`NOWHERE`].
    pub drawn_slot: u32,
    /// First pair in the biases; see [`ordered_biases`](super::sample::ordered_biases).
    pub bias_start: u32,
    /// Pairs.
    pub n_bias: u32,
    /// First word of the mask in the masks, in words of 64 bits, or [`NOWHERE`] for no mask. For a program it is that of
    /// its constraint.
    pub mask_start: u32,
    /// First place in the top lists.
    pub top_start: u32,
    /// Places there, at most [`N_TOP_MAX`](super::topn::N_TOP_MAX).
    pub n_top: u32,
    /// First token in the score tokens, and place of its score in the scores.
    pub score_start: u32,
    /// Tokens to score.
    pub n_scores: u32,
    /// The position behind the window of the penalties.
    pub history_end: u32,
    /// The row of programs of the same launches, where a program draws.
    pub program_row: u32,
}

const _: () = assert!(size_of::<OutputRow>() == 100);
// SAFETY: 25 fields of 4 bytes without padding, all of which take any bits.
unsafe impl Plain for OutputRow {}

impl Default for OutputRow {
    fn default() -> Self {
        Self {
            wants: Wants::NOTHING,
            logits_row: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_logit: f32::NEG_INFINITY,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: [0; 2],
            position: [0; 2],
            table_start: 0,
            n_history: 0,
            drawn_slot: NOWHERE,
            bias_start: 0,
            n_bias: 0,
            mask_start: NOWHERE,
            top_start: 0,
            n_top: 0,
            score_start: 0,
            n_scores: 0,
            history_end: 0,
            program_row: 0,
        }
    }
}

/// The result of an output row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct RowOutput {
    /// The drawn token; 0 when none was drawn.
    pub token: u32,
    /// Its log-probability under the unmodified logits, in nats.
    pub logprob: f32,
    /// See [`RowOutput::fault`].
    pub fault_code: u32,
    /// Of the unmodified logits.
    pub log_sum_exp: f32,
    /// Of the unmodified logits, in nats.
    pub entropy: f32,
    /// Entries of the row's top list that were written.
    pub n_top: u32,
}

const _: () = assert!(size_of::<RowOutput>() == 24);
// SAFETY: six fields of 4 bytes without padding, all of which take any bits.
unsafe impl Plain for RowOutput {}

impl RowOutput {
    /// Why there is no result, if there is none. [`OutputFault::NothingToDraw`] concerns the draw alone.
    ///
    /// # Panics
    /// The row was not written by a launch.
    #[must_use]
    pub fn fault(&self) -> Option<OutputFault> {
        match self.fault_code {
            FAULT_NONE => None,
            FAULT_NOT_A_NUMBER => Some(OutputFault::NotANumber),
            FAULT_NOTHING_TO_DRAW => Some(OutputFault::NothingToDraw),
            code => panic!("the kernels write no fault {code}"),
        }
    }
}

/// A number that is added to the logit of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct BiasPair {
    /// The token.
    pub token: u32,
    /// The number.
    pub value: f32,
}

// SAFETY: two fields of 4 bytes without padding, which take any bits.
unsafe impl Plain for BiasPair {}

/// Device buffers of a launch.
#[derive(Clone, Copy, Debug)]
pub struct LogitsBuffers {
    /// f32 `[n_logits_rows, vocab_size]`, aligned to 16 bytes.
    pub logits: Slice,
    /// [`OutputRow`] `[n_rows_max]`.
    pub rows: Slice,
    /// One u32: the rows that count; blocks of others leave at once.
    pub n_rows: Slice,
    /// [`PageEntry`](super::shares::PageEntry): page tables.
    pub tables: Slice,
    /// i32 `[n_pages, PAGE_LEN]`: the tokens of each page.
    pub page_tokens: Slice,
    /// i32: what rows drew, by slot.
    pub slots: Slice,
    /// [`BiasPair`].
    pub biases: Slice,
    /// u64: masks as [`TokenMask::words`](trellis_engine::sampling::TokenMask::words) has them.
    pub masks: Slice,
    /// i32.
    pub score_tokens: Slice,
    /// [`scratch_bytes`], aligned to 256 bytes; nothing lives in it between launches.
    pub scratch: Slice,
    /// [`RowOutput`] `[n_rows_max]`.
    pub outputs: Slice,
    /// [`Ranked`](super::topn::Ranked).
    pub top: Slice,
    /// f32.
    pub scores: Slice,
    /// [`ProgramOutput`](super::program::ProgramOutput): what programs drew before; read where a row says so.
    pub program_outputs: Slice,
}

/// The parts of the scratch memory.
struct Scratch {
    adjusted: Slice, // f32 [n_rows, vocab_size]
    parts: Slice,    // [n_rows, n_chunks]
    hopeful: Slice,  // u32 [n_rows, n_chunks, HOPEFUL_MAX]
    spans: Slice,    // f32 [n_rows, n_chunks, SPANS]
    stands: Slice,   // u32 [n_rows]
    drawn: Slice,    // u64 [n_rows, n_chunks]
    cutoffs: Slice,  // u64 [n_rows]
    counts: Slice,   // u32 [n_rows, N_BINS]
    weights: Slice,  // u64 [n_rows, N_BINS]
}

fn scratch_sizes(n_rows: usize, vocab_size: usize) -> [usize; 9] {
    let n_parts = n_rows * vocab_size.div_ceil(CHUNK);
    let sizes = [
        n_rows * vocab_size * 4,
        n_parts * PART_BYTES,
        n_parts * HOPEFUL_MAX * 4,
        n_parts * SPANS * 4,
        n_rows * 4,
        n_parts * 8,
        n_rows * 8,
        n_rows * N_BINS * 4,
        n_rows * N_BINS * 8,
    ];
    sizes.map(|n_bytes| n_bytes.next_multiple_of(ALIGNMENT))
}

/// Bytes of scratch memory that a launch over a bucket of rows needs.
#[must_use]
pub fn scratch_bytes(n_rows: usize, vocab_size: usize) -> usize {
    scratch_sizes(n_rows, vocab_size).iter().sum()
}

impl Scratch {
    fn cut(all: Slice, n_rows: usize, vocab_size: usize) -> Self {
        assert!(all.address.is_multiple_of(ALIGNMENT as u64), "scratch memory is aligned");
        let mut start = 0;
        let parts = scratch_sizes(n_rows, vocab_size).map(|n_bytes| {
            start += n_bytes;
            all.part(start - n_bytes, n_bytes)
        });
        let [adjusted, parts, hopeful, spans, stands, drawn, cutoffs, counts, weights] = parts;
        Self { adjusted, parts, hopeful, spans, stands, drawn, cutoffs, counts, weights }
    }
}

/// The kernels: those that most steps need are loaded, the others when a step needs them.
#[derive(Debug)]
pub struct LogitsKernels {
    scan: Kernel<LogitsScanParams>,
    choose: Kernel<ChooseParams>,
    /// Whether blocks of a launch can be in clusters.
    has_clusters: bool,
    search: Deferred<SearchKernels>,
    draw: Kernel<SampleDrawParams>,
    finish: Kernel<LogitsFinishParams>,
    ranked: Kernel<LogitsRankedParams>,
    top: Deferred<Kernel<TopNParams>>,
    full: Kernel<LogitsFullParams>,
}

/// What searches a cutoff: for a top-p alone, or a large top-k.
#[derive(Debug)]
struct SearchKernels {
    bins: Kernel<SampleBinsParams>,
    truncate: Kernel<SampleTruncateParams>,
}

impl LogitsKernels {
    /// Finds the kernels in the modules of [`sources`], in their order.
    ///
    /// # Errors
    /// A module was not loaded, or the driver refused.
    pub fn new(
        gpu: &Gpu,
        compiler: &Compiler,
        modules: [Result<Module, CudaError>; 4],
    ) -> Result<Self, CudaError> {
        let [scan, finish, sample, choose] = modules;
        let scan = scan?;
        let search = |module: &Module| {
            let (bins, truncate) = (module.kernel("sample_bins")?, module.kernel("sample_truncate")?);
            Ok(SearchKernels { bins, truncate })
        };
        Ok(Self {
            scan: scan.kernel("logits_scan")?,
            choose: choose?.kernel("sample_choose")?,
            has_clusters: gpu.compute_capability() >= (9, 0),
            search: Deferred::new(gpu, compiler, search_source(), search),
            draw: sample?.kernel("sample_draw")?,
            finish: finish?.kernel("logits_finish")?,
            ranked: scan.kernel("logits_ranked")?,
            top: Deferred::new(gpu, compiler, top_source(), |module| module.kernel("top_n")),
            full: scan.kernel("logits_full")?,
        })
    }

    /// Has threads compile what is not loaded yet.
    pub fn begin(&self) {
        self.search.begin();
        self.top.begin();
    }

    /// Loads what `stages` needs, if it is not loaded yet: before a step that is captured.
    ///
    /// # Errors
    /// A kernel does not compile, or the driver refused it.
    pub fn load(&self, stages: Stages) -> Result<(), CudaError> {
        if stages.search {
            self.search.get()?;
        }
        if stages.top {
            self.top.get()?;
        }
        Ok(())
    }

    /// Launches what `stages` says over a bucket of `n_rows` output rows. Where programs draw for some of them in another
    /// stream, `programs` is the mark behind that.
    ///
    /// # Errors
    /// The driver refused a launch.
    ///
    /// # Panics
    /// A buffer is too short for the bucket or not aligned, or the vocabulary is too large.
    ///
    /// # Safety
    /// Every place that a row names lies in its buffer (`logits_row`, tokens below the vocabulary, starts and
    /// counts), and the buffers live until the stream has passed the launches.
    pub unsafe fn run(
        &self,
        stream: &Stream,
        buffers: &LogitsBuffers,
        n_rows: usize,
        vocab_size: usize,
        stages: Stages,
        programs: Option<&Event>,
    ) -> Result<(), CudaError> {
        assert!((1..=VOCAB_SIZE_MAX).contains(&vocab_size), "a vocabulary of {vocab_size}");
        assert!(n_rows > 0, "a bucket has rows");
        assert!(buffers.logits.address.is_multiple_of(16), "logits are read 16 bytes at a time");
        assert!(buffers.logits.n_bytes >= vocab_size * 4, "there is a row of logits");
        assert!(buffers.rows.n_bytes >= n_rows * size_of::<OutputRow>(), "a row for each output");
        assert!(buffers.outputs.n_bytes >= n_rows * size_of::<RowOutput>(), "an output for each row");
        assert!(buffers.n_rows.n_bytes >= 4, "the number of rows is a u32");
        let scratch = Scratch::cut(buffers.scratch, n_rows, vocab_size);
        let n_chunks = vocab_size.div_ceil(CHUNK);
        let by_chunk = Launch {
            grid: (n_chunks as u32, n_rows as u32, 1),
            block: (THREADS as u32, 1, 1),
            shared_bytes: 0,
        };
        let by_row = |threads: usize| Launch {
            grid: (n_rows as u32, 1, 1),
            block: (threads as u32, 1, 1),
            shared_bytes: 0,
        };
        let n_each = (n_chunks * n_rows).div_ceil(DRAW_BLOCKS);
        let n_drawn = n_chunks.div_ceil(n_each.max(1)) as i32;
        let (vocab, n_chunks, unused) = (vocab_size as i32, n_chunks as i32, 0);
        let (logits, rows, n_rows) = (buffers.logits.into(), buffers.rows.into(), buffers.n_rows.into());
        let outputs = buffers.outputs.into();
        let (adjusted, parts, drawn) = (scratch.adjusted.into(), scratch.parts.into(), scratch.drawn.into());
        let (hopeful, spans) = (scratch.hopeful.into(), scratch.spans.into());
        let (bin_counts, bin_weights) = (scratch.counts.into(), scratch.weights.into());
        let (cutoffs, stands) = (scratch.cutoffs.into(), scratch.stands.into());

        let scan = LogitsScanParams {
            logits,
            rows,
            n_rows,
            tables: buffers.tables.into(),
            page_tokens: buffers.page_tokens.into(),
            biases: buffers.biases.into(),
            masks: buffers.masks.into(),
            adjusted,
            parts,
            hopeful,
            spans,
            bin_counts,
            bin_weights,
            vocab,
            unused,
        };
        // SAFETY: lengths were checked above or are the caller's promise.
        unsafe { by_chunk.run(stream, &self.scan, &scan)? };
        if stages.search {
            let search = self.search.get()?;
            let bins = SampleBinsParams {
                logits,
                adjusted,
                rows,
                n_rows,
                parts,
                bin_counts,
                bin_weights,
                vocab,
                unused,
            };
            // SAFETY: as above.
            unsafe { by_chunk.run(stream, &search.bins, &bins)? };
            let truncate = SampleTruncateParams {
                logits,
                adjusted,
                rows,
                n_rows,
                parts,
                bin_counts,
                bin_weights,
                cutoffs,
                vocab,
                n_chunks,
            };
            // SAFETY: as above.
            unsafe { by_row(N_BINS).run(stream, &search.truncate, &truncate)? };
        }
        if stages.choose {
            let choose =
                ChooseParams { logits, adjusted, rows, n_rows, parts, spans, stands, drawn, vocab, n_chunks };
            let mut launch = by_row(CHOOSE_THREADS);
            if self.has_clusters && launch.grid.0 as usize <= N_CHOOSE_FEW {
                launch.grid.0 *= CHOOSE_BLOCKS as u32;
                // SAFETY: as above.
                unsafe { launch.run_in_clusters(CHOOSE_BLOCKS as u32, stream, &self.choose, &choose)? };
            } else {
                // SAFETY: as above.
                unsafe { launch.run(stream, &self.choose, &choose)? };
            }
        }
        if stages.draw {
            let draw = SampleDrawParams {
                logits,
                adjusted,
                rows,
                n_rows,
                parts,
                cutoffs,
                stands,
                drawn,
                vocab,
                n_chunks,
            };
            let launch = Launch { grid: (n_drawn as u32, by_chunk.grid.1, 1), ..by_chunk };
            // SAFETY: as above.
            unsafe { launch.run(stream, &self.draw, &draw)? };
        }
        if let Some(drawn) = programs {
            stream.wait_for(drawn)?;
        }
        let finish = LogitsFinishParams {
            logits,
            adjusted,
            rows,
            n_rows,
            parts,
            hopeful,
            stands,
            drawn,
            score_tokens: buffers.score_tokens.into(),
            slots: buffers.slots.into(),
            outputs,
            scores: buffers.scores.into(),
            program_outputs: buffers.program_outputs.into(),
            vocab,
            n_chunks,
            n_drawn,
            unused,
        };
        // SAFETY: as above.
        unsafe { by_row(FINISH_THREADS).run(stream, &self.finish, &finish)? };
        if stages.ranked {
            let ranked = LogitsRankedParams {
                logits,
                rows,
                n_rows,
                tables: buffers.tables.into(),
                page_tokens: buffers.page_tokens.into(),
                biases: buffers.biases.into(),
                masks: buffers.masks.into(),
                outputs,
                adjusted,
                parts,
                vocab,
                unused,
            };
            // SAFETY: as above.
            unsafe { by_chunk.run(stream, &self.ranked, &ranked)? };
        }
        if stages.top {
            let top = buffers.top.into();
            let top = TopNParams { logits, adjusted, rows, n_rows, parts, outputs, top, vocab, n_chunks };
            // SAFETY: as above.
            unsafe { by_row(N_BINS).run(stream, self.top.get()?, &top)? };
        }
        if stages.full {
            let full = LogitsFullParams { logits, rows, n_rows, outputs, vocab, unused };
            // SAFETY: as above.
            unsafe { by_chunk.run(stream, &self.full, &full)? };
        }
        Ok(())
    }
}
