//! Attention of single queries over pages: decoded tokens.

use super::attention::{
    AttentionInputs, AttentionShape, DeviceShares, PAGE_LEN, PartialResults, Workspace, grid_workers,
    n_kv_heads, source,
};
use super::cascade::N_OWN_MAX;
use super::common::{Dtype, expect_i32};
use super::shares::{Cutting, N_SHARES_MAX};
use crate::driver::params;
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
    shape: AttentionShape,
    /// Blocks that are resident together.
    n_resident: usize,
}

/// Queries of a block: the columns of a product.
pub(super) const N_COLUMNS: usize = 8;

/// Warps of a block: as many as the largest heads leave shared memory for.
fn n_warps(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 128 { 8 } else { 4 }
}

/// Pages that a warp has in shared memory: about 4 KiB of keys.
fn n_step_pages(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 64 { 2 } else { 1 }
}

/// Blocks of a multiprocessor that registers are shared out for; plain f32 needs all of them for one.
fn n_resident_blocks(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 128 && shape.dtype != Dtype::F32 { 2 } else { 1 }
}

/// `struct Shared` of the kernel.
fn shared_bytes(shape: &AttentionShape) -> usize {
    let (n_warps, head_dim) = (n_warps(shape), shape.head_dim);
    let steps = match shape.dtype {
        Dtype::F32 => 0,
        dtype => 2 * n_warps * n_step_pages(shape) * PAGE_LEN * head_dim * dtype.n_bytes(),
    };
    let merge = 4 * n_warps * N_COLUMNS * (head_dim + 2);
    let combine = 4 * N_COLUMNS * N_SHARES_MAX + 16 * 32 * n_warps;
    steps + merge.max(combine).next_multiple_of(16) + 16
}

/// Blocks of one share.
fn n_blocks_of_share(shape: &AttentionShape) -> usize {
    shape.n_kv_heads * shape.group_len().div_ceil(N_COLUMNS)
}

impl AttentionDecode {
    /// The source that holds the kernel for a shape.
    ///
    /// # Panics
    /// The shape is none that the kernel takes.
    #[must_use]
    pub fn source(shape: &AttentionShape) -> Source {
        let text = concat!(
            include_str!("common.cuh"),
            include_str!("attention.cuh"),
            include_str!("attention_decode.cu")
        );
        source(shape, "attention_decode.cu", text)
            .with("ATTN_WARPS", n_warps(shape))
            .with("ATTN_STEP_PAGES", n_step_pages(shape))
            .with("ATTN_RESIDENT", n_resident_blocks(shape))
            .with("ATTN_SHARED_BYTES", shared_bytes(shape))
    }

    /// Finds the kernel in the module of [`AttentionDecode::source`] for the same shape.
    ///
    /// # Errors
    /// The driver refused, or the device has too little shared memory.
    pub fn new(module: &Module, shape: AttentionShape) -> Result<Self, CudaError> {
        let kernel: Kernel<AttentionDecodeParams> = module.kernel("attention_decode")?;
        let shared_bytes = shared_bytes(&shape);
        kernel.allow_shared_bytes(shared_bytes)?;
        let n_resident = kernel.n_resident_blocks(32 * n_warps(&shape), shared_bytes)?;
        Ok(Self { kernel, shape, n_resident })
    }

    /// Tokens that fill the columns of a product; `None` where one token's heads are more than that.
    #[must_use]
    pub fn n_tokens_max(shape: &AttentionShape) -> Option<usize> {
        Some(N_COLUMNS / shape.group_len()).filter(|&n_tokens| n_tokens > 0)
    }

    /// How the kernel wants its work.
    #[must_use]
    pub fn cutting(&self) -> Cutting {
        Cutting {
            tile_tokens: Self::n_tokens_max(&self.shape).unwrap_or(1),
            n_workers: (self.n_resident / n_blocks_of_share(&self.shape)).max(1),
            // Less would leave warps of a block without a page.
            quantum_pages: n_warps(&self.shape) * n_step_pages(&self.shape),
        }
    }

    /// Bytes of [`Workspace::arrivals`].
    #[must_use]
    pub fn arrivals_bytes(&self) -> usize {
        4 * self.cutting().n_partials_max() * n_blocks_of_share(&self.shape)
    }

    /// Bytes of [`Workspace::partial`].
    #[must_use]
    pub fn partial_bytes(&self) -> usize {
        PartialResults::n_bytes(self.n_partial_queries(), self.shape.head_dim)
    }

    /// Bytes of the results that [`Self::run_apart`] leaves.
    #[must_use]
    pub fn own_bytes(&self) -> usize {
        PartialResults::n_bytes(self.n_own_queries(), self.shape.head_dim)
    }

    fn n_own_queries(&self) -> usize {
        N_OWN_MAX * n_blocks_of_share(&self.shape) * N_COLUMNS
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
        let partial = PartialResults::of(partial, self.n_own_queries(), self.shape.head_dim);
        self.launch(stream, inputs, list, partial, arrivals)?;
        Ok(partial)
    }

    fn n_partial_queries(&self) -> usize {
        self.cutting().n_partials_max() * n_blocks_of_share(&self.shape) * N_COLUMNS
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
        let partial = PartialResults::of(workspace.partial, self.n_partial_queries(), self.shape.head_dim);
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
        let shape = &self.shape;
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
        let launch = Launch {
            grid: (n_blocks_of_share(shape) as u32, grid_workers(list.workers), 1),
            block: (32 * n_warps(shape) as u32, 1, 1),
            shared_bytes: shared_bytes(shape) as u32,
        };
        // SAFETY: lengths were checked; the caller keeps tokens, page tables and page ids of the shares inside what
        // they index, and partial results below the most that the cutting leads to.
        unsafe { launch.run(stream, &self.kernel, &params) }
    }
}

#[cfg(test)]
#[path = "attention_decode_tests.rs"]
mod tests;
