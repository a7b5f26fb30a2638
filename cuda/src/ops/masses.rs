//! How much attention tokens put on those of their contexts, where it is asked for: beside the attention of the layers, which
//! goes on as it does.

use std::sync::Arc;

use trellis_engine::N_STRETCHES_MAX;

use super::attention::{AttentionInputs, AttentionShape, n_kv_heads, source};
use super::common::expect_i32;
use crate::compile::Deferred;
use crate::driver::params;
use crate::{Compiler, CudaError, Gpu, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// Threads of a block; cells that it weighs.
const N_THREADS: usize = 256;

/// Queries of one launch.
const N_QUERIES: usize = 32;

/// Parts of a query's cells that the softmax of a head is worked out in: as many as there is room for in the place of the
/// head's output, and a warp puts together.
fn n_parts(shape: &AttentionShape) -> usize {
    (shape.head_dim * shape.dtype.n_bytes() / 8).min(32)
}

/// Bits of a query's flags.
const IS_FIRST: u32 = 1;
const HAS_HOLES: u32 = 2;

/// As in `masses.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct MassesParams {
    q: Pointer,
    kv: Pointer,
    entries: Pointer,
    holes: Pointer,
    inv_freq: Pointer,
    stats: Pointer,
    out: Pointer,
    n_kv_heads: i32,
    page_stride: u32,
    window: i32,
    scale_log2: f32,
    tokens: [u32; 32],
    cells: [u32; 32],
    tables: [u32; 32],
    places: [u32; 32],
    flags: [u32; 32],
    weights: [f32; 32],
}
params!(MassesParams, 840);

/// One token whose attention is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MassQuery {
    /// Which of the step's tokens it is.
    pub token: usize,
    /// The cell that it lies in: it sees those up to it.
    pub cell: usize,
    /// Where its context's page table begins, in entries.
    pub table: usize,
    /// The first of its numbers in the output: one for each token of the context up to it.
    pub place: usize,
    /// Whether tokens were evicted from its context.
    pub has_holes: bool,
    /// Layers whose mean is asked for.
    pub n_layers: usize,
}

#[derive(Debug)]
struct MassesKernels {
    stats: Kernel<MassesParams>,
    masses: Kernel<MassesParams>,
}

/// Writes attention out; see `masses.cu`.
#[derive(Clone, Debug)]
pub struct Masses {
    kernels: Arc<Deferred<MassesKernels>>,
    shape: AttentionShape,
}

impl Masses {
    /// The source that holds the kernels for a shape.
    ///
    /// # Panics
    /// The shape is none that the kernels of attention take.
    #[must_use]
    pub fn source(shape: &AttentionShape) -> Source {
        let text = concat!(
            include_str!("common.cuh"),
            include_str!("attention.cuh"),
            include_str!("attention_holes.cuh"),
            include_str!("masses.cu")
        );
        source(shape, "masses.cu", text)
            .with("ATTN_STRETCHES_MAX", N_STRETCHES_MAX)
            .with("N_THREADS", N_THREADS)
            .with("MASSES_N_PARTS", n_parts(shape))
            .with("MASSES_IS_FIRST", IS_FIRST)
            .with("MASSES_HAS_HOLES", HAS_HOLES)
    }

    /// The kernels for a shape, not compiled yet: attention is seldom asked for.
    #[must_use]
    pub fn new(gpu: &Gpu, compiler: &Compiler, shape: AttentionShape) -> Self {
        let find = |module: &Module| {
            Ok(MassesKernels { stats: module.kernel("masses_stats")?, masses: module.kernel("masses")? })
        };
        Self { kernels: Arc::new(Deferred::new(gpu, compiler, Self::source(&shape), find)), shape }
    }

    /// Has a thread compile the kernels.
    pub fn begin(&self) {
        self.kernels.begin();
    }

    /// Adds what the queries put on each token in this layer, the first of theirs where it `is_first`, to `out`: f32. Writes
    /// over the rows of their tokens in the outputs of attention, which has not been run for them yet. The same queries give
    /// the same bits.
    ///
    /// # Errors
    /// The driver refused a launch.
    ///
    /// # Panics
    /// A slice is too short.
    pub fn run<'a>(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        queries: impl IntoIterator<Item = (&'a MassQuery, bool)>,
        out: Slice,
    ) -> Result<(), CudaError> {
        let (shape, kernels) = (&self.shape, self.kernels.get()?);
        let holes = inputs.holes;
        let mut params = MassesParams {
            q: inputs.q.into(),
            kv: inputs.layer(shape),
            entries: inputs.entries.into(),
            holes: holes.map(|holes| holes.places).into(),
            inv_freq: holes.map(|holes| holes.inv_freq).into(),
            stats: inputs.out.into(),
            out: out.into(),
            n_kv_heads: n_kv_heads(shape),
            page_stride: inputs.page_stride(),
            window: inputs.window(),
            scale_log2: shape.scale_log2(),
            tokens: [0; N_QUERIES],
            cells: [0; N_QUERIES],
            tables: [0; N_QUERIES],
            places: [0; N_QUERIES],
            flags: [0; N_QUERIES],
            weights: [0.0; N_QUERIES],
        };
        let mut queries = queries.into_iter();
        loop {
            let (mut n, mut n_cells) = (0, 0);
            for (query, is_first) in queries.by_ref().take(N_QUERIES) {
                let MassQuery { token, cell, table, place, has_holes, n_layers } = *query;
                assert!(token < inputs.n_tokens_max, "token {token}");
                assert!(!has_holes || (holes.is_some() && inputs.window.is_none()), "holes are described");
                let fits = |n: usize| u32::try_from(n).expect("kernels count in 32 bits");
                params.tokens[n] = fits(token);
                params.cells[n] = fits(cell);
                params.tables[n] = fits(table);
                params.places[n] = fits(place);
                params.flags[n] = u32::from(is_first) * IS_FIRST + u32::from(has_holes) * HAS_HOLES;
                params.weights[n] = 1.0 / (shape.n_heads * n_layers) as f32;
                if !has_holes {
                    expect_i32("masses", out, place + cell + 1);
                }
                n += 1;
                n_cells = n_cells.max(cell + 1);
            }
            if n == 0 {
                return Ok(());
            }
            let launch = |n_blocks: usize, n_parts: usize| Launch {
                grid: (n_blocks as u32, n as u32, n_parts as u32),
                block: (N_THREADS as u32, 1, 1),
                shared_bytes: 0,
            };
            // SAFETY: lengths were checked above, as for attention; the caller keeps pages below their number, what is
            // described of holes behind the entries, and a number in `out` for each cell with a token. The statistics of a
            // query are as many bytes a head as the row of its token has, or fewer.
            unsafe {
                launch(shape.n_heads, n_parts(shape)).run(stream, &kernels.stats, &params)?;
                launch(n_cells.div_ceil(N_THREADS), 1).run(stream, &kernels.masses, &params)?;
            }
        }
    }
}

#[cfg(test)]
#[path = "masses_tests.rs"]
mod tests;
