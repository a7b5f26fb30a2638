//! Logit programs over rows of logits, on the device.
//!
//! The definition is [`trellis_engine::sampling::program`]: over the same logits, token, state and reports are the CPU's to
//! the bit. Everything that changes from step to step lies in device buffers, and the grid depends on the bucket of rows
//! alone, so that a launch can be captured in a graph. There are kernels of the same text for one chain, for few, for some
//! and for many: up to some, each block takes a whole multiprocessor, many share them. What is small has other kernels
//! (`program_small`).

use trellis_engine::batch::OutputFault;
use trellis_engine::sampling::GUMBEL_MAX;
use trellis_engine::sampling::program::{N_OPERATIONS_MAX, N_REPORTS_MAX, N_STATE_MAX};

use super::common::{PAGE_LEN, expect, expect_i32};
use super::logits::{FAULT_NONE, FAULT_NOTHING_TO_DRAW, NOWHERE, TOKEN_BITS, VOCAB_SIZE_MAX, Wants};
use super::program_code::{CODES, N_CODE_MAX, N_REGISTERS, PLACES};
use super::program_encode::{HAS_SELECTIONS, HAS_SUMS, N_PLAIN_SHIFT, WITHIN_LIST};
use super::program_passes::{self, PassesKernel};
use super::program_plain::{FORMS, N_PLAIN_MAX};
use super::program_plan::{N_GATHERED, N_HEADER, N_NUMBERS, N_PLANES_MAX, N_SUMS, NO_NUMBER};
use super::program_single::{self, SinglePassKernel, meetings_bytes};
use super::program_small::{N_SINGLE_ROOTS, ProgramKind};
use crate::driver::N_CLUSTER_BLOCKS;
use crate::driver::params;
use crate::{CudaError, Gpu, Kernel, Launch, Module, Plain, Pointer, Slice, Source, Stream};

/// How a row is shared out.
#[derive(Clone, Copy, Debug)]
struct Shape {
    kernel: &'static str,
    /// The chains that it is for.
    n_chains_max: usize,
    n_threads: usize,
    /// Groups of four tokens that a thread holds.
    n_groups: usize,
    /// Blocks of a row.
    n_blocks: usize,
    /// Dynamic shared memory of a block.
    shared_bytes: usize,
    /// Blocks of a multiprocessor that run together.
    n_resident: usize,
}

impl Shape {
    fn launch(&self, n_chains: usize) -> Launch {
        Launch {
            grid: ((n_chains * self.n_blocks) as u32, 1, 1),
            block: (self.n_threads as u32, 1, 1),
            shared_bytes: self.shared_bytes as u32,
        }
    }
}

/// Chains that take the largest clusters, where the device has room for as many such at once.
const N_CHAINS_LEAST: usize = 8;

/// Chains that take half of such clusters each.
pub(crate) const N_CHAINS_FEW: usize = 16;

/// Chains of which each block has a multiprocessor to itself.
pub(crate) const N_CHAINS_SOME: usize = 32;

/// Chains of many that are under way together, as far as that matters for what is read ahead.
const N_CHAINS_AT_ONCE: usize = 128;

/// Entries of a plan that shared memory holds, those of one step at least.
pub(super) const N_PLAN: usize = 256;
const _: () = assert!(N_PLAIN_MAX + N_CODE_MAX + N_GATHERED + N_SUMS <= N_PLAN);

/// By rising number of chains. Clusters came with 9.0, as did shared memory for many threads. A row alone has as many
/// blocks as a cluster takes, and several have so many that all are about as many as there are multiprocessors. Where rows are
/// many, each has few: what every block does for itself, and their waiting for each other, cost more than reading out of L2
/// what shared memory has no room for.
fn shapes((major, _): (i32, i32)) -> &'static [Shape] {
    const LEAST: Shape = Shape {
        kernel: "logit_programs_of_one",
        n_chains_max: N_CHAINS_LEAST,
        n_threads: 512,
        n_groups: 2,
        n_blocks: 16,
        shared_bytes: 200 << 10,
        n_resident: 1,
    };
    const FEW: Shape =
        Shape { kernel: "logit_programs_of_few", n_chains_max: N_CHAINS_FEW, n_blocks: 8, ..LEAST };
    const SOME: Shape =
        Shape { kernel: "logit_programs_of_some", n_chains_max: N_CHAINS_SOME, n_blocks: 4, ..LEAST };
    const MANY: Shape = Shape {
        kernel: "logit_programs",
        n_chains_max: usize::MAX,
        n_blocks: 2,
        shared_bytes: 110 << 10,
        n_resident: 2,
        ..LEAST
    };
    const WITHOUT_CLUSTERS: Shape =
        Shape { n_threads: 128, n_blocks: 1, shared_bytes: 88 << 10, n_resident: 1, ..MANY };
    match major {
        ..9 => &[WITHOUT_CLUSTERS],
        _ => &[LEAST, FEW, SOME, MANY],
    }
}

/// The sources of the kernels, which compile side by side: those of any program by rising number of chains, that of programs
/// that read the row once, and that in clusters of others without selections, where the device has clusters.
#[must_use]
pub fn sources(capability: (i32, i32)) -> Vec<Source> {
    let in_clusters = (capability.0 >= 9).then(program_passes::source);
    let small = [program_single::source()].into_iter().chain(in_clusters);
    shapes(capability).iter().copied().map(source).chain(small).collect()
}

/// The text that all kernels of programs begin with.
macro_rules! shared_text {
    () => {
        concat!(
            include_str!("maths.cuh"),
            include_str!("noise.cuh"),
            include_str!("cluster.cuh"),
            include_str!("rows.cuh"),
            include_str!("program.cuh"),
            include_str!("program_row.cuh"),
            include_str!("program_elements.cuh"),
            include_str!("program_gather.cuh")
        )
    };
}
pub(super) use shared_text;

fn source(shape: Shape) -> Source {
    let text = concat!(
        shared_text!(),
        include_str!("program_select.cuh"),
        include_str!("program_plain.cuh"),
        include_str!("program_history.cuh"),
        include_str!("program_numbers.cuh"),
        include_str!("program.cu")
    );
    defined(Source::new("program.cu", text))
        .with("KERNEL", shape.kernel)
        .with("CLUSTER", shape.n_blocks)
        .with("THREADS", shape.n_threads)
        .with("GROUPS", shape.n_groups)
        .with("SHARED_BYTES", shape.shared_bytes)
        .with("AT_ONCE", 8)
        .with("BLOCKS_OF_SM", shape.n_resident)
        .with("CHAINS_AT_ONCE", N_CHAINS_AT_ONCE)
}

/// What all kernels of programs are compiled with.
pub(super) fn defined(source: Source) -> Source {
    let source = source
        .with("N_PLAN", N_PLAN)
        .with("N_SINGLE_ROOTS", N_SINGLE_ROOTS)
        .with("TOKEN_BITS", TOKEN_BITS)
        .with("GUMBEL_MAX", format!("{GUMBEL_MAX:?}f"))
        .with("N_GATHERED", N_GATHERED)
        .with("N_SUMS", N_SUMS)
        .with("N_NUMBERS", N_NUMBERS)
        .with("N_REGISTERS", N_REGISTERS)
        .with("N_OPERATIONS", N_OPERATIONS_MAX)
        .with("KEPT_ROW", KEPT_ROW)
        .with("WITHIN_LIST", WITHIN_LIST)
        .with("N_PLAIN_SHIFT", N_PLAIN_SHIFT)
        .with("HAS_SUMS", HAS_SUMS)
        .with("HAS_SELECTIONS", HAS_SELECTIONS)
        .with("N_HEADER", N_HEADER)
        .with("N_PLANES", N_PLANES_MAX)
        .with("NO_NUMBER", NO_NUMBER)
        .with("PAGE_LEN", PAGE_LEN)
        .with("NONE", format!("{NOWHERE}u"))
        .with("WANTS_PROGRAM", Wants::PROGRAM.0)
        .with("FAULT_NONE", FAULT_NONE)
        .with("FAULT_NOTHING_TO_DRAW", FAULT_NOTHING_TO_DRAW);
    let source = FORMS.iter().fold(source, |source, &(name, word)| source.with(name, word));
    let source = PLACES.iter().fold(source, |source, &(name, word)| source.with(name, word));
    CODES.iter().fold(source, |source, &(name, code)| source.with(name, code))
}

/// One row, as the kernel reads it. Starts count what their buffers hold.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ProgramRow {
    /// First entry of its plan in the programs, of a row that is passed over as well.
    pub program: u32,
    /// Its row in the output rows: what it wants (without [`Wants::PROGRAM`] the program is passed over), the row of logits,
    /// and the constraint's mask.
    pub output_row: u32,
    /// The row that is worked out behind it, or [`NOWHERE`].
    pub next: u32,
    /// Which set of planes it has, where its program makes rows of the history.
    pub planes: u32,
    /// First of the other members in the members.
    pub members_start: u32,
    /// Other members; one that is not there has the row's own logits.
    pub n_members: u32,
    /// Low word first.
    pub seed: [u32; 2],
    /// Position that the token will have, low word first.
    pub position: [u32; 2],
    /// Tokens of the context.
    pub n_tokens: u32,
    /// Tokens drawn since the program was put on.
    pub n_drawn: u32,
    /// Where the page table of the row's context begins, in words; where it looks at the history.
    pub table_start: u32,
    /// The last tokens of the context that it looks at.
    pub n_history: u32,
    /// First parameter.
    pub parameters_start: u32,
    /// Parameters; those that are not there are 0.
    pub n_parameters: u32,
    /// First mask in the starts of masks.
    pub masks_start: u32,
    /// Masks; one that is not there allows all.
    pub n_masks: u32,
    /// First bias in the places of biases.
    pub biases_start: u32,
    /// Biases; one that is not there is 0.
    pub n_biases: u32,
    /// The first number of the state that the token before left.
    pub state_in: u32,
    /// Where the state goes that this token leaves, or [`NOWHERE`]. Nothing goes there after a fault.
    pub state_out: u32,
}

const _: () = assert!(size_of::<ProgramRow>() == 88);
// SAFETY: 22 fields of 4 bytes without padding, all of which take any bits.
unsafe impl Plain for ProgramRow {}

/// Where a bias lies.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct ProgramBias {
    /// First number in the dense biases, where every row begins at a multiple of 4 numbers; or first pair.
    pub start: u32,
    /// Pairs by rising token, no token twice; or [`NOWHERE`] for a number for each token.
    pub n_pairs: u32,
}

// SAFETY: two fields of 4 bytes without padding, which take any bits.
unsafe impl Plain for ProgramBias {}

/// What came of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct ProgramOutput {
    /// The token; 0 after a fault.
    pub token: u32,
    /// See [`ProgramOutput::fault`].
    pub fault_code: u32,
    /// What it reports; 0 where the program does not.
    pub reports: [f32; N_REPORTS_MAX],
    /// What it leaves to the next token.
    pub state: [f32; N_STATE_MAX],
}

const _: () = assert!(size_of::<ProgramOutput>() == 56);
// SAFETY: 14 fields of 4 bytes without padding, all of which take any bits.
unsafe impl Plain for ProgramOutput {}

impl ProgramOutput {
    /// Why there is no token, if there is none.
    ///
    /// # Panics
    /// The row was not written by a launch.
    #[must_use]
    pub fn fault(&self) -> Option<OutputFault> {
        match self.fault_code {
            FAULT_NONE => None,
            FAULT_NOTHING_TO_DRAW => Some(OutputFault::NothingToDraw),
            code => panic!("the kernel writes no fault {code}"),
        }
    }
}

/// As in `program.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct ProgramParams {
    programs: Pointer,
    rows: Pointer,
    chains: Pointer,
    n_chains: Pointer,
    output_rows: Pointer,
    logits: Pointer,
    kept_rows: Pointer,
    members: Pointer,
    tables: Pointer,
    page_tokens: Pointer,
    parameters: Pointer,
    mask_starts: Pointer,
    masks: Pointer,
    bias_places: Pointer,
    dense_biases: Pointer,
    bias_pairs: Pointer,
    states: Pointer,
    planes: Pointer,
    outputs: Pointer,
    meetings: Pointer,
    vocab: i32,
    unused: i32,
}
params!(ProgramParams, 168);

/// Set in the number of a member that is a kept row.
pub const KEPT_ROW: u32 = 1 << 31;

/// Device buffers of a launch.
#[derive(Clone, Copy, Debug)]
pub struct ProgramBuffers {
    /// [`Entry`](super::program_plan::Entry): plans, aligned to 16 bytes.
    pub programs: Slice,
    /// [`ProgramRow`] `[n_rows_max]`.
    pub rows: Slice,
    /// u32 `[n_chains_max]`: the first row of each chain. The rows of a chain are worked out one after the other.
    pub chains: Slice,
    /// One u32: the chains that count; blocks of others leave at once.
    pub n_chains: Slice,
    /// [`OutputRow`](super::logits::OutputRow) `[n_output_rows]`.
    pub output_rows: Slice,
    /// f32 `[n_logits_rows, vocab_size]`, aligned to 16 bytes: numbers or −∞; a NaN counts as −∞.
    pub logits: Slice,
    /// f32 `[n_kept_rows, vocab_size]`: what steps before have left; no NaN.
    pub kept_rows: Slice,
    /// u32: rows of logits, or with [`KEPT_ROW`] kept rows.
    pub members: Slice,
    /// [`PageEntry`](super::shares::PageEntry): page tables.
    pub tables: Slice,
    /// i32 `[n_pages, PAGE_LEN]`: the tokens of each page.
    pub page_tokens: Slice,
    /// f32.
    pub parameters: Slice,
    /// u32: where masks begin, in words of 64 bits.
    pub mask_starts: Slice,
    /// u64: masks as [`TokenMask::words`](trellis_engine::sampling::TokenMask::words) has them.
    pub masks: Slice,
    /// [`ProgramBias`].
    pub bias_places: Slice,
    /// f32, aligned to 16 bytes.
    pub dense_biases: Slice,
    /// [`BiasPair`](super::logits::BiasPair).
    pub bias_pairs: Slice,
    /// f32: eight numbers for each state.
    pub states: Slice,
    /// [`planes_bytes`], aligned to 16 bytes: zeros before and after every launch.
    pub planes: Slice,
    /// [`ProgramOutput`] `[n_rows_max]`.
    pub outputs: Slice,
    /// [`meetings_bytes`] of `n_chains_max`, aligned to 8 bytes: zeros before and after every launch.
    pub meetings: Slice,
}

/// Bytes of so many sets of planes.
#[must_use]
pub fn planes_bytes(n_sets: usize, vocab_size: usize) -> usize {
    n_sets * N_PLANES_MAX * vocab_size.next_multiple_of(4) * 4
}

/// How many clusters of a kernel the device takes at once that has more blocks in one than every device with clusters takes.
fn n_large_clusters(kernel: &Kernel<ProgramParams>, shape: Shape) -> Result<usize, CudaError> {
    kernel.allow_large_clusters()?;
    shape.launch(1).n_resident_clusters(kernel, shape.n_blocks as u32)
}

/// The shape for as many chains as the device takes such clusters at once: a part of one may have no multiprocessors for more. A
/// device that does not know them, or does not say, has none; the next shape takes the other chains.
fn with_room(shape: Shape, n_clusters: Result<usize, CudaError>) -> Option<Shape> {
    let n_clusters = n_clusters.unwrap_or_else(|error| {
        let Shape { kernel, n_blocks, .. } = shape;
        tracing::warn!(%error, kernel, n_blocks, "logit programs run in smaller clusters");
        0
    });
    (n_clusters > 0).then_some(Shape { n_chains_max: shape.n_chains_max.min(n_clusters), ..shape })
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct ProgramKernel {
    /// By rising number of chains; the last takes any.
    of: Vec<(Kernel<ProgramParams>, Shape)>,
    single_pass: SinglePassKernel<ProgramParams>,
    /// Where the device has clusters.
    passes: Option<PassesKernel<ProgramParams>>,
}

impl ProgramKernel {
    /// Finds the kernels in the modules of [`sources`] for the device.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// The modules are not those of the sources.
    pub fn new(modules: &[Module], gpu: &Gpu) -> Result<Self, CudaError> {
        let (of_any, small) = modules.split_at(shapes(gpu.compute_capability()).len());
        let single_pass = SinglePassKernel::new(&small[0], gpu.n_multiprocessors())?;
        let passes = small.get(1).map(PassesKernel::new).transpose()?;
        let mut of = Vec::new();
        for (module, &shape) in of_any.iter().zip(shapes(gpu.compute_capability())) {
            let kernel = module.kernel(shape.kernel)?;
            kernel.allow_shared_bytes(shape.shared_bytes)?;
            let shape = match shape.n_blocks {
                ..=N_CLUSTER_BLOCKS => Some(shape),
                _ => with_room(shape, n_large_clusters(&kernel, shape)),
            };
            of.extend(shape.map(|shape| (kernel, shape)));
        }
        Ok(Self { of, single_pass, passes })
    }

    /// Launches the programs of a bucket of `n_chains` chains.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A buffer is too short for the bucket or not aligned, or the vocabulary is too large.
    ///
    /// # Safety
    /// Every place that a row names lies in its buffer (plans are whole, tokens below the vocabulary, masks of its
    /// length); the buffers live until the stream has passed the launch; the count of chains is at most `n_chains`; each row
    /// is in one chain, and no other chain has its planes or its `state_out`; the kernels of the kind that is said run all of the
    /// programs, and of a kind that is not any the chain of each index is the row of that index.
    pub unsafe fn run(
        &self,
        stream: &Stream,
        buffers: &ProgramBuffers,
        n_chains: usize,
        vocab_size: usize,
        kind: ProgramKind,
    ) -> Result<(), CudaError> {
        assert!((1..=VOCAB_SIZE_MAX).contains(&vocab_size), "{vocab_size} tokens");
        expect("programs", buffers.programs, 1, 16);
        expect_i32("chains of programs", buffers.chains, n_chains);
        expect("logits", buffers.logits, vocab_size, 4);
        expect("planes", buffers.planes, planes_bytes(1, vocab_size), 1);
        expect("meetings of programs", buffers.meetings, meetings_bytes(n_chains), 1);
        if n_chains == 0 {
            return Ok(());
        }
        let params = ProgramParams {
            programs: buffers.programs.into(),
            rows: buffers.rows.into(),
            chains: buffers.chains.into(),
            n_chains: buffers.n_chains.into(),
            output_rows: buffers.output_rows.into(),
            logits: buffers.logits.into(),
            kept_rows: buffers.kept_rows.into(),
            members: buffers.members.into(),
            tables: buffers.tables.into(),
            page_tokens: buffers.page_tokens.into(),
            parameters: buffers.parameters.into(),
            mask_starts: buffers.mask_starts.into(),
            masks: buffers.masks.into(),
            bias_places: buffers.bias_places.into(),
            dense_biases: buffers.dense_biases.into(),
            bias_pairs: buffers.bias_pairs.into(),
            states: buffers.states.into(),
            planes: buffers.planes.into(),
            outputs: buffers.outputs.into(),
            meetings: buffers.meetings.into(),
            vocab: vocab_size as i32,
            unused: 0,
        };
        match (kind, &self.passes) {
            (ProgramKind::SinglePass, _) => {
                // SAFETY: the lengths are asserted or the caller's promise.
                return unsafe { self.single_pass.run(stream, &params, n_chains) };
            }
            (ProgramKind::Passes, Some(passes)) if n_chains <= program_passes::N_ROWS_MAX => {
                // SAFETY: as above.
                return unsafe { passes.run(stream, &params, n_chains) };
            }
            _ => {}
        }
        let is_for = |(_, shape): &&(_, Shape)| n_chains <= shape.n_chains_max;
        let (kernel, shape) = self.of.iter().find(is_for).expect("the last takes any number");
        // SAFETY: as above.
        unsafe { shape.launch(n_chains).run(stream, kernel, &params) }
    }
}

#[cfg(test)]
#[path = "program_tests.rs"]
mod tests;
