//! The backend that executes batches on a card.

use std::path::Path;
use std::thread;

use trellis_engine::backend::{Backend, BackendError, Limits, PAGE_LEN, WeightsInfo};
use trellis_engine::batch::{Batch, HostPageId, Output, PageId};
use trellis_engine::model::{Dtype, Model, ModelConfig, ModelError};

use crate::activations::Activations;
use crate::blas::Blas;
use crate::guess::{Guess, successors};
use crate::kernels::Kernels;
use crate::llama::Llama;
use crate::ops::{attention, logits, norm};
use crate::step::StepRow;
use crate::steps::{InFlight, StepLimits, Steps};
use crate::swap::HostPages;
use crate::weights::Weights;
use crate::{Buffer, Card, CudaError, load, weights};

/// Rows of logits in memory at once: what a full step of decoding needs, and 128K tokens of 256 rows are 131 MB.
const N_LOGITS_ROWS_MAX: usize = 256;

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

/// Executes batches on a card.
#[derive(Debug)]
pub struct CudaBackend {
    limits: Limits,
    device: String,
    weight_bytes: u64,
    guess: Option<Guess>,
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
                n_logits_rows: options.n_rows_max.min(options.n_tokens_max).min(N_LOGITS_ROWS_MAX),
            };
            let decode = &kernels.attention_decode;
            let size = Steps::size(decode, gpu.n_multiprocessors(), limits);
            let activation_bytes = Activations::n_bytes(config, dtype, size);
            let step_bytes = Steps::n_bytes(decode, limits) + card.step_bytes_missing(activation_bytes);
            // Before anything is read: a model that cannot fit should be refused at once.
            fit(step_bytes as u64, kv_bytes, false)?;

            let (weights, parts) = Weights::allocate(gpu, config, dtype)?;
            load::load(gpu, &model.checkpoint, dtype, &parts, progress)?;
            let llama = {
                let stream = card.turn();
                Llama::new(gpu, &stream, config, kernels, weights, blas, dtype)?
            };
            match llama.tune(&card.turn(), limits.n_tokens_max, limits.n_logits_rows) {
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
                    n_host_pages,
                    page_bytes,
                    n_rows_max: options.n_rows_max,
                    n_tokens_max: options.n_tokens_max,
                    n_positions_max: config.n_positions.min(n_pages * PAGE_LEN),
                    vocab_size: config.vocab_size,
                    hidden_size: config.hidden_size,
                },
                device: gpu.name().to_owned(),
                weight_bytes,
                guess: None,
                steps,
                llama,
                kv,
                host_pages,
                card: card.clone(),
            })
        })
    }

    fn run(&mut self, batch: &Batch<'_>) -> Result<Vec<Output>, CudaError> {
        let guess = self.guess.take();
        let guessed: Vec<Option<usize>> =
            batch.rows.iter().map(|row| guess.as_ref().and_then(|guess| guess.row(row))).collect();
        let left: Vec<StepRow<'_>> = batch
            .rows
            .iter()
            .zip(&guessed)
            .filter(|(_, guessed)| guessed.is_none())
            .map(|(row, _)| StepRow::of(row))
            .collect();
        let kv = self.kv.slice();
        let left = match left.is_empty() && batch.copies.is_empty() {
            true => None,
            false => Some(self.steps.launch(&self.llama, kv, &left, &batch.copies)?),
        };
        // What the host drew, the device does not have.
        if left.as_ref().is_none_or(InFlight::is_all_on_device) {
            self.guess = self.look_ahead(batch)?;
        }
        // The stream runs them in this order, so the answers of the first are there when those of the second are.
        let ahead = match guess.filter(|_| guessed.iter().any(Option::is_some)) {
            Some(guess) => self.steps.wait(guess.in_flight)?,
            None => Vec::new(),
        };
        let left = left.map_or(Ok(Vec::new()), |left| self.steps.wait(left))?;
        let mut left = left.into_iter();
        let mut outputs = Vec::new();
        for (row, guessed) in batch.rows.iter().zip(guessed) {
            let first_idx = outputs.len();
            match guessed {
                // A row of a guess asks for one draw.
                Some(row_idx) => outputs.push(ahead[row_idx].clone()),
                None => outputs.extend(left.by_ref().take(row.outputs.len())),
            }
            if let Some(guess) = &mut self.guess {
                guess.learn(row.slot, &outputs[first_idx..]);
            }
        }
        Ok(outputs)
    }

    /// Puts the step that will probably follow into the stream.
    fn look_ahead(&mut self, batch: &Batch<'_>) -> Result<Option<Guess>, CudaError> {
        let Some(rows) = successors(&batch.rows) else { return Ok(None) };
        if rows.is_empty() || !self.steps.needs_no_host(&self.llama, &rows) {
            return Ok(None);
        }
        let in_flight = self.steps.launch(&self.llama, self.kv.slice(), &rows, &[])?;
        Ok(Some(Guess::new(&batch.rows, in_flight)))
    }

    fn error(&self, error: CudaError) -> BackendError {
        let device = self.device.clone();
        match error {
            CudaError::OutOfMemory { needed_bytes, free_bytes, .. } => {
                BackendError::OutOfMemory { device, needed_bytes, free_bytes }
            }
            CudaError::Call { call, reason } => BackendError::Device { device, call, reason },
            other => BackendError::Device { device, call: "a step", reason: other.to_string() },
        }
    }
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

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Vec<Output>, BackendError> {
        // The engine's thread is another than the one that loaded the model.
        let run = self.card.gpu().make_current().and_then(|()| self.run(batch));
        run.map_err(|error| self.error(error))
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        let current = self.card.gpu().make_current();
        let card = self.card.clone();
        let copied = current.and_then(|()| self.host_pages.swap_out(&card.turn(), self.kv.slice(), moves));
        copied.map_err(|error| self.error(error))
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        let current = self.card.gpu().make_current();
        let copied =
            current.and_then(|()| self.host_pages.swap_in(&self.card.turn(), self.kv.slice(), moves));
        copied.map_err(|error| self.error(error))
    }
}

#[cfg(test)]
mod tests;
