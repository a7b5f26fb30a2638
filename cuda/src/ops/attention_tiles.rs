//! Attention of tiles of queries over pages: prompts, and rows of few tokens.

use super::attention::{
    AttentionInputs, AttentionShape, DeviceShares, N_FEW_TOKENS_MAX, PAGE_LEN, PartialResults, grid_workers,
    n_kv_heads, source,
};
use super::attention_decode::N_COLUMNS;
use super::common::{Dtype, i32_of};
use super::shares::Cutting;
use crate::driver::params;
use crate::{CudaError, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// As in `attention_tiles.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionTilesParams {
    out: Pointer,
    q: Pointer,
    kv: Pointer,
    entries: Pointer,
    shares: Pointer,
    n_workers: Pointer,
    partial_acc: Pointer,
    partial_ml: Pointer,
    n_kv_heads: i32,
    page_stride: u32,
    window: i32,
    scale_log2: f32,
}
params!(AttentionTilesParams, 80);

/// As in `attention_tiles.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionCombineParams {
    out: Pointer,
    cuts: Pointer,
    n_cuts: Pointer,
    partial_acc: Pointer,
    partial_ml: Pointer,
    n_kv_heads: i32,
    tile_queries: i32,
}
params!(AttentionCombineParams, 48);

/// As in `attention_tiles.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionJoinParams {
    out: Pointer,
    cuts: Pointer,
    n_cuts: Pointer,
    partial_acc: Pointer,
    partial_ml: Pointer,
    own_acc: Pointer,
    own_ml: Pointer,
    n_kv_heads: i32,
    tile_queries: i32,
}
params!(AttentionJoinParams, 64);

/// Softmax attention of many queries of a context; see `attention_tiles.cu`.
#[derive(Clone, Debug)]
pub struct AttentionTiles {
    few: TileKernel,
    prompt: TileKernel,
    combine: Kernel<AttentionCombineParams>,
    join: Kernel<AttentionJoinParams>,
    shape: AttentionShape,
}

#[derive(Clone, Debug)]
struct TileKernel {
    kernel: Kernel<AttentionTilesParams>,
    /// Blocks that are resident together.
    n_resident: usize,
}

/// How high a tile is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileForm {
    /// For up to [`N_FEW_TOKENS_MAX`] tokens, bound by bytes.
    Few,
    /// For prompts, bound by operations.
    Prompt,
}

/// Of a block of the kernels that fold shares.
const N_WARPS: usize = 4;
const N_THREADS: usize = 32 * N_WARPS;
/// Queries that a block has in one block of 16 for each of its warps.
const BLOCK_QUERIES: usize = 16 * N_WARPS;
/// Of a block of the kernel that sums shares; a query each.
const N_COMBINE_WARPS: usize = 8;

/// Keys in shared memory.
fn tile_keys(head_dim: usize) -> usize {
    if head_dim <= 128 { 64 } else { 32 }
}

/// Elements of a row in shared memory: padded by 16 bytes, so that the eight rows of a matrix load lie in different banks.
fn pitch(head_dim: usize) -> usize {
    head_dim + 8
}

impl TileForm {
    /// Blocks of 16 queries for each warp.
    fn n_query_blocks(self, shape: &AttentionShape) -> usize {
        let of_prompt = if shape.head_dim <= 128 { 2 } else { 1 };
        match self {
            Self::Few if N_FEW_TOKENS_MAX * shape.group_len() <= BLOCK_QUERIES => 1,
            _ => of_prompt,
        }
    }

    /// Queries of a tile.
    fn tile_queries(self, shape: &AttentionShape) -> usize {
        BLOCK_QUERIES * self.n_query_blocks(shape)
    }

    /// `struct Shared` of the kernel.
    fn shared_bytes(self, shape: &AttentionShape) -> usize {
        let n_keys = tile_keys(shape.head_dim);
        let rows = self.tile_queries(shape) + 2 * n_keys;
        rows * pitch(shape.head_dim) * 2 + 2 * (n_keys / PAGE_LEN) * 4
    }

    /// Blocks of a multiprocessor that registers are shared out for.
    fn n_resident_blocks(self, shape: &AttentionShape) -> usize {
        match self.n_query_blocks(shape) {
            1 if shape.head_dim <= 64 => 4,
            1 if shape.head_dim <= 128 => 3,
            _ => 2,
        }
    }
}

impl AttentionTiles {
    /// Whether the kernels take the shape: numbers and heads that the tensor cores take, and a tile for one token.
    #[must_use]
    pub fn supports(shape: &AttentionShape) -> bool {
        shape.dtype != Dtype::F32
            && shape.head_dim.is_multiple_of(16)
            && shape.group_len() <= TileForm::Few.tile_queries(shape)
    }

    /// The sources that hold the kernels for a shape: that for prompts, and all others.
    ///
    /// # Panics
    /// The shape is none that the kernels take.
    #[must_use]
    pub fn sources(shape: &AttentionShape) -> [Source; 2] {
        [1, 0].map(|is_prompt| Self::source(shape).with("ATTN_PROMPT", is_prompt))
    }

    fn source(shape: &AttentionShape) -> Source {
        assert!(Self::supports(shape), "{shape:?}");
        let text = concat!(
            include_str!("common.cuh"),
            include_str!("attention.cuh"),
            include_str!("attention_tiles.cu")
        );
        source(shape, "attention_tiles.cu", text)
            .with("ATTN_TILE_WARPS", N_WARPS)
            .with("ATTN_TILE_KEYS", tile_keys(shape.head_dim))
            .with("ATTN_TILE_PITCH", pitch(shape.head_dim))
            .with("ATTN_FEW_BLOCKS", TileForm::Few.n_query_blocks(shape))
            .with("ATTN_FEW_RESIDENT", TileForm::Few.n_resident_blocks(shape))
            .with("ATTN_FEW_SHARED_BYTES", TileForm::Few.shared_bytes(shape))
            .with("ATTN_PROMPT_BLOCKS", TileForm::Prompt.n_query_blocks(shape))
            .with("ATTN_PROMPT_RESIDENT", TileForm::Prompt.n_resident_blocks(shape))
            .with("ATTN_PROMPT_SHARED_BYTES", TileForm::Prompt.shared_bytes(shape))
            .with("ATTN_COMBINE_WARPS", N_COMBINE_WARPS)
            .with("ATTN_OWN_COLUMNS", N_COLUMNS)
    }

    /// Finds the kernels in the modules of [`AttentionTiles::sources`] for the same shape.
    ///
    /// # Errors
    /// The driver refused, or the device has too little shared memory.
    pub fn new([of_prompts, others]: [&Module; 2], shape: AttentionShape) -> Result<Self, CudaError> {
        let tiles = |module: &Module, form: TileForm, name: &str| -> Result<_, CudaError> {
            let kernel: Kernel<AttentionTilesParams> = module.kernel(name)?;
            let shared_bytes = form.shared_bytes(&shape);
            kernel.allow_shared_bytes(shared_bytes)?;
            let n_resident = kernel.n_resident_blocks(N_THREADS, shared_bytes)?;
            Ok(TileKernel { kernel, n_resident })
        };
        Ok(Self {
            few: tiles(others, TileForm::Few, "attention_few")?,
            prompt: tiles(of_prompts, TileForm::Prompt, "attention_prompt")?,
            combine: others.kernel("attention_combine")?,
            join: others.kernel("attention_join")?,
            shape,
        })
    }

    fn kernel(&self, form: TileForm) -> &TileKernel {
        match form {
            TileForm::Few => &self.few,
            TileForm::Prompt => &self.prompt,
        }
    }

    /// How a form's kernel wants its work.
    #[must_use]
    pub fn cutting(&self, form: TileForm) -> Cutting {
        let shape = &self.shape;
        Cutting {
            tile_tokens: form.tile_queries(shape) / shape.group_len(),
            n_workers: (self.kernel(form).n_resident / shape.n_kv_heads).max(1),
            // Two passes over the keys in shared memory; a share of one would cost as much again to put together.
            quantum_pages: 2 * tile_keys(shape.head_dim) / PAGE_LEN,
        }
    }

    /// Bytes in which shares of tiles are put together.
    #[must_use]
    pub fn partial_bytes(&self) -> usize {
        let n_queries = self.n_partial_queries(TileForm::Few).max(self.n_partial_queries(TileForm::Prompt));
        PartialResults::n_bytes(n_queries, self.shape.head_dim)
    }

    fn n_partial_queries(&self, form: TileForm) -> usize {
        self.cutting(form).n_partials_max() * self.shape.n_kv_heads * form.tile_queries(&self.shape)
    }

    /// Writes the outputs of the tokens in the list, and no others. The same list gives the same bits.
    ///
    /// # Errors
    /// The driver refused a launch.
    ///
    /// # Panics
    /// A slice is too short, or there are more than 65,535 workers or tiles that were cut.
    pub fn run(
        &self,
        stream: &Stream,
        form: TileForm,
        inputs: &AttentionInputs,
        list: DeviceShares,
        partial: Slice,
    ) -> Result<(), CudaError> {
        let partial = PartialResults::of(partial, self.n_partial_queries(form), self.shape.head_dim);
        self.launch(stream, form, inputs, list, partial)?;
        self.sum(stream, form, inputs, list, partial)
    }

    /// Works out what the rows of the tiles in the list have in common, and puts it together with what each of them has for
    /// itself, which [`AttentionDecode::run_apart`] has left.
    ///
    /// [`AttentionDecode::run_apart`]: super::attention_decode::AttentionDecode::run_apart
    ///
    /// # Errors
    /// The driver refused a launch.
    ///
    /// # Panics
    /// A slice is too short, or there are more than 65,535 workers or tiles.
    pub(super) fn run_shared(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        list: DeviceShares,
        partial: Slice,
        own: PartialResults,
    ) -> Result<(), CudaError> {
        let (form, shape) = (TileForm::Prompt, &self.shape);
        let partial = PartialResults::of(partial, self.n_partial_queries(form), shape.head_dim);
        self.launch(stream, form, inputs, list, partial)?;
        if list.cuts.n_max == 0 {
            return Ok(());
        }
        let tile_queries = form.tile_queries(shape);
        let params = AttentionJoinParams {
            out: inputs.out.into(),
            cuts: list.cut_list.into(),
            n_cuts: list.cuts.n.into(),
            partial_acc: partial.acc.into(),
            partial_ml: partial.ml.into(),
            own_acc: own.acc.into(),
            own_ml: own.ml.into(),
            n_kv_heads: n_kv_heads(shape),
            tile_queries: i32_of(tile_queries),
        };
        // SAFETY: as in `sum`; the rows' own results were left by a launch before, a place for each row of each tile.
        unsafe { self.summing(list, form).run(stream, &self.join, &params) }
    }

    fn launch(
        &self,
        stream: &Stream,
        form: TileForm,
        inputs: &AttentionInputs,
        list: DeviceShares,
        partial: PartialResults,
    ) -> Result<(), CudaError> {
        if list.workers.n_max == 0 {
            return Ok(());
        }
        let shape = &self.shape;
        let params = AttentionTilesParams {
            out: inputs.out.into(),
            q: inputs.q.into(),
            kv: inputs.check(shape, list),
            entries: inputs.entries.into(),
            shares: list.shares.into(),
            n_workers: list.workers.n.into(),
            partial_acc: partial.acc.into(),
            partial_ml: partial.ml.into(),
            n_kv_heads: n_kv_heads(shape),
            page_stride: inputs.page_stride(),
            window: inputs.window(),
            scale_log2: shape.scale_log2(),
        };
        let launch = Launch {
            grid: (shape.n_kv_heads as u32, grid_workers(list.workers), 1),
            block: (N_THREADS as u32, 1, 1),
            shared_bytes: form.shared_bytes(shape) as u32,
        };
        // SAFETY: lengths were checked; the caller keeps tokens, page tables and page ids of the shares inside what
        // they index, and partial results below the most that the cutting leads to.
        unsafe { launch.run(stream, &self.kernel(form).kernel, &params) }
    }

    /// Sums the shares of the tiles that were cut.
    fn sum(
        &self,
        stream: &Stream,
        form: TileForm,
        inputs: &AttentionInputs,
        list: DeviceShares,
        partial: PartialResults,
    ) -> Result<(), CudaError> {
        if list.cuts.n_max == 0 {
            return Ok(());
        }
        let shape = &self.shape;
        let tile_queries = form.tile_queries(shape);
        let params = AttentionCombineParams {
            out: inputs.out.into(),
            cuts: list.cut_list.into(),
            n_cuts: list.cuts.n.into(),
            partial_acc: partial.acc.into(),
            partial_ml: partial.ml.into(),
            n_kv_heads: n_kv_heads(shape),
            tile_queries: i32_of(tile_queries),
        };
        // SAFETY: as above; the partial results of cut tiles were written by the launch before.
        unsafe { self.summing(list, form).run(stream, &self.combine, &params) }
    }

    /// A warp for each query of the tiles that were cut.
    fn summing(&self, list: DeviceShares, form: TileForm) -> Launch {
        let n_cuts = u16::try_from(list.cuts.n_max).expect("a grid has up to 65,535 cut tiles");
        let n_blocks = form.tile_queries(&self.shape) / N_COMBINE_WARPS;
        Launch {
            grid: (self.shape.n_kv_heads as u32, n_blocks as u32, u32::from(n_cuts)),
            block: (32 * N_COMBINE_WARPS as u32, 1, 1),
            shared_bytes: 0,
        }
    }
}

#[cfg(test)]
#[path = "attention_tiles_tests.rs"]
mod tests;
