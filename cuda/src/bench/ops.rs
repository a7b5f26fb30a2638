//! How fast each kernel is alone, on the shapes of a model: the launches of a decode step and of a prompt.

use trellis_engine::model::{Dtype, ModelConfig, inverse_frequencies};

use super::DeviceLimits;
use super::contexts::BenchContexts;
use super::products::Products;
use super::timer::Timer;
use crate::blas::fill_with_numbers;
use crate::model::{ActivationSizes, Activations, Kernels};
use crate::ops::common::RowCount;
use crate::{Buffer, Card, CudaError, Gpu, Plain, Stream};

/// Launches that are timed together.
const N_LAUNCHES: usize = 20;

/// Which step a kernel is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpStep {
    /// One token of each of so many contexts.
    Decode {
        /// Contexts.
        n_rows: usize,
        /// Positions of each, the new one included.
        context_len: usize,
    },
    /// A prompt, from its first token.
    Prompt {
        /// Its length.
        n_tokens: usize,
    },
    /// The last tokens of a prompt; attention alone.
    Chunk {
        /// How many.
        n_tokens: usize,
        /// Positions of the context, the new ones included.
        context_len: usize,
    },
    /// One token of each of several short contexts and of a long one; attention alone.
    Uneven {
        /// Short contexts.
        n_short: usize,
        /// Positions of each.
        short_len: usize,
        /// Positions of the long one.
        long_len: usize,
    },
    /// A few tokens of each of so many contexts, as guesses are verified; attention alone.
    Few {
        /// Contexts.
        n_rows: usize,
        /// Tokens of each.
        n_row_tokens: usize,
        /// Positions of each, the new ones included.
        context_len: usize,
    },
}

impl OpStep {
    /// Tokens that are computed.
    #[must_use]
    pub fn n_tokens(self) -> usize {
        self.rows().iter().map(|&(n_tokens, _)| n_tokens).sum()
    }

    /// Tokens of each context that are computed, the most of any.
    pub(super) fn n_row_tokens(self) -> usize {
        self.rows().iter().map(|&(n_tokens, _)| n_tokens).max().unwrap_or(0)
    }

    /// Tokens and positions of each context.
    pub(super) fn rows(self) -> Vec<(usize, usize)> {
        match self {
            Self::Decode { n_rows, context_len } => vec![(1, context_len); n_rows],
            Self::Prompt { n_tokens } => vec![(n_tokens, n_tokens)],
            Self::Chunk { n_tokens, context_len } => vec![(n_tokens, context_len)],
            Self::Uneven { n_short, short_len, long_len } => {
                let mut rows = vec![(1, short_len); n_short];
                rows.push((1, long_len));
                rows
            }
            Self::Few { n_rows, n_row_tokens, context_len } => vec![(n_row_tokens, context_len); n_rows],
        }
    }

    /// Whether only attention is measured: the rest depends on how many tokens there are, and on nothing else.
    fn is_attention_alone(self) -> bool {
        !matches!(self, Self::Decode { .. } | Self::Prompt { .. })
    }
}

impl std::fmt::Display for OpStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let contexts = |n: usize| if n == 1 { "1 context".to_owned() } else { format!("{n} contexts") };
        match *self {
            Self::Decode { n_rows, context_len } => {
                write!(f, "decode, {} of {context_len}", contexts(n_rows))
            }
            Self::Prompt { n_tokens } => write!(f, "prompt of {n_tokens}"),
            Self::Chunk { n_tokens, context_len } => {
                write!(f, "{n_tokens} queries against {context_len} keys")
            }
            Self::Uneven { n_short, short_len, long_len } => {
                write!(f, "decode, {} of {short_len} and one of {long_len}", contexts(n_short))
            }
            Self::Few { n_rows, n_row_tokens, context_len } => {
                write!(f, "{n_row_tokens} tokens a row, {} of {context_len}", contexts(n_rows))
            }
        }
    }
}

/// A kernel on one shape.
#[derive(Clone, Debug)]
pub struct OpSpeed {
    /// What it does in the decoder.
    pub op: &'static str,
    /// What does it.
    pub kernel: &'static str,
    /// The step that it is part of.
    pub step: OpStep,
    /// How often a step that takes the most probable tokens launches it.
    pub n_a_step: usize,
    /// Of one launch; the median.
    pub seconds: f64,
    /// What it has to read and to write at least: every input and every output once.
    pub n_bytes: u64,
    /// Multiplications and additions that it has to do.
    pub n_operations: u64,
}

impl OpSpeed {
    /// The time below which no kernel can do it: that of its bytes or of its operations, whichever is longer.
    #[must_use]
    pub fn floor_seconds(&self, limits: &DeviceLimits) -> f64 {
        let bytes_s = self.n_bytes as f64 / limits.read_bytes_per_s;
        bytes_s.max(self.n_operations as f64 / limits.product_flops)
    }

    /// Whether bytes are what bounds it, not operations.
    #[must_use]
    pub fn is_bound_by_bytes(&self, limits: &DeviceLimits) -> bool {
        self.n_bytes as f64 / limits.read_bytes_per_s >= self.n_operations as f64 / limits.product_flops
    }
}

/// Measures every kernel of a model in each of these steps. `progress` hears what comes next.
///
/// The weights are random numbers: a few copies of one matrix at a time, so that no cache holds them, and not the whole
/// model. Models on the card wait meanwhile.
///
/// # Errors
/// There is not enough memory, a library is missing, or the device failed.
///
/// # Panics
/// A step has no tokens, or contexts no positions.
pub fn ops(
    card: &Card,
    config: &ModelConfig,
    dtype: Dtype,
    steps: &[OpStep],
    progress: &dyn Fn(OpStep),
) -> Result<Vec<OpSpeed>, CudaError> {
    card.gpu().make_current()?;
    let stream = card.stream();
    let kernels = Kernels::load(card, config, dtype)?;
    let mut speeds = Vec::new();
    for &step in steps {
        progress(step);
        let bench = Bench::new(card, &stream, config, dtype, &kernels, step)?;
        if step.is_attention_alone() {
            bench.attention(&mut speeds)?;
            continue;
        }
        bench.embedding(&mut speeds)?;
        bench.layer(&mut speeds)?;
        bench.outputs(&mut speeds)?;
    }
    card.gpu().trim()?;
    Ok(speeds)
}

/// What one step works on.
pub(super) struct Bench<'a> {
    pub(super) stream: &'a Stream,
    pub(super) config: &'a ModelConfig,
    pub(super) dtype: Dtype,
    pub(super) kernels: &'a Kernels,
    pub(super) timer: Timer<'a>,
    pub(super) step: OpStep,
    pub(super) contexts: BenchContexts,
    pub(super) products: Products,
    pub(super) activations: Activations,
    _memory: Buffer,
    pub(super) tokens: Buffer,      // i32: how many
    pub(super) logits_rows: Buffer, // i32: how many
    pub(super) numbers: Buffer,     // T, for norms
    pub(super) inv_freq: Buffer,    // f32 [head_dim / 2]
    pub(super) card: &'a Card,
}

/// What a launch costs at least.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) n_bytes: usize,
    pub(super) n_operations: usize,
}

impl<'a> Bench<'a> {
    fn new(
        card: &'a Card,
        stream: &'a Stream,
        config: &'a ModelConfig,
        dtype: Dtype,
        kernels: &'a Kernels,
        step: OpStep,
    ) -> Result<Self, CudaError> {
        let gpu = card.gpu();
        let what = "measuring kernels";
        let n_tokens = step.n_tokens();
        assert!(n_tokens > 0, "{step:?} has tokens");
        let contexts = BenchContexts::new(gpu, stream, config, kernels, step)?;
        let size = ActivationSizes {
            n_tokens,
            n_logits_rows: n_logits_rows(step),
            partial_bytes: contexts.partial_bytes,
        };
        let memory = gpu.allocate(what, Activations::n_bytes(config, dtype, size))?;
        // Also where f32 lies: two bf16 of size up to 1 are one f32 of size up to 1.
        let numbers_dtype = if dtype == Dtype::F32 { Dtype::F32 } else { Dtype::Bf16 };
        fill_with_numbers(stream, memory.slice(), numbers_dtype)?;
        let activations = Activations::place(memory.slice(), config, dtype, size);
        let products = Products::new(card, stream, config, dtype)?;
        let numbers = gpu.allocate(what, config.hidden_size.max(config.head_dim) * dtype.n_bytes())?;
        fill_with_numbers(stream, numbers.slice(), dtype)?;
        let frequencies = inverse_frequencies(&config.rope, config.head_dim);
        Ok(Self {
            stream,
            config,
            dtype,
            kernels,
            timer: Timer::new(gpu, stream)?,
            step,
            contexts,
            products,
            activations,
            _memory: memory,
            tokens: upload(card, stream, &[n_tokens as i32])?,
            logits_rows: upload(card, stream, &[n_logits_rows(step) as i32])?,
            numbers,
            inv_freq: upload(card, stream, &frequencies)?,
            card,
        })
    }

    pub(super) fn tokens(&self) -> RowCount {
        RowCount { n_max: self.step.n_tokens(), n: self.tokens.slice() }
    }

    pub(super) fn logits_rows(&self) -> RowCount {
        RowCount { n_max: n_logits_rows(self.step), n: self.logits_rows.slice() }
    }

    /// Times one kernel.
    pub(super) fn time(
        &self,
        speeds: &mut Vec<OpSpeed>,
        (op, kernel): (&'static str, &'static str),
        n_a_step: usize,
        work: Work,
        launch: impl FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let seconds = self.timer.seconds(N_LAUNCHES, launch)?;
        let (n_bytes, n_operations) = (work.n_bytes as u64, work.n_operations as u64);
        speeds.push(OpSpeed { op, kernel, step: self.step, n_a_step, seconds, n_bytes, n_operations });
        Ok(())
    }
}

/// Every context that is decoded gets a token; a prompt gets one, attention alone needs none.
fn n_logits_rows(step: OpStep) -> usize {
    match step {
        OpStep::Decode { n_rows, .. } => n_rows,
        _ => 1,
    }
}

pub(super) fn upload<T: Plain>(card: &Card, stream: &Stream, values: &[T]) -> Result<Buffer, CudaError> {
    upload_to(card.gpu(), stream, values)
}

pub(super) fn upload_to<T: Plain>(gpu: &Gpu, stream: &Stream, values: &[T]) -> Result<Buffer, CudaError> {
    let buffer = gpu.allocate("measuring kernels", size_of_val(values))?;
    buffer.slice().upload(stream, values)?;
    Ok(buffer)
}

#[cfg(test)]
#[path = "ops_tests.rs"]
mod tests;
