//! The contexts of a step: pages in no order, tables and lists of work on the device.

use trellis_engine::model::ModelConfig;

use super::OpStep;
use super::ops::upload_to;
use crate::blas::fill_with_numbers;
use crate::model::Kernels;
use crate::ops::attention::{AttentionWork, DeviceShares, Form, KvLayer, PAGE_LEN, Workspace};
use crate::ops::attention_plan::AttentionPlan;
use crate::ops::common::{Dtype, RowCount};
use crate::ops::shares::{PageEntry, RowSpan};
use crate::{Buffer, CudaError, Gpu, Slice, Stream};

/// Layers beyond this are left out: what is measured goes through the others in turn, and no cache holds so much.
const KV_BYTES: usize = 4 << 30;

/// KV pages and what says where they are.
pub(super) struct BenchContexts {
    rows: Vec<RowSpan>,
    /// Layers that the pages have.
    pub(super) n_layers: usize,
    layer_len: usize,
    page_bytes: usize,
    kv: Buffer,
    pub(super) positions: Buffer, // i32 [tokens]
    pub(super) kv_cells: Buffer,  // u32 [tokens]
    page_tokens: Buffer,          // i32 [pages, PAGE_LEN]
    entries: Buffer,              // page tables
    page_pairs: Buffer,           // i32 [rows, 2]
    copies_count: Buffer,         // i32: how many
    lists: [Option<List>; Form::ALL.len()],
    pub(super) partial_bytes: usize,
    arrivals: Buffer, // i32
}

/// A list of shares on the device.
struct List {
    shares: Buffer,
    n_workers: usize,
    cuts: Buffer,
    n_cuts: usize,
    counts: Buffer, // i32: workers, cut tiles
}

impl List {
    fn upload(
        gpu: &Gpu,
        stream: &Stream,
        plan: &AttentionPlan,
        form: Form,
    ) -> Result<Option<Self>, CudaError> {
        let list = plan.list(0, form);
        if list.n_workers == 0 {
            return Ok(None);
        }
        let n_cuts = if form.sums_apart() { list.cuts.len() } else { 0 };
        Ok(Some(Self {
            shares: upload_to(gpu, stream, &list.shares)?,
            n_workers: list.n_workers,
            cuts: upload_to(gpu, stream, &[&list.cuts[..], &[Default::default()]].concat())?,
            n_cuts,
            counts: upload_to(gpu, stream, &[list.n_workers as i32, n_cuts as i32])?,
        }))
    }

    fn on_device(&self) -> DeviceShares {
        let count = |idx: usize, n_max| RowCount { n_max, n: self.counts.slice().part(4 * idx, 4) };
        DeviceShares {
            shares: self.shares.slice(),
            workers: count(0, self.n_workers),
            cut_list: self.cuts.slice(),
            cuts: count(1, self.n_cuts),
        }
    }
}

/// The id of the page `idx`, of `n`: a permutation, as pages lie after some time of use.
fn shuffled(idx: usize, n: usize) -> u32 {
    const STRIDE: usize = 7919; // a prime
    let stride = if n.is_multiple_of(STRIDE) { 1 } else { STRIDE };
    (idx * stride % n) as u32
}

impl BenchContexts {
    pub(super) fn new(
        gpu: &Gpu,
        stream: &Stream,
        config: &ModelConfig,
        kernels: &Kernels,
        step: OpStep,
    ) -> Result<Self, CudaError> {
        let shape = kernels.attention.shape();
        let layer_len = shape.layer_len();
        let mut rows = Vec::new();
        let (mut n_tokens, mut n_entries) = (0, 0);
        for (n_row_tokens, context_len) in step.rows() {
            assert!((1..=context_len).contains(&n_row_tokens), "{step:?} has tokens and positions");
            let position = context_len - n_row_tokens;
            rows.push(RowSpan {
                token: n_tokens,
                n_tokens: n_row_tokens,
                position,
                entries: n_entries,
                n_pages_alike: 0,
                has_holes: false,
            });
            n_tokens += n_row_tokens;
            n_entries += context_len.div_ceil(PAGE_LEN);
        }
        let n_rows = rows.len();
        // As many again as rows, for copies.
        let layer_bytes = (n_entries + n_rows) * layer_len * shape.dtype.n_bytes();
        let n_layers = (KV_BYTES / layer_bytes).clamp(1, config.n_layers.max(1));
        let kv = gpu.allocate("measuring kernels", n_layers * layer_bytes)?;
        fill_with_numbers(stream, kv.slice(), shape.dtype)?;
        let page_tokens =
            gpu.allocate("measuring kernels", (n_entries + n_rows) * PAGE_LEN * size_of::<i32>())?;

        let entries: Vec<PageEntry> = (0..n_entries).map(|idx| PageEntry(shuffled(idx, n_entries))).collect();
        let page = |row: &RowSpan, position: usize| entries[row.entries + position / PAGE_LEN].0 as i32;
        let tokens = || {
            rows.iter().flat_map(|row| (row.position..row.position + row.n_tokens).map(move |at| (row, at)))
        };
        let positions: Vec<i32> = tokens().map(|(_, position)| position as i32).collect();
        let cell = |(row, position): (&RowSpan, usize)| {
            page(row, position) as u32 * PAGE_LEN as u32 + (position % PAGE_LEN) as u32
        };
        let kv_cells: Vec<u32> = tokens().map(cell).collect();
        let last_page = |row: &RowSpan| page(row, row.position + row.n_tokens - 1);
        let page_pairs: Vec<i32> =
            rows.iter().zip(n_entries..).flat_map(|(row, copy)| [last_page(row), copy as i32]).collect();

        let mut plan = AttentionPlan::new(&[config.windows.first().copied().flatten()]);
        plan.plan(&rows, &kernels.attention.cuttings());
        let [single, few, prompt, shared, own, holed, many] =
            Form::ALL.map(|form| List::upload(gpu, stream, &plan, form));
        let arrivals = gpu.allocate("measuring kernels", kernels.attention.arrivals_bytes())?;
        arrivals.slice().fill(stream, 0)?;
        Ok(Self {
            n_layers,
            layer_len,
            page_bytes: n_layers * layer_len * shape.dtype.n_bytes(),
            kv,
            positions: upload_to(gpu, stream, &positions)?,
            kv_cells: upload_to(gpu, stream, &kv_cells)?,
            page_tokens,
            entries: upload_to(gpu, stream, &entries)?,
            page_pairs: upload_to(gpu, stream, &page_pairs)?,
            copies_count: upload_to(gpu, stream, &[n_rows as i32])?,
            lists: [single?, few?, prompt?, shared?, own?, holed?, many?],
            partial_bytes: kernels.attention.partial_bytes(),
            arrivals,
            rows,
        })
    }

    /// All pages.
    pub(super) fn kv(&self) -> Slice {
        self.kv.slice()
    }

    /// The tokens of all pages.
    pub(super) fn page_tokens(&self) -> Slice {
        self.page_tokens.slice()
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

    /// Page tables.
    pub(super) fn entries(&self) -> Slice {
        self.entries.slice()
    }

    /// What attention works through.
    pub(super) fn work(&self) -> AttentionWork {
        AttentionWork { lists: self.lists.each_ref().map(|list| list.as_ref().map(List::on_device)) }
    }

    pub(super) fn workspace(&self, partial: Slice) -> Workspace {
        Workspace { arrivals: self.arrivals.slice(), partial }
    }

    /// Copies of the last page of each context.
    pub(super) fn copies(&self) -> (RowCount, Slice) {
        (RowCount { n_max: self.rows.len(), n: self.copies_count.slice() }, self.page_pairs.slice())
    }

    /// Pairs of queries and keys that attend to each other, over all rows, and keys that are read, of one KV head.
    pub(super) fn n_pairs_and_keys(&self, window: Option<usize>) -> (usize, usize) {
        let window = window.unwrap_or(usize::MAX);
        let of_row = |row: &RowSpan| {
            let end = row.position + row.n_tokens;
            let pairs: usize = (row.position..end).map(|position| (position + 1).min(window)).sum();
            (pairs, end.min(window.saturating_add(row.n_tokens - 1)))
        };
        self.rows.iter().map(of_row).fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1))
    }
}

/// Types that attention and pages take.
pub(super) fn kv_bytes(dtype: Dtype, n_keys: usize, n_kv_heads: usize, head_dim: usize) -> usize {
    2 * n_keys * n_kv_heads * head_dim * dtype.n_bytes()
}
