//! One layer of the decoder: once for a few tokens, as in decoding, and once for many, as in a prompt.

use trellis_engine::model::ModelConfig;

use super::weights::{LayerWeights, Linear};
use super::{Activations, LayerInputs, Llama};
use crate::blas::Update;
use crate::ops::attention::{AttentionInputs, KvLayer};
use crate::ops::attention_holes::HolesInputs;
use crate::ops::common::{Element, RowCount};
use crate::ops::gemv::{GemvInput, GemvOutput, GemvShape, GemvWeights};
use crate::ops::norm::NormWeights;
use crate::ops::rope::{HeadNorm, HeadShape, HeadTensors, HeadWeights};
use crate::{CudaError, Slice, Stream};

/// What a layer works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer<'a> {
    pub(super) stream: &'a Stream,
    pub(super) step: &'a LayerInputs,
    pub(super) activations: &'a Activations,
    pub(super) weights: &'a LayerWeights,
    pub(super) layer_idx: usize,
}

/// The input of a product of a few rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum ProductInput {
    /// It is there.
    Plain(Slice),
    /// The RMSNorm of the residual stream, computed on the way; or in a launch of its own, into `normed`, where the shared
    /// memory has no room for the rows.
    Normed { residual: Slice, weight: Slice, normed: Slice },
}

impl Llama {
    /// Up to [`N_ROWS_MAX`](crate::ops::gemv::N_ROWS_MAX) tokens, in six launches.
    ///
    /// ```text
    /// qkv       = RMSNorm(residual) Wqkv^T                gemv, the norm on the way
    /// q, pages  = rotate(qkv + bias)                      rope
    /// attended  = softmax(q K^T) V over the pages         attention
    /// residual += attended Wo^T + bias                    gemv
    /// inner     = silu(gate) · up, of RMSNorm(residual)   gemv, norm and activation on the way
    /// residual += inner Wdown^T + bias                    gemv
    /// ```
    pub(super) fn decode_layer(&self, layer: Layer<'_>) -> Result<(), CudaError> {
        let Layer { stream, step, activations: a, weights: w, .. } = layer;
        let tokens = step.tokens;
        let x = ProductInput::Normed { residual: a.residual, weight: w.input_norm, normed: a.normed };
        self.gemv(stream, tokens, x, without_bias(w.qkv), GemvOutput::Model(a.qkv))?;
        self.rotate(layer)?;
        self.attend(layer)?;
        let x = ProductInput::Plain(a.attended);
        self.gemv(stream, tokens, x, w.attention_output, GemvOutput::AddF32(a.residual))?;
        let x = ProductInput::Normed { residual: a.residual, weight: w.mlp_norm, normed: a.mlp_normed };
        self.gemv(stream, tokens, x, w.gate_up, GemvOutput::SwiGlu(a.inner))?;
        let x = ProductInput::Plain(a.inner);
        self.gemv(stream, tokens, x, w.down, GemvOutput::AddF32(a.residual))
    }

    /// More tokens: norms and activation are launches of their own, products go to cuBLASLt.
    pub(super) fn prompt_layer(&self, layer: Layer<'_>) -> Result<(), CudaError> {
        let Layer { stream, step, activations: a, weights: w, .. } = layer;
        let tokens = step.tokens;
        self.norm(stream, tokens, a.residual, w.input_norm, a.normed)?;
        self.multiply(stream, tokens, a.normed, w.qkv, a.qkv)?;
        self.rotate(layer)?;
        self.attend(layer)?;
        self.add_product(stream, tokens, a.attended, w.attention_output, a.residual)?;
        self.norm(stream, tokens, a.residual, w.mlp_norm, a.mlp_normed)?;
        self.multiply(stream, tokens, a.mlp_normed, w.gate_up, a.gate_up)?;
        let intermediate_size = self.config.intermediate_size;
        self.kernels.swiglu.run(stream, tokens, intermediate_size, a.gate_up, w.gate_up.bias, a.inner)?;
        self.add_product(stream, tokens, a.inner, w.down, a.residual)
    }

    /// Adds the bias of the projection, rotates queries and keys, writes keys and values into their pages.
    fn rotate(&self, layer: Layer<'_>) -> Result<(), CudaError> {
        let Layer { stream, step, activations: a, weights: w, layer_idx } = layer;
        let ModelConfig { n_heads, n_kv_heads, head_dim, rms_norm_eps: eps, .. } = self.config;
        let shape = HeadShape { n_heads, n_kv_heads, head_dim, page_stride: self.page_len(), layer_idx };
        let norm = w.head_norms.map(|norms| HeadNorm { q_weight: norms.query, k_weight: norms.key, eps });
        let weights = HeadWeights { bias: w.qkv.bias, norm, inv_freq: self.inv_freq.slice() };
        let LayerInputs { positions, kv_cells, kv, .. } = *step;
        let tensors = HeadTensors { qkv: a.qkv, positions, kv_cells, q: a.q, kv };
        self.kernels.rope.run(stream, step.tokens, shape, weights, tensors)
    }

    /// Attention over the pages: what the layer's window leaves of them.
    fn attend(&self, layer: Layer<'_>) -> Result<(), CudaError> {
        let Layer { stream, step, activations: a, layer_idx, .. } = layer;
        let inputs = AttentionInputs {
            n_tokens_max: step.tokens.n_max,
            q: a.q,
            out: a.attended,
            kv: KvLayer { pages: step.kv, page_stride: self.page_len(), layer_idx },
            entries: step.entries,
            window: self.config.windows[layer_idx],
            holes: step.holes.map(|places| HolesInputs { places, inv_freq: self.inv_freq.slice() }),
        };
        if !step.masses.queries.is_empty() {
            // Before the attention of these tokens, whose outputs it writes over.
            let of_layer = step.masses.queries.iter().filter(|(_, layers)| layers.contains(&layer_idx));
            let queries = of_layer.map(|(query, layers)| (query, layers.iter().all(|&it| it >= layer_idx)));
            self.kernels.masses.run(stream, &inputs, queries, step.masses.out)?;
        }
        let work = &step.attention[self.window_indices[layer_idx]];
        self.kernels.attention.run(stream, &inputs, work, step.workspace)
    }

    /// `y = RMSNorm(x)`
    pub(super) fn norm(
        &self,
        stream: &Stream,
        rows: RowCount,
        x: Slice,
        weight: Slice,
        y: Slice,
    ) -> Result<(), CudaError> {
        let ModelConfig { hidden_size, rms_norm_eps: eps, .. } = self.config;
        self.kernels.norm.run(stream, rows, NormWeights { hidden_size, weight, eps }, x, y)
    }

    /// A product of a few rows.
    pub(super) fn gemv(
        &self,
        stream: &Stream,
        rows: RowCount,
        x: ProductInput,
        linear: Linear,
        y: GemvOutput,
    ) -> Result<(), CudaError> {
        let n_out = match y {
            // Of the gate, and as much of the up projection.
            GemvOutput::SwiGlu(_) => linear.n_out / 2,
            _ => linear.n_out,
        };
        let shape = GemvShape { n_rows: rows.n_max, n_out, n_in: linear.n_in };
        let weights = GemvWeights { matrix: linear.matrix, bias: linear.bias };
        let x = match x {
            ProductInput::Plain(x) => GemvInput::Plain(x),
            ProductInput::Normed { residual, weight, .. }
                if self.kernels.gemv.has_room_for_norm(shape, y) =>
            {
                GemvInput::RmsNorm { residual, weight, eps: self.config.rms_norm_eps }
            }
            ProductInput::Normed { residual, weight, normed } => {
                self.norm(stream, rows, residual, weight, normed)?;
                GemvInput::Plain(normed)
            }
        };
        self.kernels.gemv.run(stream, shape, x, weights, y)
    }

    /// `y = x W^T`; the bias is left to the next kernel.
    fn multiply(
        &self,
        stream: &Stream,
        tokens: RowCount,
        x: Slice,
        linear: Linear,
        y: Slice,
    ) -> Result<(), CudaError> {
        let product = self.product(tokens.n_max, linear, Element::Model, Update::Replace);
        self.blas.matmul(stream, product, x, linear.matrix, y)
    }

    /// `residual += x W^T + bias`
    fn add_product(
        &self,
        stream: &Stream,
        tokens: RowCount,
        x: Slice,
        linear: Linear,
        residual: Slice,
    ) -> Result<(), CudaError> {
        let product = self.product(tokens.n_max, linear, Element::F32, Update::Add);
        self.blas.matmul(stream, product, x, linear.matrix, residual)?;
        match (linear.bias, &self.kernels.bias) {
            (Some(bias), Some(add)) => add.run(stream, tokens, linear.n_out, residual, bias),
            (Some(_), None) => panic!("the kernel is loaded for models that have a bias"),
            (None, _) => Ok(()),
        }
    }
}

/// The projection, where the next kernel adds the bias.
fn without_bias(linear: Linear) -> Linear {
    Linear { bias: None, ..linear }
}
