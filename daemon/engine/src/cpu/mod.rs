//! The CPU backend: exact, deterministic, the reference for every other.
//!
//! Weights, KV pages and sums are f32. What a row gets does not depend on its neighbours, bit for bit:
//! projections are computed by a kernel whose order of operations does not depend on the number of rows
//! (see `linear`), everything else is computed row by row, and attention goes through the pages of a context
//! in one order (see `attention`).

mod attention;
mod decoder;
mod elementwise;
mod kept;
mod late;
mod linear;
mod masses;
mod mixed;
mod output;
mod pages;
mod plan;
mod threads;
mod weights;

use std::num::NonZeroUsize;
use std::time::Instant;

use self::decoder::Decoder;
use self::late::LateDraw;
use self::output::Answers;
use self::pages::{KvPages, N_GRANULE_PAGES, PageLayout};
use self::plan::TokenLayout;
use self::threads::Threads;
use self::weights::Weights;
use crate::backend::{
    AskLimits, Backend, BackendError, Collected, Damage, KvBytes, KvPlace, Limits, SteeringTimes, WeightsInfo,
};
use crate::batch::{Batch, CellMove, HostPageId, LateMask, PageId};
use crate::kept::KeptRow;
use crate::kv::N_STRETCHES_MAX;
use crate::model::{Dtype, Model, ModelConfig, ModelError, tensors};

/// Contexts whose last hidden state is kept: 16 MiB for a hidden size of 4,096.
const N_STATES: usize = 1024;

/// Pages that have addresses: as many as ids tell apart, nearly.
const N_PAGES_MAX: usize = 1 << 30;

/// Sizes of a CPU backend.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// KV pages at first. Memory is taken from the system when a page is first written.
    pub n_pages: usize,
    /// Pages of host memory to swap to, taken likewise.
    pub n_host_pages: usize,
    /// Threads; one for each core when `None`.
    pub n_threads: Option<NonZeroUsize>,
    /// The most rows in one batch.
    pub n_rows_max: usize,
    /// The most tokens in one batch.
    pub n_tokens_max: usize,
}

/// Why a CPU backend could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The weights could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Memory or threads could not be had.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Executes batches on the processor.
pub struct CpuBackend {
    limits: Limits,
    weights: WeightsInfo,
    device: String,
    decoder: Decoder,
    kv: KvPages,
    threads: Threads,
    /// The step that was submitted last, until it is collected: done but for late draws.
    done: Option<Collected>,
    /// The late draws of that step.
    late: Vec<LateDraw>,
}

impl CpuBackend {
    /// Pages that get their memory, and lose it, together.
    pub const N_GRANULE_PAGES: usize = N_GRANULE_PAGES;

    /// Bytes of one page of f32 keys and values in all layers.
    #[must_use]
    pub fn page_bytes(config: &ModelConfig) -> u64 {
        (PageLayout::new(config).page_len() * size_of::<f32>()) as u64
    }

    /// Loads a model's weights.
    ///
    /// # Errors
    /// The weights cannot be read, or memory or threads cannot be had.
    pub fn new(model: &Model, options: &CpuOptions) -> Result<Self, CpuError> {
        Self::with_tensors(&model.config, options, |name, values| {
            model.checkpoint.read_f32(name, values).map_err(CpuError::from)
        })
    }

    /// A backend over weights from anywhere: `read` fills the buffer with the named tensor, row by row. Names
    /// and shapes are those of [`crate::model::tensors::expected`].
    ///
    /// # Errors
    /// `read` failed, or memory or threads cannot be had.
    pub fn with_tensors<E: From<BackendError>>(
        config: &ModelConfig,
        options: &CpuOptions,
        read: impl FnMut(&str, &mut [f32]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let n_cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let n_threads = options.n_threads.map_or(n_cores, NonZeroUsize::get);
        let device = format!("cpu ({n_threads} threads)");
        let layout = PageLayout::new(config);
        let page_bytes = layout.page_len() * size_of::<f32>();
        let kv = KvPages::new(layout, options.n_pages, options.n_host_pages).ok_or_else(|| {
            let CpuOptions { n_pages, n_host_pages, .. } = options;
            BackendError::Device {
                device: device.clone(),
                call: "allocation of KV pages",
                reason: format!("no memory for {n_pages} + {n_host_pages} pages of {page_bytes} bytes"),
                damage: Damage::Call,
            }
        })?;
        let decoder = Decoder::new(config, Weights::load(config, read)?);
        let n_weights: usize =
            tensors::expected(config).iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
        Ok(Self {
            limits: Limits {
                n_pages: N_PAGES_MAX.max(options.n_pages),
                n_granule_pages: N_GRANULE_PAGES,
                n_host_pages: options.n_host_pages,
                page_bytes,
                n_rows_max: options.n_rows_max,
                n_tokens_max: options.n_tokens_max,
                n_tile_tokens: 1,
                n_block_tokens: 1,
                n_queries_per_key: config.n_heads / config.n_kv_heads,
                n_positions_max: config.n_positions,
                vocab_size: config.vocab_size,
                hidden_size: config.hidden_size,
                n_layers: config.n_layers,
                n_steps_under_way: 1,
                n_slots: 0,
                n_states: N_STATES,
                n_stretches_max: match config.windows.iter().any(Option::is_some) {
                    true => 0,
                    false => N_STRETCHES_MAX,
                },
                logits_tokens: config.logits_tokens(),
                steering: SteeringTimes::NONE,
                asks: AskLimits::NONE,
            },
            weights: WeightsInfo { dtype: Dtype::F32, n_bytes: (n_weights * size_of::<f32>()) as u64 },
            done: None,
            late: Vec::new(),
            decoder,
            kv,
            threads: Threads::new(n_threads).map_err(|error| BackendError::Device {
                device: device.clone(),
                call: "start of threads",
                reason: error.to_string(),
                damage: Damage::Call,
            })?,
            device,
        })
    }
}

impl Backend for CpuBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn weights(&self) -> WeightsInfo {
        self.weights
    }

    fn device(&self) -> &str {
        &self.device
    }

    fn keep_row(&mut self) -> Option<KeptRow> {
        Some(kept::place())
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        assert!(self.done.is_none(), "one step is under way at a time");
        let begun = Instant::now();
        for copy in batch.copies {
            self.kv.copy(copy.src, copy.dst);
        }
        for pack in batch.rows.iter().filter_map(|row| row.evicted.as_ref()).flat_map(|evicted| evicted.packs)
        {
            self.kv.pack(pack);
        }
        let plan = TokenLayout::new(batch, &self.limits, self.decoder.n_layers());
        if plan.places.is_empty() && plan.questions.is_empty() {
            self.done = Some(Collected::default());
            return Ok(());
        }
        let Self { decoder, kv, threads, .. } = self;
        let n_tokens = plan.places.len().max(plan.questions.len());
        let Answers { outputs, late } = threads.run(n_tokens, || decoder.run(&plan, kv));
        self.late = late;
        self.done = Some(Collected { outputs, elapsed: begun.elapsed() });
        Ok(())
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        let mut collected = self.done.take().expect("a step is under way");
        if !self.late.is_empty() {
            let (begun, draws) = (Instant::now(), std::mem::take(&mut self.late));
            self.threads.run(draws.len(), || late::draw(draws, &mut collected.outputs));
            collected.elapsed += begun.elapsed();
        }
        Ok(collected)
    }

    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        late::supply(&mut self.late, masks);
        Ok(Vec::new())
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn n_pages(&self) -> usize {
        self.kv.n_pages()
    }

    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError> {
        if self.kv.resize(n_pages) {
            return Ok(());
        }
        Err(BackendError::Device {
            device: self.device.clone(),
            call: "allocation of KV pages",
            reason: format!("no memory for {n_pages} pages of {} bytes", self.limits.page_bytes),
            damage: Damage::Call,
        })
    }

    fn can_release_host_pages(&self) -> bool {
        true
    }

    fn release_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> u64 {
        self.kv.release_host_pages(free, at_most)
    }

    fn keeps_host_memory(&self) -> bool {
        self.kv.keeps_host_memory()
    }

    fn gather_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        self.kv.gather_host_pages(free, at_most)
    }

    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        moves.iter().for_each(|&(src, dst)| self.kv.copy(src, dst));
        Ok(())
    }

    fn move_cells(&mut self, moves: &[CellMove]) -> Result<(), BackendError> {
        moves.iter().for_each(|cell| self.kv.move_cell(cell.src, cell.dst));
        Ok(())
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        moves.iter().for_each(|&(src, dst)| self.kv.swap_out(src, dst));
        Ok(())
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        moves.iter().for_each(|&(src, dst)| self.kv.swap_in(src, dst));
        Ok(())
    }

    fn kv_bytes(&mut self) -> Option<&mut dyn KvBytes> {
        Some(self)
    }
}

impl KvBytes for CpuBackend {
    fn format(&self) -> String {
        self.kv.format()
    }

    fn read(&mut self, pages: &[KvPlace], into: &mut Vec<u8>) -> Result<(), BackendError> {
        pages.iter().for_each(|&page| into.extend_from_slice(self.kv.bytes(page)));
        Ok(())
    }

    fn write(&mut self, pages: &[HostPageId], from: &[u8]) -> Result<(), BackendError> {
        let parts = from.chunks_exact(self.limits.page_bytes);
        pages.iter().zip(parts).for_each(|(&page, bytes)| self.kv.fill(page, bytes));
        Ok(())
    }
}
