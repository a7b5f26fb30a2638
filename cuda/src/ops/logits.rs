//! What is asked of rows of logits, on the device: draws, most probable tokens, scores, whole rows.
//!
//! The definition is [`trellis_engine::sampling`]; a draw is the CPU's wherever the logits are equal bit for bit,
//! save for top-p, whose probabilities are summed with another rounding: there a token whose sum ends within 1e-6
//! of `p` may fall on the other side.
//!
//! Everything that changes from step to step lies in device buffers; grids depend on the bucket of rows alone, so
//! that a launch can be captured in a graph.

use trellis_engine::batch::OutputFault;

use crate::{Arg, Compiler, CudaError, Gpu, Kernel, Launch, Module, Plain, Slice, Source, Stream};

/// Tokens of a row that one block looks at; `CHUNK` in logits.cuh.
const CHUNK: usize = 4096;
/// Threads of a block that looks at a chunk; `THREADS` in logits.cuh.
const THREADS: u32 = 512;
/// Threads of a block that looks at a row; `BINS` in logits.cuh.
const ROW_THREADS: u32 = 1024;
const PART_BYTES: usize = 32;
const DRAWN_BYTES: usize = 8;
const CUTOFF_BYTES: usize = 8;
/// Bins of the histogram of a row: `BINS` in logits.cuh.
const N_BINS: usize = 1024;
const ALIGNMENT: usize = 256;

/// Most entries of a vocabulary: a token has 18 bits in the order that selection works on.
pub const VOCAB_SIZE_MAX: usize = 1 << 18;
/// For the fields of [`OutputRow`] that may point nowhere.
pub const NOWHERE: u32 = u32::MAX;

const SCAN: Source =
    Source { file: "logits.cu", text: concat!(include_str!("logits.cuh"), include_str!("logits.cu")) };
const SAMPLE: Source = Source {
    file: "sample.cu",
    text: concat!(include_str!("logits.cuh"), include_str!("select.cuh"), include_str!("sample.cu")),
};
const TOP: Source = Source {
    file: "topn.cu",
    text: concat!(include_str!("logits.cuh"), include_str!("select.cuh"), include_str!("topn.cu")),
};

/// The sources of all kernels here.
pub const SOURCES: [Source; 3] = [SCAN, SAMPLE, TOP];

/// What an output row returns; several may be asked of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Wants(u32);

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
    /// First token of the penalties' window in the history.
    pub history_start: u32,
    /// Tokens of that window; see [`OutputRow::n_window`].
    pub n_history: u32,
    /// Where in the history the drawn token is stored, token 0 after a fault, or [`NOWHERE`].
    pub history_append: u32,
    /// First pair in the biases; see [`ordered_biases`](super::sample::ordered_biases).
    pub bias_start: u32,
    /// Pairs.
    pub n_bias: u32,
    /// First word of the mask in the masks, in words of 64 bits, or [`NOWHERE`] for no mask.
    pub mask_start: u32,
    /// First place in the top lists.
    pub top_start: u32,
    /// Places there, at most [`N_TOP_MAX`](super::topn::N_TOP_MAX).
    pub n_top: u32,
    /// First token in the score tokens, and place of its score in the scores.
    pub score_start: u32,
    /// Tokens to score.
    pub n_scores: u32,
    /// Fills the last 16 bytes.
    pub unused: u32,
}

// SAFETY: 24 fields of 4 bytes without padding, all of which take any bits.
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
            history_start: 0,
            n_history: 0,
            history_append: NOWHERE,
            bias_start: 0,
            n_bias: 0,
            mask_start: NOWHERE,
            top_start: 0,
            n_top: 0,
            score_start: 0,
            n_scores: 0,
            unused: 0,
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
            0 => None,
            1 => Some(OutputFault::NotANumber),
            2 => Some(OutputFault::NothingToDraw),
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
    /// i32: tokens, oldest first. A negative one, `-1 - s`, stands for entry `s` of this slice.
    pub history: Slice,
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
}

/// The parts of the scratch memory.
struct Scratch {
    adjusted: Slice, // f32 [n_rows, vocab_size]
    parts: Slice,    // [n_rows, n_chunks]
    drawn: Slice,    // [n_rows, n_chunks]
    cutoffs: Slice,  // u64 [n_rows]
    counts: Slice,   // u32 [n_rows, N_BINS]
    weights: Slice,  // u64 [n_rows, N_BINS]
}

fn scratch_sizes(n_rows: usize, vocab_size: usize) -> [usize; 6] {
    let n_parts = n_rows * vocab_size.div_ceil(CHUNK);
    let sizes = [
        n_rows * vocab_size * 4,
        n_parts * PART_BYTES,
        n_parts * DRAWN_BYTES,
        n_rows * CUTOFF_BYTES,
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
        let [adjusted, parts, drawn, cutoffs, counts, weights] =
            scratch_sizes(n_rows, vocab_size).map(|n_bytes| {
                start += n_bytes;
                all.part(start - n_bytes, n_bytes)
            });
        Self { adjusted, parts, drawn, cutoffs, counts, weights }
    }
}

/// The kernels that the rows of a step need; a launch that no row needs only costs time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stages {
    /// Some row has top-k or top-p and a temperature.
    pub truncate: bool,
    /// Some row has a temperature.
    pub draw: bool,
    /// Some row wants [`Wants::TOP`].
    pub top: bool,
    /// Some row wants [`Wants::FULL`].
    pub full: bool,
}

impl Stages {
    /// What these rows need.
    #[must_use]
    pub fn of(rows: &[OutputRow]) -> Self {
        let draws = |row: &OutputRow| row.wants.include(Wants::SAMPLE) && row.temperature != 0.0;
        Self {
            truncate: rows.iter().any(|row| draws(row) && (row.top_k > 0 || row.top_p < 1.0)),
            draw: rows.iter().any(draws),
            top: rows.iter().any(|row| row.wants.include(Wants::TOP)),
            full: rows.iter().any(|row| row.wants.include(Wants::FULL)),
        }
    }

    /// Everything, for a graph that has to serve any rows.
    #[must_use]
    pub fn all() -> Self {
        Self { truncate: true, draw: true, top: true, full: true }
    }
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct LogitsKernels {
    scan: Kernel,
    bins: Kernel,
    truncate: Kernel,
    draw: Kernel,
    finish: Kernel,
    top: Kernel,
    full: Kernel,
}

impl LogitsKernels {
    /// Compiles and loads them.
    ///
    /// # Errors
    /// NVRTC is missing, or the driver refused.
    pub fn load(gpu: &Gpu, compiler: &Compiler) -> Result<Self, CudaError> {
        let module = |source| Module::load(gpu, &compiler.cubin(source)?);
        let (scan, sample, top) = (module(SCAN)?, module(SAMPLE)?, module(TOP)?);
        Ok(Self {
            scan: scan.kernel("logits_scan")?,
            bins: sample.kernel("sample_bins")?,
            truncate: sample.kernel("sample_truncate")?,
            draw: sample.kernel("sample_draw")?,
            finish: scan.kernel("logits_finish")?,
            top: top.kernel("top_n")?,
            full: scan.kernel("logits_full")?,
        })
    }

    /// Launches what `stages` says over a bucket of `n_rows` output rows.
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
    ) -> Result<(), CudaError> {
        assert!((1..=VOCAB_SIZE_MAX).contains(&vocab_size), "a vocabulary of {vocab_size}");
        assert!(n_rows > 0, "a bucket has rows");
        assert!(buffers.logits.address.is_multiple_of(16), "logits are read 16 bytes at a time");
        assert!(buffers.logits.n_bytes >= vocab_size * 4, "there is a row of logits");
        assert!(buffers.rows.n_bytes >= n_rows * size_of::<OutputRow>(), "a row for each output");
        assert!(buffers.outputs.n_bytes >= n_rows * size_of::<RowOutput>(), "an output for each row");
        assert!(buffers.n_rows.n_bytes >= 4, "the number of rows is a u32");
        let Scratch { adjusted, parts, drawn, cutoffs, counts, weights } =
            Scratch::cut(buffers.scratch, n_rows, vocab_size);
        let LogitsBuffers { logits, rows, n_rows: n_rows_used, history, outputs, .. } = *buffers;
        let n_chunks = vocab_size.div_ceil(CHUNK);
        let (vocab_arg, chunks_arg) = (Arg::I32(vocab_size as i32), Arg::I32(n_chunks as i32));
        let by_chunk =
            Launch { grid: (n_chunks as u32, n_rows as u32, 1), block: (THREADS, 1, 1), shared_bytes: 0 };
        let by_row =
            |threads| Launch { grid: (n_rows as u32, 1, 1), block: (threads, 1, 1), shared_bytes: 0 };
        let common = [logits.into(), adjusted.into(), rows.into(), n_rows_used.into(), parts.into()];

        let scan: [Arg; 11] = [
            logits.into(),
            rows.into(),
            n_rows_used.into(),
            history.into(),
            buffers.biases.into(),
            buffers.masks.into(),
            adjusted.into(),
            parts.into(),
            counts.into(),
            weights.into(),
            vocab_arg,
        ];
        // SAFETY: the arguments of `logits_scan` in order; lengths were checked above or are the caller's promise.
        unsafe { by_chunk.run(stream, &self.scan, &scan)? };
        if stages.truncate {
            let args: Vec<Arg> =
                common.into_iter().chain([counts.into(), weights.into(), vocab_arg]).collect();
            // SAFETY: as above, for `sample_bins`.
            unsafe { by_chunk.run(stream, &self.bins, &args)? };
            let args: Vec<Arg> = common
                .into_iter()
                .chain([counts.into(), weights.into(), cutoffs.into(), vocab_arg, chunks_arg])
                .collect();
            // SAFETY: as above, for `sample_truncate`.
            unsafe { by_row(ROW_THREADS).run(stream, &self.truncate, &args)? };
        }
        if stages.draw {
            let args: Vec<Arg> =
                common.into_iter().chain([cutoffs.into(), drawn.into(), vocab_arg]).collect();
            // SAFETY: as above, for `sample_draw`.
            unsafe { by_chunk.run(stream, &self.draw, &args)? };
        }
        let finish: [Arg; 11] = [
            logits.into(),
            rows.into(),
            n_rows_used.into(),
            parts.into(),
            drawn.into(),
            buffers.score_tokens.into(),
            history.into(),
            outputs.into(),
            buffers.scores.into(),
            vocab_arg,
            chunks_arg,
        ];
        // SAFETY: as above, for `logits_finish`.
        unsafe { by_row(128).run(stream, &self.finish, &finish)? };
        if stages.top {
            let args: [Arg; 8] = [
                logits.into(),
                rows.into(),
                n_rows_used.into(),
                parts.into(),
                outputs.into(),
                buffers.top.into(),
                vocab_arg,
                chunks_arg,
            ];
            // SAFETY: as above, for `top_n`.
            unsafe { by_row(ROW_THREADS).run(stream, &self.top, &args)? };
        }
        if stages.full {
            let args: [Arg; 5] = [logits.into(), rows.into(), n_rows_used.into(), outputs.into(), vocab_arg];
            // SAFETY: as above, for `logits_full`.
            unsafe { by_chunk.run(stream, &self.full, &args)? };
        }
        Ok(())
    }
}
