//! The contexts of a step: pages in no order, tables and lists of work on the device.

use trellis_engine::model::ModelConfig;

use super::{OpStep, upload_to};
use crate::blas::fill_with_numbers;
use crate::kernels::Kernels;
use crate::ops::attention::{Contexts, KvLayer, PAGE_LEN, RowSpan, Tile, Tiles, plan_tiles};
use crate::ops::attention_decode::DecodeWorkspace;
use crate::ops::common::{Dtype, Rows};
use crate::{Buffer, CudaError, Gpu, Slice, Stream};

/// Layers beyond this are left out: what is measured goes through the others in turn, and no cache holds so much.
const KV_BYTES: usize = 4 << 30;

/// KV pages and what says where they are.
pub(super) struct BenchContexts {
    n_rows: usize,
    /// Positions of each context.
    pub(super) context_len: usize,
    /// Layers that the pages have.
    pub(super) n_layers: usize,
    layer_len: usize,
    page_bytes: usize,
    n_pages_of_row: usize,
    kv: Buffer,
    pub(super) positions: Buffer, // i32 [tokens]
    pub(super) kv_pages: Buffer,  // i32 [tokens]
    row_start: Buffer,            // i32 [rows + 1]
    row_pos0: Buffer,             // i32 [rows]
    page_table: Buffer,           // i32 [rows, n_pages_of_row]
    page_pairs: Buffer,           // i32 [rows, 2]
    work: Buffer,                 // i32 [items or tiles, 2]
    n_work: usize,
    work_count: Buffer,   // i32: how many
    copies_count: Buffer, // i32: how many
    pub(super) n_splits: usize,
    pub(super) partial_bytes: usize,
    arrivals: Buffer, // i32
}

/// The id of the page `idx`, of `n`: a permutation, as pages lie after some time of use.
fn shuffled(idx: usize, n: usize) -> i32 {
    const STRIDE: usize = 7919; // a prime
    let stride = if n.is_multiple_of(STRIDE) { 1 } else { STRIDE };
    (idx * stride % n) as i32
}

impl BenchContexts {
    pub(super) fn new(
        gpu: &Gpu,
        stream: &Stream,
        config: &ModelConfig,
        kernels: &Kernels,
        step: OpStep,
    ) -> Result<Self, CudaError> {
        let (n_rows, context_len, n_row_tokens) = match step {
            OpStep::Decode { n_rows, context_len } => (n_rows, context_len, 1),
            OpStep::Prompt { n_tokens } => (1, n_tokens, n_tokens),
        };
        assert!(context_len > 0, "{step:?} has positions");
        let pos0 = context_len - n_row_tokens;
        let shape = kernels.attention_shape;
        let layer_len = shape.layer_len();
        let n_pages_of_row = context_len.div_ceil(PAGE_LEN);
        // As many again as rows, for copies.
        let n_pages = n_rows * n_pages_of_row + n_rows;
        let layer_bytes = n_pages * layer_len * shape.dtype.n_bytes();
        let n_layers = (KV_BYTES / layer_bytes).clamp(1, config.n_layers.max(1));
        let kv = gpu.allocate("measuring kernels", n_layers * layer_bytes)?;
        fill_with_numbers(stream, kv.slice(), shape.dtype)?;

        let n_used = n_rows * n_pages_of_row;
        let page = |row: usize, position: usize| shuffled(row * n_pages_of_row + position / PAGE_LEN, n_used);
        let tokens = || (0..n_rows).flat_map(|row| (pos0..context_len).map(move |position| (row, position)));
        let positions: Vec<i32> = tokens().map(|(_, position)| position as i32).collect();
        let kv_pages: Vec<i32> = tokens().map(|(row, position)| page(row, position)).collect();
        let row_start: Vec<i32> = (0..=n_rows).map(|row| (row * n_row_tokens) as i32).collect();
        let page_table: Vec<i32> = (0..n_used).map(|idx| shuffled(idx, n_used)).collect();
        let page_pairs: Vec<i32> =
            (0..n_rows).flat_map(|row| [page(row, context_len - 1), (n_used + row) as i32]).collect();
        let tile_len = match step {
            OpStep::Decode { .. } => 1,
            OpStep::Prompt { .. } => kernels.attention_prefill.tile_len(),
        };
        let spans: Vec<RowSpan> =
            (0..n_rows).map(|row_idx| RowSpan { row_idx, n_tokens: n_row_tokens, pos0 }).collect();
        let mut tiles: Vec<Tile> = Vec::new();
        plan_tiles(&spans, tile_len, config.windows.first().copied().flatten(), &mut tiles);
        let work: Vec<i32> = tiles.iter().flat_map(|tile| tile.words()).collect();

        let decode = &kernels.attention_decode;
        let n_splits = decode.n_splits(gpu.n_multiprocessors(), n_rows, context_len);
        let arrivals = gpu.allocate("measuring kernels", decode.arrivals_bytes(n_rows))?;
        arrivals.slice().fill(stream, 0)?;
        Ok(Self {
            n_rows,
            context_len,
            n_layers,
            layer_len,
            page_bytes: n_layers * layer_len * shape.dtype.n_bytes(),
            n_pages_of_row,
            kv,
            positions: upload_to(gpu, stream, &positions)?,
            kv_pages: upload_to(gpu, stream, &kv_pages)?,
            row_start: upload_to(gpu, stream, &row_start)?,
            row_pos0: upload_to(gpu, stream, &vec![pos0 as i32; n_rows])?,
            page_table: upload_to(gpu, stream, &page_table)?,
            page_pairs: upload_to(gpu, stream, &page_pairs)?,
            work: upload_to(gpu, stream, &work)?,
            n_work: tiles.len(),
            work_count: upload_to(gpu, stream, &[tiles.len() as i32])?,
            copies_count: upload_to(gpu, stream, &[n_rows as i32])?,
            n_splits,
            partial_bytes: decode.partial_bytes(n_rows, n_splits),
            arrivals,
        })
    }

    /// All pages.
    pub(super) fn kv(&self) -> Slice {
        self.kv.slice()
    }

    /// Elements of a page.
    pub(super) fn page_len(&self) -> usize {
        self.n_layers * self.layer_len
    }

    /// Bytes of a page.
    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// The layer that a launch works on, each one in its turn.
    pub(super) fn layer_of(&self, launch_idx: usize) -> usize {
        launch_idx % self.n_layers
    }

    pub(super) fn layer(&self, launch_idx: usize) -> KvLayer {
        let layer_idx = self.layer_of(launch_idx);
        KvLayer { pages: self.kv.slice(), page_stride: self.page_len(), layer_idx }
    }

    pub(super) fn table(&self) -> Contexts {
        Contexts {
            n_rows_max: self.n_rows,
            row_start: self.row_start.slice(),
            row_pos0: self.row_pos0.slice(),
            page_table: self.page_table.slice(),
            page_table_stride: self.n_pages_of_row,
        }
    }

    /// What attention works through.
    pub(super) fn work(&self) -> Tiles {
        let count = Rows { n_max: self.n_work, n: self.work_count.slice() };
        Tiles { count, list: self.work.slice() }
    }

    pub(super) fn workspace(&self, partial: Slice) -> DecodeWorkspace {
        DecodeWorkspace { arrivals: self.arrivals.slice(), partial }
    }

    /// Copies of the last page of each context.
    pub(super) fn copies(&self) -> (Rows, Slice) {
        (Rows { n_max: self.n_rows, n: self.copies_count.slice() }, self.page_pairs.slice())
    }

    /// Pairs of queries and keys that attend to each other, over all rows, and keys that are read, of one KV head.
    pub(super) fn n_pairs_and_keys(&self, window: Option<usize>) -> (usize, usize) {
        let window = window.unwrap_or(usize::MAX);
        let n_row_tokens = self.positions_of_row();
        let pos0 = self.context_len - n_row_tokens;
        let pairs: usize = (pos0..self.context_len).map(|position| (position + 1).min(window)).sum();
        let keys = self.context_len.min(window.saturating_add(n_row_tokens - 1));
        (self.n_rows * pairs, self.n_rows * keys)
    }

    fn positions_of_row(&self) -> usize {
        self.positions.slice().n_bytes / 4 / self.n_rows
    }
}

/// Types that attention and pages take.
pub(super) fn kv_bytes(dtype: Dtype, n_keys: usize, n_kv_heads: usize, head_dim: usize) -> usize {
    2 * n_keys * n_kv_heads * head_dim * dtype.n_bytes()
}
