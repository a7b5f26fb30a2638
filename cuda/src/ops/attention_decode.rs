//! Attention of single queries over pages: decoded tokens.

use super::attention::{
    AttentionInputs, AttentionShape, DeviceShares, PAGE_LEN, PartialResults, Workspace, grid_workers,
    n_kv_heads, source,
};
use super::cascade::N_OWN_MAX;
use super::common::{Dtype, expect_i32};
use super::shares::{Cutting, N_SHARES_MAX};
use crate::driver::{Params, params};
use crate::{CudaError, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// As in `attention_decode.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionDecodeParams {
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
}
params!(AttentionDecodeParams, 88);

/// Softmax attention of up to eight queries a tile; see `attention_decode.cu`.
#[derive(Clone, Debug)]
pub struct AttentionDecode {
    kernel: Kernel<AttentionDecodeParams>,
    blocks: Blocks,
    /// Blocks that are resident together.
    n_resident: usize,
}

/// Queries of a block: the columns of a product.
pub(super) const N_COLUMNS: usize = 8;

/// How the blocks of a kernel of single queries are laid out for a shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    shape: AttentionShape,
    pub(super) n_warps: usize,
    /// Blocks of a multiprocessor that registers are shared out for.
    pub(super) n_resident: usize,
    /// `struct Shared` of the kernel.
    pub(super) shared_bytes: usize,
}

impl Blocks {
    /// For contexts without holes: as many warps as the largest heads leave shared memory for.
    pub(super) fn whole(shape: &AttentionShape) -> Self {
        let n_warps = if shape.head_dim <= 128 { 8 } else { 4 };
        // Plain f32 needs all registers for one block.
        let n_resident = if shape.head_dim <= 128 && shape.dtype != Dtype::F32 { 2 } else { 1 };
        Self::of(shape, n_warps, n_resident, 0)
    }

    /// For so many contexts that blocks have them one after the other: half of the warps in twice as many blocks, so that
    /// short contexts have work for all of them. None where blocks are as small anyway.
    pub(super) fn many(shape: &AttentionShape) -> Option<Self> {
        let whole = Self::whole(shape);
        (whole.n_resident > 1).then(|| Self::of(shape, whole.n_warps / 2, 2 * whole.n_resident, 0))
    }

    /// With so many bytes of shared memory besides what all have.
    pub(super) fn of(
        shape: &AttentionShape,
        n_warps: usize,
        n_resident: usize,
        n_bytes_besides: usize,
    ) -> Self {
        let head_dim = shape.head_dim;
        let steps = match shape.dtype {
            Dtype::F32 => 0,
            dtype => 2 * n_warps * n_step_pages(shape) * PAGE_LEN * head_dim * dtype.n_bytes(),
        };
        let merge = 4 * n_warps * N_COLUMNS * (head_dim + 2);
        let combine = 4 * N_COLUMNS * N_SHARES_MAX + 16 * 32 * n_warps;
        let shared_bytes = steps + merge.max(combine).next_multiple_of(16) + 16 + n_bytes_besides;
        Self { shape: *shape, n_warps, n_resident, shared_bytes }
    }

    /// Tells the kernel's source.
    pub(super) fn define(&self, source: Source) -> Source {
        source
            .with("ATTN_COLUMNS", N_COLUMNS)
            .with("ATTN_WARPS", self.n_warps)
            .with("ATTN_STEP_PAGES", n_step_pages(&self.shape))
            .with("ATTN_RESIDENT", self.n_resident)
            .with("ATTN_SHARED_BYTES", self.shared_bytes)
    }

    /// How many are resident on the device together.
    pub(super) fn n_on_device<P: Params>(&self, kernel: &Kernel<P>) -> Result<usize, CudaError> {
        kernel.allow_shared_bytes(self.shared_bytes)?;
        kernel.n_resident_blocks(32 * self.n_warps, self.shared_bytes)
    }

    /// How the kernel wants its work, where so many blocks are resident together.
    pub(super) fn cutting(&self, n_on_device: usize) -> Cutting {
        Cutting {
            tile_tokens: AttentionDecode::n_tokens_max(&self.shape).unwrap_or(1),
            n_workers: (n_on_device / self.n_of_share()).max(1),
            // Less would leave warps of a block without a page.
            quantum_pages: self.n_warps * n_step_pages(&self.shape),
        }
    }

    /// Blocks of one share.
    fn n_of_share(&self) -> usize {
        self.shape.n_kv_heads * self.shape.group_len().div_ceil(N_COLUMNS)
    }

    /// Bytes of [`Workspace::arrivals`].
    pub(super) fn arrivals_bytes(&self, cutting: Cutting) -> usize {
        4 * cutting.n_partials_max() * self.n_of_share()
    }

    /// Queries of partial results.
    pub(super) fn n_partial_queries(&self, cutting: Cutting) -> usize {
        cutting.n_partials_max() * self.n_of_share() * N_COLUMNS
    }

    /// A launch for a list.
    pub(super) fn launch(&self, list: DeviceShares) -> Launch {
        Launch {
            grid: (self.n_of_share() as u32, grid_workers(list.workers), 1),
            block: (32 * self.n_warps as u32, 1, 1),
            shared_bytes: self.shared_bytes as u32,
        }
    }
}

/// Pages that a warp has in shared memory: about 4 KiB of keys.
fn n_step_pages(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 64 { 2 } else { 1 }
}

impl AttentionDecode {
    /// The source that holds the kernel, for blocks of a shape.
    ///
    /// # Panics
    /// The shape is none that the kernel takes.
    #[must_use]
    pub(super) fn source(blocks: Blocks) -> Source {
        let text = concat!(
            include_str!("common.cuh"),
            include_str!("attention.cuh"),
            include_str!("attention_fold.cuh"),
            include_str!("attention_decode.cu")
        );
        blocks.define(source(&blocks.shape, "attention_decode.cu", text)).with("ATTN_HOLES", 0)
    }

    /// Finds the kernel in the module of [`AttentionDecode::source`] for the same blocks.
    ///
    /// # Errors
    /// The driver refused, or the device has too little shared memory.
    pub(super) fn new(module: &Module, blocks: Blocks) -> Result<Self, CudaError> {
        let kernel: Kernel<AttentionDecodeParams> = module.kernel("attention_decode")?;
        let n_resident = blocks.n_on_device(&kernel)?;
        Ok(Self { kernel, blocks, n_resident })
    }

    /// Tokens that fill the columns of a product; `None` where one token's heads are more than that.
    #[must_use]
    pub fn n_tokens_max(shape: &AttentionShape) -> Option<usize> {
        Some(N_COLUMNS / shape.group_len()).filter(|&n_tokens| n_tokens > 0)
    }

    /// How the kernel wants its work.
    #[must_use]
    pub fn cutting(&self) -> Cutting {
        self.blocks.cutting(self.n_resident)
    }

    /// Bytes of [`Workspace::arrivals`].
    #[must_use]
    pub fn arrivals_bytes(&self) -> usize {
        self.blocks.arrivals_bytes(self.cutting())
    }

    /// Bytes of [`Workspace::partial`].
    #[must_use]
    pub fn partial_bytes(&self) -> usize {
        PartialResults::n_bytes(self.n_partial_queries(), self.blocks.shape.head_dim)
    }

    /// Bytes of the results of shares that are put together with others.
    #[must_use]
    pub fn own_bytes(&self) -> usize {
        PartialResults::n_bytes(self.n_own_queries(), self.blocks.shape.head_dim)
    }

    fn n_own_queries(&self) -> usize {
        N_OWN_MAX * self.blocks.n_of_share() * N_COLUMNS
    }

    /// Leaves the results of shares that are put together with others: at most [`N_OWN_MAX`]. Returns where they lie.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short.
    pub(super) fn run_apart(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        list: DeviceShares,
        partial: Slice,
        arrivals: Slice,
    ) -> Result<PartialResults, CudaError> {
        let partial = PartialResults::of(partial, self.n_own_queries(), self.blocks.shape.head_dim);
        self.launch(stream, inputs, list, partial, arrivals)?;
        Ok(partial)
    }

    fn n_partial_queries(&self) -> usize {
        self.blocks.n_partial_queries(self.cutting())
    }

    /// Writes the outputs of the tokens in the list, and no others. The same list gives the same bits.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or there are more than 65,535 workers.
    pub fn run(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        list: DeviceShares,
        workspace: Workspace,
    ) -> Result<(), CudaError> {
        let partial =
            PartialResults::of(workspace.partial, self.n_partial_queries(), self.blocks.shape.head_dim);
        self.launch(stream, inputs, list, partial, workspace.arrivals)
    }

    fn launch(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        list: DeviceShares,
        partial: PartialResults,
        arrivals: Slice,
    ) -> Result<(), CudaError> {
        if list.workers.n_max == 0 {
            return Ok(());
        }
        let shape = &self.blocks.shape;
        expect_i32("arrivals", arrivals, self.arrivals_bytes() / 4);
        let params = AttentionDecodeParams {
            out: inputs.out.into(),
            q: inputs.q.into(),
            kv: inputs.check(shape, list),
            entries: inputs.entries.into(),
            shares: list.shares.into(),
            n_workers: list.workers.n.into(),
            partial_acc: partial.acc.into(),
            partial_ml: partial.ml.into(),
            arrivals: arrivals.into(),
            n_kv_heads: n_kv_heads(shape),
            page_stride: inputs.page_stride(),
            window: inputs.window(),
            scale_log2: shape.scale_log2(),
        };
        let launch = self.blocks.launch(list);
        // SAFETY: lengths were checked; the caller keeps tokens, page tables and page ids of the shares inside what
        // they index, and partial results below the most that the cutting leads to.
        unsafe { launch.run(stream, &self.kernel, &params) }
    }
}

#[cfg(test)]
#[path = "attention_decode_tests.rs"]
mod tests;
