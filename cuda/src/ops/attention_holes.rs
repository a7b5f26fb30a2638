//! Attention in contexts from which tokens were evicted, and of the nodes of trees of guesses: the kernel for single queries, which looks at the cells that are
//! seen and turns the queries for the keys of each stretch. All rows of such contexts go through it.

use std::sync::Arc;

use trellis_engine::batch::Evicted;
use trellis_engine::{N_STRETCHES_MAX, N_TREE_NODES_MAX};

use super::attention::{
    AttentionInputs, AttentionShape, DeviceShares, PAGE_LEN, PartialResults, Workspace, n_kv_heads, source,
};
use super::attention_decode::{Blocks, N_COLUMNS};
use super::common::{Dtype, expect, expect_i32};
use super::shares::Cutting;
use crate::compile::Deferred;
use crate::driver::params;
use crate::{Compiler, CudaError, Gpu, Kernel, Module, Pointer, Slice, Source, Stream};

/// As in `attention_holes.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionHolesParams {
    out: Pointer,
    q: Pointer,
    kv: Pointer,
    entries: Pointer,
    shares: Pointer,
    n_workers: Pointer,
    partial_acc: Pointer,
    partial_ml: Pointer,
    arrivals: Pointer,
    n_kv_heads: i32,
    page_stride: u32,
    window: i32,
    scale_log2: f32,
    holes: Pointer,
    inv_freq: Pointer,
}
params!(AttentionHolesParams, 104);

/// What attention knows of contexts from which tokens were evicted.
#[derive(Clone, Copy, Debug)]
pub struct HolesInputs {
    /// For each token of such a context where its holes are described ([`Holes`]), in words from the first entry on.
    pub places: Slice, // u32 [n_tokens]
    /// Radians a position.
    pub inv_freq: Slice, // f32 [head_dim / 2]
}

/// Words before the bits of [`Holes`].
const N_HEADER_WORDS: usize = 3 + 2 * N_STRETCHES_MAX;

/// Pages that the nodes of a tree lie in at most.
const N_TREE_PAGES_MAX: usize = N_TREE_NODES_MAX.div_ceil(PAGE_LEN) + 1;

/// Which cells of contexts are seen, and how their keys were rotated, as the kernel reads it; kept for its memory.
#[derive(Debug, Default)]
pub struct Holes {
    words: Vec<u32>,
}

impl Holes {
    /// Forgets all.
    pub fn clear(&mut self) {
        self.words.clear();
    }

    /// Describes a context; returns where that begins.
    ///
    /// # Panics
    /// There are more stretches than [`N_STRETCHES_MAX`].
    pub fn push(&mut self, evicted: &Evicted<'_>) -> usize {
        let start = self.words.len();
        let n_stretches = evicted.stretches.len();
        assert!((1..=N_STRETCHES_MAX).contains(&n_stretches), "{n_stretches} stretches");
        // From the first open cell on all are seen.
        let n_whole = evicted.n_whole.unwrap_or(0);
        let n_pages = evicted.open.div_ceil(PAGE_LEN).saturating_sub(n_whole);
        self.words.extend([n_stretches as u32, n_whole as u32, n_pages as u32]);
        let of_stretches = |of: &dyn Fn(usize) -> u32| {
            let mut words = [0; N_STRETCHES_MAX];
            (0..n_stretches).for_each(|idx| words[idx] = of(idx));
            words
        };
        // Before the first stretch there is nothing.
        let first_cell = |idx: usize| if idx == 0 { 0 } else { evicted.stretches[idx].first_cell as u32 };
        self.words.extend(of_stretches(&first_cell));
        self.words.extend(of_stretches(&|idx| evicted.stretches[idx].extra_rotation as i32 as u32));
        let seen = |idx: usize| match idx < n_pages {
            true => u32::from(evicted.seen_in(n_whole + idx, (n_whole + idx + 1) * PAGE_LEN - 1)),
            false => 0,
        };
        self.words.extend((0..n_pages).step_by(2).map(|idx| seen(idx) | seen(idx + 1) << 16));
        start
    }

    /// What was described.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Words of so many contexts and nodes of trees, at most, where the contexts have so many pages in all.
    #[must_use]
    pub fn n_words_max(n_rows: usize, n_pages: usize) -> usize {
        n_rows * (N_HEADER_WORDS + N_TREE_PAGES_MAX.div_ceil(2)) + n_pages / 2
    }
}

/// Softmax attention where tokens were evicted; see `attention_holes.cuh`.
#[derive(Clone, Debug)]
pub struct AttentionHoles {
    kernel: Arc<Deferred<Kernel<AttentionHolesParams>>>,
    shape: AttentionShape,
    /// Blocks that are resident together, at least.
    n_resident: usize,
}

/// Fewer warps than where there are no holes: the turned queries take their memory.
fn blocks(shape: &AttentionShape) -> Blocks {
    let turned = N_STRETCHES_MAX * N_COLUMNS * shape.head_dim * shape.dtype.n_bytes();
    let n_bytes = turned + (4 * N_HEADER_WORDS).next_multiple_of(16);
    let (n_warps, n_resident) = match (shape.head_dim, shape.dtype) {
        (..=128, Dtype::F32) => (4, 1),
        (_, Dtype::F32) => (2, 1),
        (..=128, _) => (4, 3),
        _ => (2, 2),
    };
    Blocks::of(shape, n_warps, n_resident, n_bytes)
}

impl AttentionHoles {
    /// The source that holds the kernel for a shape.
    ///
    /// # Panics
    /// The shape is none that the kernel takes.
    #[must_use]
    pub fn source(shape: &AttentionShape) -> Source {
        let text = concat!(
            include_str!("common.cuh"),
            include_str!("attention.cuh"),
            include_str!("attention_holes.cuh"),
            include_str!("attention_fold.cuh"),
            include_str!("attention_decode.cu")
        );
        blocks(shape)
            .define(source(shape, "attention_holes.cu", text))
            .with("ATTN_HOLES", 1)
            .with("ATTN_STRETCHES_MAX", N_STRETCHES_MAX)
    }

    /// The kernel for a shape, not compiled yet: few contexts have holes.
    #[must_use]
    pub fn new(gpu: &Gpu, compiler: &Compiler, shape: AttentionShape) -> Self {
        let find = move |module: &Module| {
            let kernel = module.kernel("attention_holes")?;
            kernel.allow_shared_bytes(blocks(&shape).shared_bytes)?;
            Ok(kernel)
        };
        let kernel = Deferred::new(gpu, compiler, Self::source(&shape), find);
        let n_resident = blocks(&shape).n_resident * gpu.n_multiprocessors();
        Self { kernel: Arc::new(kernel), shape, n_resident }
    }

    /// Has a thread compile the kernel.
    pub fn begin(&self) {
        self.kernel.begin();
    }

    /// Loads the kernel if it is not there yet.
    ///
    /// # Errors
    /// It does not compile, the driver refused it, or the device has too little shared memory.
    pub fn load(&self) -> Result<(), CudaError> {
        self.kernel.get().map(|_| ())
    }

    /// How the kernel wants its work.
    #[must_use]
    pub fn cutting(&self) -> Cutting {
        blocks(&self.shape).cutting(self.n_resident)
    }

    /// Bytes of [`Workspace::arrivals`].
    #[must_use]
    pub fn arrivals_bytes(&self) -> usize {
        blocks(&self.shape).arrivals_bytes(self.cutting())
    }

    /// Bytes of [`Workspace::partial`].
    #[must_use]
    pub fn partial_bytes(&self) -> usize {
        PartialResults::n_bytes(self.n_partial_queries(), self.shape.head_dim)
    }

    fn n_partial_queries(&self) -> usize {
        blocks(&self.shape).n_partial_queries(self.cutting())
    }

    /// Writes the outputs of the tokens in the list, and no others; positions in it count cells. The same list gives the same
    /// bits.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, there are more than 65,535 workers, or the layer has a window.
    pub fn run(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        holes: HolesInputs,
        list: DeviceShares,
        workspace: Workspace,
    ) -> Result<(), CudaError> {
        if list.workers.n_max == 0 {
            return Ok(());
        }
        let shape = &self.shape;
        assert!(inputs.window.is_none(), "tokens are not evicted where layers see windows");
        expect_i32("arrivals", workspace.arrivals, self.arrivals_bytes() / 4);
        expect_i32("holes", holes.places, inputs.n_tokens_max);
        expect("inv_freq", holes.inv_freq, shape.head_dim / 2, 4);
        let partial = PartialResults::of(workspace.partial, self.n_partial_queries(), shape.head_dim);
        let params = AttentionHolesParams {
            out: inputs.out.into(),
            q: inputs.q.into(),
            kv: inputs.check(shape, list),
            entries: inputs.entries.into(),
            shares: list.shares.into(),
            n_workers: list.workers.n.into(),
            partial_acc: partial.acc.into(),
            partial_ml: partial.ml.into(),
            arrivals: workspace.arrivals.into(),
            n_kv_heads: n_kv_heads(shape),
            page_stride: inputs.page_stride(),
            window: inputs.window(),
            scale_log2: shape.scale_log2(),
            holes: holes.places.into(),
            inv_freq: holes.inv_freq.into(),
        };
        // SAFETY: as for single queries in contexts without holes; the caller keeps what is described of holes behind the
        // entries.
        unsafe { blocks(shape).launch(list).run(stream, self.kernel.get()?, &params) }
    }
}

#[cfg(test)]
#[path = "attention_holes_tests.rs"]
mod tests;
