//! The backend that executes batches on a card.

use std::collections::VecDeque;
use std::path::Path;
use std::thread;

use trellis_engine::backend::{Backend, BackendError, Collected, Damage, Limits, PAGE_LEN, WeightsInfo};
use trellis_engine::batch::{Batch, HostPageId, Input, LateMask, Output, PageId, Row, SlotId, Token};
use trellis_engine::model::{Dtype, Model, ModelConfig, ModelError};

use crate::blas::Blas;
use crate::memory::HostPages;
use crate::model::{Activations, Kernels, Llama, Weights, load, weights};
use crate::ops::{attention, logits, norm};
use crate::step::{InFlight, N_SLOTS, StepLimits, StepRow, Steps};
use crate::{Buffer, Card, CudaError};

/// Rows of logits in memory at once: a step of decoding that needs no more is captured whole. Those of 1,024 rows over 128K
/// tokens are 525 MB, which is too much for a small card: past the fewest they take a 128th of the card's memory at most.
const N_LOGITS_ROWS_FEWEST: usize = 256;
const N_LOGITS_ROWS_MOST: usize = 1024;
const LOGITS_SHARE: usize = 128;

/// Positions that a context has to have room for, unless the model has fewer.
const N_POSITIONS_MIN: usize = 2048;

/// Sizes of a CUDA backend.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Type of weights, activations and KV; that of the checkpoint when `None`.
    pub dtype: Option<Dtype>,
    /// Memory of KV pages.
    pub kv: KvSize,
    /// Pinned host memory to swap pages to.
    pub kv_host_bytes: u64,
    /// The most rows in one batch.
    pub n_rows_max: usize,
    /// The most tokens in one batch.
    pub n_tokens_max: usize,
}

/// How much of the card the KV pages take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSize {
    /// So many bytes.
    Bytes(u64),
    /// What is left on the card, except for so many bytes.
    RestBut(u64),
}

/// Why a model could not be loaded onto a card.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The weights could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// No kernel takes a model of this shape.
    #[error("the CUDA kernels take {what} {expected}; here it is {found}")]
    Unsupported {
        /// Which number.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        found: usize,
    },
    /// It does not fit.
    #[error(
        "model {model:?} needs {needed_bytes} bytes of device memory ({weight_bytes} of weights, {step_bytes} for steps, \
         {kv_bytes} for the KV cache), {free_bytes} of {total_bytes} are free"
    )]
    DoesNotFit {
        /// The model.
        model: String,
        /// All of it.
        needed_bytes: u64,
        /// Of which weights.
        weight_bytes: u64,
        /// Of which activations and workspaces.
        step_bytes: u64,
        /// Of which KV pages: what was asked for, or what one short context takes.
        kv_bytes: u64,
        /// Free on the device.
        free_bytes: u64,
        /// Of the device.
        total_bytes: u64,
    },
}

/// A step that was submitted and not collected.
#[derive(Debug)]
enum UnderWay {
    InStream(InFlight),
    Done(Result<Collected, CudaError>),
}

/// Executes batches on a card.
#[derive(Debug)]
pub struct CudaBackend {
    limits: Limits,
    device: String,
    weight_bytes: u64,
    /// Steps that were submitted and not collected, the oldest first.
    under_way: VecDeque<UnderWay>,
    /// For each of them the slots of its rows, with the last output of each.
    draws: VecDeque<Vec<(SlotId, usize)>>,
    /// Waits for the stream before the memory below goes.
    steps: Steps,
    llama: Llama,
    kv: Buffer, // pages
    host_pages: HostPages,
    card: Card,
}

impl CudaBackend {
    /// Bytes of one page of keys and values in all layers.
    #[must_use]
    pub fn page_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
        let layer_len = 2 * config.n_kv_heads * PAGE_LEN * config.head_dim;
        (config.n_layers * layer_len * dtype.n_bytes()) as u64
    }

    /// Bytes that the weights of a model take on a card.
    #[must_use]
    pub fn weight_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
        weights::n_bytes(config, dtype)
    }

    /// Loads a model's weights onto the card. `progress` hears bytes loaded and bytes in all.
    ///
    /// # Errors
    /// The weights cannot be read, the card has not enough memory, or it failed.
    pub fn load(
        card: &Card,
        model: &Model,
        options: &CudaOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, LoadError> {
        let config = &model.config;
        check_supported(config)?;
        check_sizes(config, options)?;
        let dtype = options.dtype.unwrap_or(model.dtype);
        let gpu = card.gpu();
        gpu.make_current()?;
        let page_bytes = Self::page_bytes(config, dtype) as usize;
        let n_host_pages = (options.kv_host_bytes / page_bytes as u64) as usize;
        thread::scope(|scope| {
            // Page-locking takes a second for a few GiB; meanwhile the weights are read.
            let host_pages = scope.spawn(move || HostPages::new(gpu, n_host_pages, page_bytes));
            let kernels = Kernels::load(card, config, dtype)?;
            let blas = Blas::new(gpu, card.blas_workspace(), card.cache_dir().map(Path::to_owned))?;
            let weight_bytes = weights::n_bytes(config, dtype);
            let fit = |step_bytes: u64, kv_bytes: u64, has_weights: bool| {
                let free_bytes = gpu.free_bytes().map_err(LoadError::Cuda)? as u64;
                let needed_bytes = step_bytes + kv_bytes + if has_weights { 0 } else { weight_bytes };
                if needed_bytes <= free_bytes {
                    return Ok(free_bytes - needed_bytes);
                }
                Err(LoadError::DoesNotFit {
                    model: model.name.clone(),
                    needed_bytes,
                    weight_bytes: if has_weights { 0 } else { weight_bytes },
                    step_bytes,
                    kv_bytes,
                    free_bytes,
                    total_bytes: gpu.total_bytes() as u64,
                })
            };
            let n_positions_min = config.n_positions.min(N_POSITIONS_MIN);
            let kv_bytes_min = (n_positions_min.div_ceil(PAGE_LEN) * page_bytes) as u64;
            let kv_bytes = match options.kv {
                KvSize::Bytes(n_bytes) => n_bytes.max(page_bytes as u64),
                KvSize::RestBut(_) => kv_bytes_min,
            };
            let limits = StepLimits {
                n_tokens_max: options.n_tokens_max,
                n_rows_max: options.n_rows_max,
                n_positions_max: config.n_positions,
                n_logits_rows: options.n_rows_max.min(options.n_tokens_max).min(n_logits_rows(card, config)),
            };
            let attention = &kernels.attention;
            let size = Steps::size(attention, limits);
            let activation_bytes = Activations::n_bytes(config, dtype, size);
            let step_bytes = Steps::n_bytes(attention, &config.windows, limits)
                + card.step_bytes_missing(activation_bytes);
            // Before anything is read: a model that cannot fit should be refused at once.
            fit(step_bytes as u64, kv_bytes, false)?;

            let (weights, parts) = Weights::allocate(gpu, config, dtype)?;
            load::load(gpu, &model.checkpoint, dtype, &parts, progress)?;
            let llama = {
                let stream = card.stream();
                Llama::new(gpu, &stream, config, kernels, weights, blas, dtype)?
            };
            match llama.tune(&card.stream(), limits.n_tokens_max, limits.n_logits_rows) {
                // The library's own choice will do.
                Err(error @ CudaError::OutOfMemory { .. }) => {
                    tracing::warn!(%error, "matrix products are not tuned");
                }
                tuned => tuned?,
            }
            // What was taken to time products in.
            gpu.trim()?;
            let rest_bytes = fit(step_bytes as u64, kv_bytes, true)?;
            let steps = Steps::new(card, &llama, limits)?;
            let kv_bytes = match options.kv {
                KvSize::Bytes(_) => kv_bytes,
                KvSize::RestBut(n_bytes) => kv_bytes.max((kv_bytes + rest_bytes).saturating_sub(n_bytes)),
            };
            // A row of a page table, and the kernels, count pages in 31 bits.
            let n_pages = (kv_bytes as usize / page_bytes).min(i32::MAX as usize);
            let kv = gpu.allocate("KV pages", n_pages * page_bytes)?;
            let host_pages = host_pages.join().expect("page-locking does not panic")?;
            Ok(Self {
                limits: Limits {
                    n_pages,
                    n_granule_pages: n_pages,
                    n_host_pages,
                    page_bytes,
                    n_rows_max: options.n_rows_max,
                    n_tokens_max: options.n_tokens_max,
                    n_positions_max: config.n_positions.min(n_pages * PAGE_LEN),
                    vocab_size: config.vocab_size,
                    hidden_size: config.hidden_size,
                    n_steps_under_way: 2,
                    n_slots: N_SLOTS,
                    n_states: 0,
                    logits_tokens: config.logits_tokens(),
                },
                device: gpu.name().to_owned(),
                weight_bytes,
                under_way: VecDeque::new(),
                draws: VecDeque::new(),
                steps,
                llama,
                kv,
                host_pages,
                card: card.clone(),
            })
        })
    }

    /// Whether the device still works after an error. If so, nothing is left of the step in the stream.
    fn settle(&mut self, error: CudaError) -> CudaError {
        if error.damage() == Damage::Device {
            return error;
        }
        let settled = self.card.gpu().make_current().and_then(|()| self.card.stream().synchronize());
        match settled {
            Err(worse) if worse.damage() == Damage::Device => worse,
            _ => error,
        }
    }

    fn launch(&mut self, batch: &Batch<'_>) -> Result<(), CudaError> {
        self.card.gpu().make_current()?;
        let mut rows: Vec<StepRow<'_>> = batch.rows.iter().map(StepRow::of).collect();
        let mut completed: Vec<Vec<Token>> = Vec::new();
        let is_on_host = match self.under_way.back() {
            Some(UnderWay::InStream(before)) => before.has_host_work(),
            Some(UnderWay::Done(_)) => true,
            None => false,
        };
        let has_drawn = rows.iter().any(StepRow::has_drawn);
        if has_drawn && (is_on_host || self.steps.draws_unknown_on_host(&self.llama, &rows)) {
            // The host can draw only after tokens that it knows.
            self.wait_for_all();
            completed = batch.rows.iter().map(|row| self.known_tokens(row)).collect();
            rows =
                batch.rows.iter().zip(&completed).map(|(row, tokens)| StepRow::known(row, tokens)).collect();
        }
        let in_flight = self.steps.launch(&self.llama, self.kv.slice(), &rows, batch.copies)?;
        drop(rows);
        drop(completed);
        self.under_way.push_back(UnderWay::InStream(in_flight));
        // What each row drew last, in the order of the requests.
        let ends = batch.rows.iter().scan(0, |n, row| {
            *n += row.outputs.len();
            Some((row.slot, *n))
        });
        self.draws.push_back(ends.filter(|&(_, end)| end > 0).map(|(slot, end)| (slot, end - 1)).collect());
        Ok(())
    }

    /// Waits for every step under way, without collecting any.
    fn wait_for_all(&mut self) {
        for step in &mut self.under_way {
            if let UnderWay::InStream(in_flight) = step {
                *step = UnderWay::Done(self.steps.wait(std::mem::take(in_flight)));
            }
        }
    }

    /// The row's tokens, with the one that the step before drew for it.
    fn known_tokens(&self, row: &Row<'_>) -> Vec<Token> {
        let mut tokens = row.tokens.to_vec();
        if row.input == Input::Drawn {
            let drawn = self.under_way.back().zip(self.draws.back()).and_then(|(step, draws)| {
                let UnderWay::Done(Ok(collected)) = step else { return None };
                let &(_, output_idx) = draws.iter().find(|&&(slot, _)| slot == row.slot)?;
                match collected.outputs.get(output_idx) {
                    Some(Output::Sampled(candidate)) => Some(candidate.token),
                    _ => None,
                }
            });
            // Where nothing was drawn nobody will look at what comes of the row.
            tokens.push(drawn.unwrap_or(0));
        }
        tokens
    }

    /// The step that was submitted last has failed.
    fn give_up_last(&mut self, error: CudaError) -> BackendError {
        self.under_way.pop_back();
        self.draws.pop_back();
        self.error(error)
    }

    fn error(&mut self, error: CudaError) -> BackendError {
        let device = self.device.clone();
        let error = self.settle(error);
        let damage = error.damage();
        match error {
            CudaError::OutOfMemory { needed_bytes, free_bytes, .. } => {
                BackendError::OutOfMemory { device, needed_bytes, free_bytes }
            }
            CudaError::Call { call, reason, .. } => BackendError::Device { device, call, reason, damage },
            other => BackendError::Device { device, call: "a step", reason: other.to_string(), damage },
        }
    }
}

/// The most rows of logits that are in memory at once.
fn n_logits_rows(card: &Card, config: &ModelConfig) -> usize {
    let n_affordable = card.gpu().total_bytes() / LOGITS_SHARE / (size_of::<f32>() * config.vocab_size);
    n_affordable.clamp(N_LOGITS_ROWS_FEWEST, N_LOGITS_ROWS_MOST)
}

/// Whether the kernels take a model of this shape.
fn check_supported(config: &ModelConfig) -> Result<(), LoadError> {
    let head_dim_max = attention::HEAD_DIM_MAX;
    let numbers = [
        (
            "a head length that is",
            format!("a multiple of 8 of at most {head_dim_max}"),
            config.head_dim,
            config.head_dim.is_multiple_of(8) && config.head_dim <= head_dim_max,
        ),
        (
            "a vocabulary of",
            format!("at most {} entries", logits::VOCAB_SIZE_MAX),
            config.vocab_size,
            config.vocab_size <= logits::VOCAB_SIZE_MAX,
        ),
        (
            "a hidden size of",
            format!("a multiple of 8 of at most {}", norm::HIDDEN_SIZE_MAX),
            config.hidden_size,
            config.hidden_size.is_multiple_of(8) && config.hidden_size <= norm::HIDDEN_SIZE_MAX,
        ),
        (
            "an intermediate size that is",
            "a multiple of 8".to_owned(),
            config.intermediate_size,
            config.intermediate_size.is_multiple_of(8),
        ),
    ];
    match numbers.into_iter().find(|(.., holds)| !holds) {
        Some((what, expected, found, _)) => Err(LoadError::Unsupported { what, expected, found }),
        None => Ok(()),
    }
}

/// Whether launches can count what a step of these sizes has.
fn check_sizes(config: &ModelConfig, options: &CudaOptions) -> Result<(), LoadError> {
    let grid_max = usize::from(u16::MAX);
    let page_len = config.n_layers * 2 * config.n_kv_heads * PAGE_LEN * config.head_dim;
    let numbers = [
        ("steps of", format!("at most {grid_max} contexts"), options.n_rows_max, grid_max),
        ("steps of", format!("at most {grid_max} tokens"), options.n_tokens_max, grid_max),
        ("pages of", format!("at most {} keys and values", u32::MAX), page_len, u32::MAX as usize),
    ];
    match numbers.into_iter().find(|&(.., found, most)| found > most) {
        Some((what, expected, found, _)) => Err(LoadError::Unsupported { what, expected, found }),
        None => Ok(()),
    }
}

impl Backend for CudaBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn device(&self) -> &str {
        &self.device
    }

    fn weights(&self) -> WeightsInfo {
        WeightsInfo { dtype: self.llama.dtype, n_bytes: self.weight_bytes }
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        self.launch(batch).map_err(|error| self.error(error))
    }

    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<(), BackendError> {
        let Some(UnderWay::InStream(step)) = self.under_way.back_mut() else { return Ok(()) };
        let current = self.card.gpu().make_current();
        let supplied = current.and_then(|()| self.steps.supply(&self.llama, step, masks));
        supplied.map_err(|error| self.give_up_last(error))
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        let Some(UnderWay::InStream(step)) = self.under_way.back() else { return Ok(true) };
        let current = self.card.gpu().make_current();
        let waits = current.and_then(|()| self.steps.waits_for_masks(step));
        waits.map_err(|error| self.give_up_last(error))
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        self.draws.pop_front();
        // The engine's thread is another than the one that loaded the model.
        let current = self.card.gpu().make_current();
        let collected = match self.under_way.pop_front().expect("a step is under way") {
            UnderWay::InStream(in_flight) => current.and_then(|()| self.steps.wait(in_flight)),
            UnderWay::Done(collected) => collected,
        };
        collected.map_err(|error| self.error(error))
    }

    fn n_pages(&self) -> usize {
        self.limits.n_pages
    }

    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError> {
        assert_eq!(n_pages, self.limits.n_pages, "all pages are one granule");
        Ok(())
    }

    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        unreachable!("nothing has to make room: {moves:?}")
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        let current = self.card.gpu().make_current();
        let card = self.card.clone();
        let copied = current.and_then(|()| self.host_pages.swap_out(&card.stream(), self.kv.slice(), moves));
        copied.map_err(|error| self.error(error))
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        let current = self.card.gpu().make_current();
        let copied =
            current.and_then(|()| self.host_pages.swap_in(&self.card.stream(), self.kv.slice(), moves));
        copied.map_err(|error| self.error(error))
    }
}

#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod late_tests;
#[cfg(test)]
mod tests;
