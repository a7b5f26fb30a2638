//! Loading a model onto a card: what it takes, whether it fits, and all that has to be there before its first step.

use std::collections::VecDeque;
use std::thread;
use std::time::Instant;

use trellis_engine::N_STRETCHES_MAX;
use trellis_engine::backend::{AskLimits, Limits, PAGE_LEN, SteeringTimes};
use trellis_engine::model::{Dtype, Model, ModelConfig, ModelError};

use super::{CudaBackend, TrimmedAfter};
use crate::blas::BLOCK_TOKENS;
use crate::kept::KeptRows;
use crate::memory::{HostPages, granule_bytes};
use crate::model::load as weights_files;
use crate::model::{Activations, Kernels, Llama, Weights, weights};
use crate::ops::attention::Attention;
use crate::ops::topn::N_TOP_MAX;
use crate::ops::{attention, logits, norm};
use crate::step::{
    LATE_MASK_BYTES_MAX, MASK_BYTES_MAX, N_COPIED_PAGES, N_SCORES_MAX, N_SLOTS, N_TOP_ENTRIES_MAX,
    StepLimits, Steps, given_bytes, whole_bytes,
};
use crate::{Card, CudaError, Event, Timing};

/// Rows of logits in memory at once: a step of decoding that needs no more is captured whole. Those of 1,024 rows over 128K
/// tokens are 525 MB, which is too much for a small card: past the fewest they take a 128th of the card's memory at most.
const N_LOGITS_ROWS_FEWEST: usize = 256;
const N_LOGITS_ROWS_MOST: usize = 1024;
const LOGITS_SHARE: usize = 128;

/// A launch that adds what tokens are steered by, between two others that wait for one another: a step has one behind each
/// layer, and one before them.
const STEER_LAUNCH_NS: u64 = 2_000;
/// What is brought with a step is written down by the host, then copied over the link.
const BROUGHT_KIB_NS: u64 = 100;

/// Contexts that keep a hidden state for each row of a step, as long as all of them are not too long.
const N_STATES_PER_ROW: usize = 4;
const STATES_BYTES_MAX: usize = 32 << 20;

/// Positions that a context has to have room for, unless the model has fewer.
const N_POSITIONS_MIN: usize = 2048;

/// Pages of a model at most: kernels count their cells in 32 bits.
const N_PAGES_MAX: u64 = (u32::MAX as u64) / PAGE_LEN as u64;

/// Sizes of a CUDA backend.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Type of weights, activations and KV; that of the checkpoint when `None`.
    pub dtype: Option<Dtype>,
    /// Memory of KV pages at first. Contexts may become as long as it holds, and the model has positions.
    pub kv_bytes: u64,
    /// The most that KV pages will ever take: so many addresses they have.
    pub kv_bytes_max: u64,
    /// Host memory to swap pages to: it is taken, and page-locked, as pages are moved there, and 64 MiB ahead of them.
    pub kv_host_bytes: u64,
    /// The most rows in one batch.
    pub n_rows_max: usize,
    /// The most tokens in one batch.
    pub n_tokens_max: usize,
}

/// What a model takes of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Weights.
    pub weight_bytes: u64,
    /// What steps are described in, and what they leave of contexts: page tables, tokens beside pages, hidden states.
    pub step_bytes: u64,
    /// What steps compute in, and rows that models leave for each other, beyond what is on the card for that already: models
    /// share the largest.
    pub activation_bytes: u64,
    /// What steps compute in, whatever is on the card.
    pub all_activation_bytes: u64,
    /// One page of keys and values in all layers.
    pub page_bytes: u64,
    /// Pages that get their memory, and lose it, together; a page on a device that cannot map memory.
    pub granule_bytes: u64,
    /// The least for KV that is worth a model: a short context, in whole granules.
    pub kv_bytes_min: u64,
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
        /// Of which KV pages.
        kv_bytes: u64,
        /// Free on the device.
        free_bytes: u64,
        /// Of the device.
        total_bytes: u64,
    },
}

impl CudaBackend {
    /// Bytes of one page of keys and values in all layers.
    #[must_use]
    pub fn page_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
        let layer_len = 2 * config.n_kv_heads * PAGE_LEN * config.head_dim;
        (config.n_layers * layer_len * dtype.n_bytes()) as u64
    }

    /// What a model will take of a card, before any of it is read. How much it gets for pages is left to the caller; the
    /// length of granules follows [`CudaOptions::kv_bytes_max`]. Compiles its kernels, which loading it does not do again.
    ///
    /// # Errors
    /// The kernels do not take such a model, or cannot be compiled.
    pub fn needs(card: &Card, model: &Model, options: &CudaOptions) -> Result<Needs, LoadError> {
        let config = &model.config;
        check_supported(config)?;
        check_sizes(config, options)?;
        let dtype = options.dtype.unwrap_or(model.dtype);
        card.gpu().make_current()?;
        Ok(needs(card, config, dtype, options, &Kernels::attention(card, config, dtype)?))
    }

    /// Loads a model's weights onto the card, beside the steps of others. `progress` hears bytes loaded and bytes in all.
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
        let begun = Instant::now();
        let note = |what| tracing::debug!(model = model.name, elapsed = ?begun.elapsed(), "{what}");
        let gpu = card.gpu();
        gpu.make_current()?;
        // Nothing of a load goes through the stream of the steps, or waits for it.
        let stream = gpu.stream()?;
        let (kernels, blas, weights, kv, needs, pages) = thread::scope(|scope| {
            // The library takes a while to begin.
            let blas = scope.spawn(|| card.blas());
            let kernels = Kernels::load(card, config, dtype)?;
            note("kernels are loaded");
            let needs = needs(card, config, dtype, options, &kernels.attention);
            let pages = match gpu.map_unit_bytes() {
                Some(_) => Pages::of(&needs, options.kv_bytes, options.kv_bytes_max),
                // What has memory at first is all there will be.
                None => Pages::all(&needs, options.kv_bytes),
            };
            // Before anything is read: a model that cannot fit should be refused at once.
            let kv_bytes = gpu.taken_bytes(pages.n_first * needs.page_bytes as usize);
            fit(card, model, &needs, kv_bytes as u64)?;
            let (weights, parts) = Weights::allocate(gpu, config, dtype)?;
            let page_bytes = needs.page_bytes as usize;
            // Thousands of calls where a card is large; they need nothing of the weights.
            let kv = scope.spawn(move || {
                let range_bytes = pages.n_max * page_bytes;
                let mut kv = gpu.reserve("KV pages", range_bytes, pages.n_granule * page_bytes)?;
                kv.resize(pages.n_first * page_bytes)?;
                Ok::<_, CudaError>(kv)
            });
            let is_shared = || card.is_computing();
            weights_files::load(gpu, &model.checkpoint, dtype, &parts, &is_shared, progress)?;
            note("weights are loaded");
            let blas = blas.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let kv = kv.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok::<_, LoadError>((kernels, blas, weights, kv, needs, pages))
        })?;
        note("pages and cuBLASLt are there");
        let page_bytes = needs.page_bytes as usize;
        let llama = Llama::new(gpu, &stream, config, kernels, weights, blas, dtype)?;
        let limits = StepLimits { n_pages: pages.n_max, ..step_limits(card, config, dtype, options) };
        match llama.tune(&stream, limits.n_tokens_max, limits.n_logits_rows, &|| card.is_computing()) {
            // The library's own choice will do.
            Err(error @ CudaError::OutOfMemory { .. }) => {
                tracing::warn!(%error, "matrix products are not tuned");
            }
            tuned => tuned?,
        }
        if !card.is_computing() {
            // What was taken to time products in.
            gpu.trim()?;
        }
        note("matrix products are tuned");
        let steps = Steps::new(card, &stream, &llama, limits)?;
        note("steps have their memory");
        if !card.is_computing() {
            card.load_kept_programs();
        }
        let n_host_pages = (options.kv_host_bytes / needs.page_bytes) as usize;
        Ok(Self {
            limits: Limits {
                n_pages: pages.n_max,
                n_granule_pages: pages.n_granule.min(pages.n_max),
                n_host_pages,
                page_bytes,
                n_rows_max: options.n_rows_max,
                n_tokens_max: options.n_tokens_max,
                n_tile_tokens: llama.kernels().attention.cuttings().prompt_tokens(),
                n_block_tokens: if dtype == Dtype::F32 { 1 } else { BLOCK_TOKENS },
                n_queries_per_key: config.n_heads / config.n_kv_heads,
                n_positions_max: config.n_positions.min(pages.n_first * PAGE_LEN),
                vocab_size: config.vocab_size,
                hidden_size: config.hidden_size,
                n_layers: config.n_layers,
                n_steps_under_way: 2,
                n_slots: N_SLOTS,
                n_states: limits.n_states,
                logits_tokens: config.logits_tokens(),
                n_stretches_max: match config.windows.iter().any(Option::is_some) {
                    true => 0,
                    false => N_STRETCHES_MAX,
                },
                steering: SteeringTimes {
                    step_ns: STEER_LAUNCH_NS * (config.n_layers as u64 + 1),
                    kib_ns: BROUGHT_KIB_NS,
                },
                asks: AskLimits {
                    whole_bytes: whole_bytes(config.vocab_size),
                    n_top_max: N_TOP_MAX,
                    n_top_entries: N_TOP_ENTRIES_MAX,
                    n_scores: N_SCORES_MAX,
                    mask_bytes: MASK_BYTES_MAX,
                    late_mask_bytes: LATE_MASK_BYTES_MAX,
                    given_bytes: given_bytes(config.vocab_size),
                    n_history_pages: N_COPIED_PAGES,
                },
            },
            device: gpu.name().to_owned(),
            weight_bytes: weights::n_bytes(config, dtype),
            under_way: VecDeque::new(),
            draws: VecDeque::new(),
            steps,
            llama,
            kv,
            host_pages: HostPages::new(gpu, n_host_pages, page_bytes)?,
            copied: Event::new(gpu, Timing::Off)?,
            _trimmed: TrimmedAfter(gpu.clone()),
            card: card.clone(),
        })
    }
}

fn step_limits(card: &Card, config: &ModelConfig, dtype: Dtype, options: &CudaOptions) -> StepLimits {
    let n_states_fitting = STATES_BYTES_MAX / (size_of::<f32>() * config.hidden_size);
    let kv_bytes = options.kv_bytes.max(options.kv_bytes_max);
    StepLimits {
        n_tokens_max: options.n_tokens_max,
        n_rows_max: options.n_rows_max,
        n_positions_max: config.n_positions,
        n_logits_rows: options.n_rows_max.min(options.n_tokens_max).min(n_logits_rows(card, config)),
        n_pages: n_pages(CudaBackend::page_bytes(config, dtype), kv_bytes),
        n_states: (N_STATES_PER_ROW * options.n_rows_max).min(n_states_fitting),
    }
}

fn needs(
    card: &Card,
    config: &ModelConfig,
    dtype: Dtype,
    options: &CudaOptions,
    attention: &Attention,
) -> Needs {
    let gpu = card.gpu();
    let limits = step_limits(card, config, dtype, options);
    let activation_bytes = Activations::n_bytes(config, dtype, Steps::size(attention, limits));
    let page_bytes = CudaBackend::page_bytes(config, dtype) as usize;
    let kv_bytes = |n_positions: usize| n_positions.div_ceil(PAGE_LEN) * page_bytes;
    let granule_bytes = match gpu.map_unit_bytes() {
        Some(unit_bytes) => {
            let range_bytes = options.kv_bytes.max(options.kv_bytes_max) as usize;
            granule_bytes(page_bytes, unit_bytes, kv_bytes(config.n_positions), range_bytes)
        }
        None => page_bytes,
    };
    let kept_bytes_missing = card.kept_bytes_missing(config.vocab_size);
    let kv_bytes_min = kv_bytes(config.n_positions.min(N_POSITIONS_MIN)).next_multiple_of(granule_bytes);
    Needs {
        weight_bytes: gpu.taken_bytes(weights::n_bytes(config, dtype) as usize) as u64,
        step_bytes: Steps::n_bytes(attention, config, limits) as u64,
        activation_bytes: (card.step_bytes_missing(activation_bytes) + kept_bytes_missing) as u64,
        all_activation_bytes: (activation_bytes + KeptRows::n_bytes(config.vocab_size)) as u64,
        page_bytes: page_bytes as u64,
        granule_bytes: granule_bytes as u64,
        kv_bytes_min: kv_bytes_min as u64,
    }
}

/// Whether a model fits beside what is on the card, with so much for its pages.
fn fit(card: &Card, model: &Model, needs: &Needs, kv_bytes: u64) -> Result<(), LoadError> {
    let gpu = card.gpu();
    let free_bytes = gpu.free_bytes()? as u64;
    let Needs { weight_bytes, step_bytes, activation_bytes, .. } = *needs;
    let step_bytes = step_bytes + activation_bytes;
    let needed_bytes = weight_bytes + step_bytes + kv_bytes;
    if needed_bytes <= free_bytes {
        return Ok(());
    }
    Err(LoadError::DoesNotFit {
        model: model.name.clone(),
        needed_bytes,
        weight_bytes,
        step_bytes,
        kv_bytes,
        free_bytes,
        total_bytes: gpu.total_bytes() as u64,
    })
}

/// Numbers of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pages {
    /// That have addresses.
    n_max: usize,
    /// That have memory at first.
    n_first: usize,
    /// That get their memory together.
    n_granule: usize,
}

impl Pages {
    /// Memory for as much as was asked for, rounded down to granules, but for one at least, and addresses for the most.
    fn of(needs: &Needs, kv_bytes: u64, kv_bytes_max: u64) -> Self {
        let n_granule = (needs.granule_bytes / needs.page_bytes) as usize;
        let n_wanted = n_pages(needs.page_bytes, kv_bytes);
        let n_max = n_pages(needs.page_bytes, kv_bytes_max).max(n_wanted);
        let n_first = match n_wanted == n_max {
            true => n_max,
            false => (n_wanted / n_granule).max(1).saturating_mul(n_granule).min(n_max),
        };
        Self { n_max, n_first, n_granule }
    }

    /// All of them at once and for ever.
    fn all(needs: &Needs, kv_bytes: u64) -> Self {
        let n = n_pages(needs.page_bytes, kv_bytes);
        Self { n_max: n, n_first: n, n_granule: n }
    }
}

/// Kernels count the cells of all pages in 32 bits.
fn n_pages(page_bytes: u64, kv_bytes: u64) -> usize {
    (kv_bytes / page_bytes).clamp(1, N_PAGES_MAX) as usize
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_memory_by_granules_or_all_of_it() {
        let needs = Needs {
            weight_bytes: 0,
            step_bytes: 0,
            activation_bytes: 0,
            all_activation_bytes: 0,
            page_bytes: 100,
            granule_bytes: 1000,
            kv_bytes_min: 1000,
        };
        let pages = |kv_bytes, kv_bytes_max| {
            let Pages { n_max, n_first, n_granule } = Pages::of(&needs, kv_bytes, kv_bytes_max);
            assert_eq!(n_granule, 10);
            (n_max, n_first)
        };
        assert_eq!(pages(2599, 9950), (99, 20));
        assert_eq!(pages(2599, 2599), (25, 25));
        assert_eq!(pages(2599, 0), (25, 25));
        // One granule, or all where that is less.
        assert_eq!(pages(0, 9950), (99, 10));
        assert_eq!(pages(0, 720), (7, 7));
        assert_eq!(pages(u64::MAX, 0), (N_PAGES_MAX as usize, N_PAGES_MAX as usize));
        assert_eq!(Pages::all(&needs, 2599), Pages { n_max: 25, n_first: 25, n_granule: 25 });
    }
}
