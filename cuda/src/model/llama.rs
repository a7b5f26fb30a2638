//! The decoder: Llama, Mistral, Qwen2 and Qwen3, in one pass over the packed tokens of a step.
//!
//! Embedding, layers (see `layer.rs`), logits. The residual stream is f32; everything between is of the model's type T.

use trellis_engine::model::{Dtype, ModelConfig, inverse_frequencies};

use super::layer::{Layer, ProductInput};
use super::weights::Linear;
use super::{Activations, Kernels, Weights};
use crate::blas::{Blas, MatmulShape, Update, all_tuned};
use crate::ops::attention::{AttentionWork, Workspace};
use crate::ops::attention_plan::distinct;
use crate::ops::common::{Element, RowCount};
use crate::ops::embedding::{TokenIds, TokenPlaces};
use crate::ops::gather::Kept;
use crate::ops::gemv::{self, GemvOutput};
use crate::ops::masses::MassQuery;
use crate::ops::steer::SteeringPlaces;
use crate::{Buffer, CudaError, Gpu, Slice, Stream};

/// Matrices smaller than this are not worth the time to find their fastest product.
const TUNED_BYTES_MIN: usize = 4 << 20;

/// A decoder on the card.
#[derive(Debug)]
pub(crate) struct Llama {
    pub(crate) config: ModelConfig,
    pub(crate) dtype: Dtype,
    pub(super) kernels: Kernels,
    weights: Weights,
    pub(super) blas: Blas,
    pub(super) inv_freq: Buffer, // f32 [head_dim / 2]
    /// Of each layer, among the model's windows.
    pub(super) window_indices: Vec<usize>,
}

/// The tokens of a step and their contexts, on the device.
#[derive(Clone, Debug)]
pub(crate) struct LayerInputs {
    pub(crate) tokens: RowCount,
    pub(crate) ids: TokenIds,
    /// What each is rotated by.
    pub(crate) positions: Slice,
    /// Which cell takes each; cells count from the first of page 0.
    pub(crate) kv_cells: Slice,
    /// The tokens of all pages.
    pub(crate) page_tokens: Slice,
    /// Page tables.
    pub(crate) entries: Slice,
    /// Where the holes of their contexts are described, if there are any.
    pub(crate) holes: Option<Slice>,
    /// What attention works through, for each window that layers have.
    pub(crate) attention: Vec<AttentionWork>,
    /// Where it puts shares together.
    pub(crate) workspace: Workspace,
    /// All KV pages.
    pub(crate) kv: Slice,
    /// Tokens whose attention is asked for, in a step that is not captured.
    pub(crate) masses: StepMasses,
    /// What is added to tokens between layers, if anything is.
    pub(crate) steering: Option<SteeringPlaces>,
}

/// Tokens whose attention is asked for.
#[derive(Clone, Debug)]
pub(crate) struct StepMasses {
    /// Each with its layers.
    pub(crate) queries: Vec<(MassQuery, Vec<usize>)>,
    /// Where the numbers go.
    pub(crate) out: Slice, // f32
}

/// Which tokens have rows of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LogitsOf {
    /// Each one, its own.
    EachToken,
    /// Those that are gathered.
    Some,
}

/// Where the rows of logits come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitsRows {
    pub(crate) rows: RowCount,
    /// Where each comes from, and which slots keep its hidden state.
    pub(crate) kept: Kept,
    pub(crate) logits_of: LogitsOf,
    /// Whether the hidden states are asked for too.
    pub(crate) keeps_hidden: bool,
}

impl Llama {
    /// Takes over kernels and loaded weights.
    ///
    /// # Errors
    /// There is no memory, or the driver refused.
    pub(crate) fn new(
        gpu: &Gpu,
        stream: &Stream,
        config: &ModelConfig,
        kernels: Kernels,
        weights: Weights,
        blas: Blas,
        dtype: Dtype,
    ) -> Result<Self, CudaError> {
        let frequencies = inverse_frequencies(&config.rope, config.head_dim);
        let inv_freq = gpu.allocate("rotary frequencies", frequencies.len() * 4)?;
        inv_freq.slice().upload(stream, &frequencies)?;
        stream.synchronize()?;
        let windows = distinct(&config.windows);
        let idx_of = |window| windows.iter().position(|known| known == window).expect("each is listed");
        let window_indices = config.windows.iter().map(idx_of).collect();
        Ok(Self { config: config.clone(), dtype, kernels, weights, blas, inv_freq, window_indices })
    }

    /// The kernels.
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Finds the fastest matrix products for steps of up to so many tokens and rows of logits, as far as they are not
    /// known from before and nothing disturbs it.
    ///
    /// # Errors
    /// There is no memory to time them in, or a kernel failed.
    pub(crate) fn tune(
        &self,
        stream: &Stream,
        n_tokens: usize,
        n_logits_rows: usize,
        is_disturbed: &dyn Fn() -> bool,
    ) -> Result<(), CudaError> {
        let Some(layer) = self.weights.layers.first() else { return Ok(()) };
        let model = |linear| (linear, Element::Model, Update::Replace, n_tokens);
        let added = |linear| (linear, Element::F32, Update::Add, n_tokens);
        let head = (self.head(), Element::F32, Update::Replace, n_logits_rows);
        let products =
            [model(layer.qkv), added(layer.attention_output), model(layer.gate_up), added(layer.down), head];
        let large = products.into_iter().filter(|(linear, ..)| linear.matrix.n_bytes >= TUNED_BYTES_MIN);
        let shapes = large.flat_map(|(linear, out, update, n_max)| {
            let bucketed = all_tuned(n_max).into_iter().filter(|&n| n > gemv::N_ROWS_MAX);
            bucketed.map(move |n| self.product(n, linear, out, update))
        });
        self.blas.tune(stream, &shapes.collect::<Vec<_>>(), is_disturbed)
    }

    pub(super) fn product(
        &self,
        n_tokens: usize,
        linear: Linear,
        out: Element,
        update: Update,
    ) -> MatmulShape {
        MatmulShape { n_tokens, n_out: linear.n_out, n_in: linear.n_in, dtype: self.dtype, out, update }
    }

    fn head(&self) -> Linear {
        let ModelConfig { vocab_size, hidden_size, .. } = self.config;
        Linear { matrix: self.weights.lm_head, bias: None, n_out: vocab_size, n_in: hidden_size }
    }

    /// Computes the tokens and stores their keys and values; the residual stream holds the result. Before each layer,
    /// `between` is told how many are behind it: the residual stream holds what they made, and what was added to it.
    ///
    /// # Errors
    /// The driver refused a launch.
    pub(crate) fn layers(
        &self,
        stream: &Stream,
        step: &LayerInputs,
        a: &Activations,
        mut between: impl FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if step.tokens.n_max == 0 {
            return Ok(());
        }
        let hidden_size = self.config.hidden_size;
        let table = self.weights.embedding;
        let places = TokenPlaces { cells: step.kv_cells, page_tokens: step.page_tokens };
        self.kernels.embedding.run(stream, step.tokens, hidden_size, step.ids, places, table, a.residual)?;
        for (layer_idx, weights) in self.weights.layers.iter().enumerate() {
            self.steer(stream, step, a, layer_idx)?;
            between(layer_idx)?;
            let layer = Layer { stream, step, activations: a, weights, layer_idx };
            match step.tokens.n_max {
                0..=gemv::N_ROWS_MAX => self.decode_layer(layer)?,
                _ => self.prompt_layer(layer)?,
            }
        }
        self.steer(stream, step, a, self.weights.layers.len())
    }

    /// Adds to the residual stream of steered tokens, behind so many layers. A step without them launches nothing.
    fn steer(
        &self,
        stream: &Stream,
        step: &LayerInputs,
        a: &Activations,
        n_layers: usize,
    ) -> Result<(), CudaError> {
        let Some(steering) = step.steering else { return Ok(()) };
        self.kernels.steer.run(stream, step.tokens, self.config.hidden_size, n_layers, steering, a.residual)
    }

    /// Logits of the asked rows.
    ///
    /// # Errors
    /// The driver refused a launch.
    pub(crate) fn logits(
        &self,
        stream: &Stream,
        asked: LogitsRows,
        a: &Activations,
    ) -> Result<(), CudaError> {
        let LogitsRows { rows, kept, logits_of, keeps_hidden } = asked;
        let gathered = (logits_of == LogitsOf::Some).then_some(a.gathered);
        let row_bytes = self.config.hidden_size * 4;
        self.kernels.gather.run(stream, rows, row_bytes, a.residual, kept, gathered)?;
        let states = gathered.unwrap_or(a.residual);
        let (head, norm) = (self.head(), self.weights.final_norm);
        if rows.n_max > gemv::N_ROWS_MAX {
            self.norm(stream, rows, states, norm, a.hidden)?;
            let product = self.product(rows.n_max, head, Element::F32, Update::Replace);
            return self.blas.matmul(stream, product, a.hidden, head.matrix, a.logits);
        }
        let x = if keeps_hidden {
            self.norm(stream, rows, states, norm, a.hidden)?;
            ProductInput::Plain(a.hidden)
        } else {
            ProductInput::Normed { residual: states, weight: norm, normed: a.hidden }
        };
        self.gemv(stream, rows, x, head, GemvOutput::F32(a.logits))
    }

    /// Elements of a page over all layers.
    pub(crate) fn page_len(&self) -> usize {
        self.config.n_layers * self.kernels.attention.shape().layer_len()
    }
}
