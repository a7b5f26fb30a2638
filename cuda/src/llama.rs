//! The decoder layers: Llama, Mistral, Qwen2 and Qwen3, in one pass over the packed tokens of a step.
//!
//! A layer, for up to 16 tokens, is six launches:
//!
//! ```text
//! qkv      = RMSNorm(residual) Wqkv^T                  gemv, the norm on the way
//! q, pages = rotate(qkv + bias)                        rope
//! attended = softmax(q K^T) V over the pages           attention
//! residual += attended Wo^T                            gemv
//! inner    = silu(gate) · up, of RMSNorm(residual)     gemv, norm and activation on the way
//! residual += inner Wdown^T                            gemv
//! ```
//!
//! With more tokens the norms and the activation are launches of their own and the products go to cuBLASLt. The residual
//! stream is f32; everything between is of the model's type T.

use trellis_engine::model::{Dtype, ModelConfig, inverse_frequencies};

use crate::activations::Activations;
use crate::blas::{Blas, MatmulShape, Update, buckets};
use crate::kernels::Kernels;
use crate::ops::attention::{AttentionInputs, Contexts, KvLayer, Tiles};
use crate::ops::attention_decode::DecodeWorkspace;
use crate::ops::common::{Activation, Element, Rows};
use crate::ops::embedding::TokenIds;
use crate::ops::gemv::{self, GemvForm, GemvInput, GemvOutput, GemvShape, GemvWeights};
use crate::ops::norm::{NormKind, NormWeights};
use crate::ops::rope::{HeadNorm, HeadShape, HeadTensors, HeadWeights};
use crate::weights::{LayerWeights, Linear, Weights};
use crate::{Buffer, CudaError, Gpu, Slice, Stream};

/// Matrices smaller than this are not worth the time to find their fastest product.
const TUNED_BYTES_MIN: usize = 4 << 20;

/// A decoder on the card.
#[derive(Debug)]
pub(crate) struct Llama {
    pub(crate) config: ModelConfig,
    pub(crate) dtype: Dtype,
    kernels: Kernels,
    weights: Weights,
    blas: Blas,
    inv_freq: Buffer, // f32 [head_dim / 2]
}

/// The tokens of a step and their contexts, on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTensors {
    pub(crate) tokens: Rows,
    pub(crate) ids: TokenIds,
    pub(crate) positions: Slice,
    pub(crate) kv_pages: Slice,
    pub(crate) contexts: Contexts,
    /// Tokens that attention takes one by one, into how many shares each is cut, and where those are put together.
    pub(crate) items: Option<(Tiles, usize, DecodeWorkspace)>,
    /// Tiles of tokens that it takes together.
    pub(crate) tiles: Option<Tiles>,
    /// All KV pages.
    pub(crate) kv: Slice,
}

/// Where the rows of logits come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitsRows {
    pub(crate) rows: Rows,
    /// Token of each row; `None` when row and token are the same.
    pub(crate) gather: Option<Slice>,
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
        Ok(Self { config: config.clone(), dtype, kernels, weights, blas, inv_freq })
    }

    /// The kernels.
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Finds the fastest matrix products for steps of up to so many tokens and rows of logits, as far as they are not
    /// known from before.
    ///
    /// # Errors
    /// There is no memory to time them in, or a kernel failed.
    pub(crate) fn tune(
        &self,
        stream: &Stream,
        n_tokens: usize,
        n_logits_rows: usize,
    ) -> Result<(), CudaError> {
        let Some(layer) = self.weights.layers.first() else { return Ok(()) };
        let model = |linear| (linear, Element::Model, Update::Replace, n_tokens);
        let added = |linear| (linear, Element::F32, Update::Add, n_tokens);
        let head = (self.head(), Element::F32, Update::Replace, n_logits_rows);
        let products =
            [model(layer.qkv), added(layer.attention_output), model(layer.gate_up), added(layer.down), head];
        let large = products.into_iter().filter(|(linear, ..)| linear.matrix.n_bytes >= TUNED_BYTES_MIN);
        let shapes = large.flat_map(|(linear, out, update, n_max)| {
            let bucketed = buckets(n_max).into_iter().filter(|&n| n > gemv::N_ROWS_MAX);
            bucketed.map(move |n| self.product(n, linear, out, update))
        });
        self.blas.tune(stream, &shapes.collect::<Vec<_>>())
    }

    fn product(&self, n_tokens: usize, linear: Linear, out: Element, update: Update) -> MatmulShape {
        MatmulShape { n_tokens, n_out: linear.n_out, n_in: linear.n_in, dtype: self.dtype, out, update }
    }

    fn head(&self) -> Linear {
        let ModelConfig { vocab_size, hidden_size, .. } = self.config;
        Linear { matrix: self.weights.lm_head, bias: None, n_out: vocab_size, n_in: hidden_size }
    }

    /// Computes the tokens and stores their keys and values; the residual stream holds the result.
    ///
    /// # Errors
    /// The driver refused a launch.
    pub(crate) fn layers(
        &self,
        stream: &Stream,
        step: &StepTensors,
        a: &Activations,
    ) -> Result<(), CudaError> {
        let hidden_size = self.config.hidden_size;
        let table = self.weights.embedding;
        self.kernels.embedding.run(stream, step.tokens, hidden_size, step.ids, table, a.residual)?;
        for (layer_idx, layer) in self.weights.layers.iter().enumerate() {
            self.attend(stream, step, a, layer, layer_idx)?;
            self.think(stream, step.tokens, a, layer)?;
        }
        Ok(())
    }

    /// The attention block, added to the residual stream.
    fn attend(
        &self,
        stream: &Stream,
        step: &StepTensors,
        a: &Activations,
        layer: &LayerWeights,
        layer_idx: usize,
    ) -> Result<(), CudaError> {
        let ModelConfig { n_heads, n_kv_heads, head_dim, rms_norm_eps: eps, .. } = self.config;
        // The rotation adds the bias.
        let qkv = Linear { bias: None, ..layer.qkv };
        self.normed_product(stream, step.tokens, a.residual, layer.input_norm, a.normed, qkv, a.qkv)?;

        let page_stride = self.page_len();
        let shape = HeadShape { n_heads, n_kv_heads, head_dim, page_stride, layer_idx };
        let norm = layer.head_norms.map(|norms| HeadNorm { q_weight: norms.query, k_weight: norms.key, eps });
        let weights = HeadWeights { bias: layer.qkv.bias, norm, inv_freq: self.inv_freq.slice() };
        let tensors = HeadTensors {
            qkv: Activation::model(a.qkv),
            positions: step.positions,
            kv_pages: step.kv_pages,
            q: a.q,
            kv: step.kv,
        };
        self.kernels.rope.run(stream, step.tokens, shape, weights, tensors)?;

        let inputs = AttentionInputs {
            n_tokens_max: step.tokens.n_max,
            q: a.q,
            out: a.attended,
            kv: KvLayer { pages: step.kv, page_stride, layer_idx },
            contexts: step.contexts,
            window: self.config.windows[layer_idx],
        };
        if let Some((items, n_splits, workspace)) = step.items {
            self.kernels.attention_decode.run(stream, &inputs, items, n_splits, workspace)?;
        }
        if let Some(tiles) = step.tiles {
            self.kernels.attention_prefill.run(stream, &inputs, tiles)?;
        }
        self.added_product(stream, step.tokens, a.attended, layer.attention_output, a.residual)
    }

    /// The MLP block, added to the residual stream.
    fn think(
        &self,
        stream: &Stream,
        tokens: Rows,
        a: &Activations,
        layer: &LayerWeights,
    ) -> Result<(), CudaError> {
        let intermediate_size = self.config.intermediate_size;
        let eps = self.config.rms_norm_eps;
        let shape =
            GemvShape { n_rows: tokens.n_max, n_out: intermediate_size, n_in: self.config.hidden_size };
        let form = GemvForm { has_norm: true, has_swiglu: true };
        if self.kernels.gemv.fits(shape, form) {
            let input = GemvInput::RmsNorm { residual: a.residual, weight: layer.mlp_norm, eps };
            let weights = GemvWeights { matrix: layer.gate_up.matrix, bias: layer.gate_up.bias };
            self.kernels.gemv.run(stream, shape, input, weights, GemvOutput::SwiGlu(a.inner))?;
        } else {
            let unbiased = Linear { bias: None, ..layer.gate_up };
            self.normed_product(
                stream,
                tokens,
                a.residual,
                layer.mlp_norm,
                a.mlp_normed,
                unbiased,
                a.gate_up,
            )?;
            let gate_up = Activation::model(a.gate_up);
            self.kernels.swiglu.run(
                stream,
                tokens,
                intermediate_size,
                gate_up,
                layer.gate_up.bias,
                a.inner,
            )?;
        }
        self.added_product(stream, tokens, a.inner, layer.down, a.residual)
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
        let ModelConfig { hidden_size, rms_norm_eps: eps, .. } = self.config;
        let LogitsRows { rows, gather, keeps_hidden } = asked;
        let states = match gather {
            Some(indices) => {
                self.kernels.gather.run(stream, rows, hidden_size * 4, a.residual, indices, a.gathered)?;
                a.gathered
            }
            None => a.residual,
        };
        let head = self.head();
        let shape = GemvShape { n_rows: rows.n_max, n_out: head.n_out, n_in: head.n_in };
        let weights = GemvWeights { matrix: head.matrix, bias: None };
        let form = GemvForm { has_norm: true, has_swiglu: false };
        if !keeps_hidden && self.kernels.gemv.fits(shape, form) {
            let input = GemvInput::RmsNorm { residual: states, weight: self.weights.final_norm, eps };
            return self.kernels.gemv.run(stream, shape, input, weights, GemvOutput::F32(a.logits));
        }
        self.norm(stream, rows, states, self.weights.final_norm, a.hidden)?;
        let form = GemvForm { has_norm: false, has_swiglu: false };
        if self.kernels.gemv.fits(shape, form) {
            return self.kernels.gemv.run(
                stream,
                shape,
                GemvInput::Plain(a.hidden),
                weights,
                GemvOutput::F32(a.logits),
            );
        }
        let product = self.product(rows.n_max, head, Element::F32, Update::Replace);
        self.blas.matmul(stream, product, a.hidden, head.matrix, a.logits)
    }

    fn norm(&self, stream: &Stream, rows: Rows, x: Slice, weight: Slice, y: Slice) -> Result<(), CudaError> {
        let ModelConfig { hidden_size, rms_norm_eps: eps, .. } = self.config;
        let weights = NormWeights { kind: NormKind::Rms, hidden_size, weight, eps };
        self.kernels.norm.run(stream, rows, weights, None, x, y)
    }

    /// `y = RMSNorm(residual) W^T`, without a bias; `normed` is for what lies between.
    #[expect(clippy::too_many_arguments, reason = "a formula with its operands")]
    fn normed_product(
        &self,
        stream: &Stream,
        tokens: Rows,
        residual: Slice,
        norm_weight: Slice,
        normed: Slice,
        linear: Linear,
        y: Slice,
    ) -> Result<(), CudaError> {
        let shape = GemvShape { n_rows: tokens.n_max, n_out: linear.n_out, n_in: linear.n_in };
        if self.kernels.gemv.fits(shape, GemvForm { has_norm: true, has_swiglu: false }) {
            let input = GemvInput::RmsNorm { residual, weight: norm_weight, eps: self.config.rms_norm_eps };
            let weights = GemvWeights { matrix: linear.matrix, bias: None };
            return self.kernels.gemv.run(stream, shape, input, weights, GemvOutput::Model(y));
        }
        self.norm(stream, tokens, residual, norm_weight, normed)?;
        let product = self.product(tokens.n_max, linear, Element::Model, Update::Replace);
        self.blas.matmul(stream, product, normed, linear.matrix, y)
    }

    /// `residual += x W^T + bias`
    fn added_product(
        &self,
        stream: &Stream,
        tokens: Rows,
        x: Slice,
        linear: Linear,
        residual: Slice,
    ) -> Result<(), CudaError> {
        let shape = GemvShape { n_rows: tokens.n_max, n_out: linear.n_out, n_in: linear.n_in };
        if self.kernels.gemv.fits(shape, GemvForm { has_norm: false, has_swiglu: false }) {
            let weights = GemvWeights { matrix: linear.matrix, bias: linear.bias };
            let output = GemvOutput::AddF32(residual);
            return self.kernels.gemv.run(stream, shape, GemvInput::Plain(x), weights, output);
        }
        let product = self.product(tokens.n_max, linear, Element::F32, Update::Add);
        self.blas.matmul(stream, product, x, linear.matrix, residual)?;
        match linear.bias {
            Some(bias) => {
                self.kernels.bias.run(stream, tokens, linear.n_out, Activation::f32(residual), bias)
            }
            None => Ok(()),
        }
    }

    /// Elements of a page over all layers.
    pub(crate) fn page_len(&self) -> usize {
        self.config.n_layers * self.kernels.attention_shape.layer_len()
    }
}
