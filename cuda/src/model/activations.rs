//! What a step computes with, laid out once.

use trellis_engine::model::{Dtype, ModelConfig};

use crate::Slice;
use crate::memory::{Tensor, TensorLayout};
use crate::ops::logits;

/// The most that a step computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivationSizes {
    pub(crate) n_tokens: usize,
    /// Rows of logits in memory at once, and output rows over them.
    pub(crate) n_logits_rows: usize,
    /// Bytes in which attention puts shares together.
    pub(crate) partial_bytes: usize,
}

/// Tensors of a step; T is the model's type. Those that are never in use together share memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Activations {
    pub(crate) residual: Slice,   // f32 [n_tokens, hidden_size]
    pub(crate) normed: Slice,     // T [n_tokens, hidden_size]
    pub(crate) qkv: Slice,        // T [n_tokens, n_heads + 2 n_kv_heads, head_dim]
    pub(crate) q: Slice,          // T [n_tokens, n_heads, head_dim]
    pub(crate) partial: Slice,    // shares of contexts
    pub(crate) attended: Slice,   // T [n_tokens, n_heads, head_dim]
    pub(crate) mlp_normed: Slice, // T [n_tokens, hidden_size]
    pub(crate) gate_up: Slice,    // T [n_tokens, 2, intermediate_size]
    pub(crate) inner: Slice,      // T [n_tokens, intermediate_size]
    pub(crate) gathered: Slice,   // f32 [n_logits_rows, hidden_size]
    pub(crate) hidden: Slice,     // T [n_logits_rows, hidden_size]
    pub(crate) logits: Slice,     // f32 [n_logits_rows, vocab_size]
    pub(crate) scratch: Slice,    // of the kernels over logits
}

/// The order in which a step uses its tensors.
mod at {
    pub(super) const EMBED: usize = 0;
    pub(super) const NORM: usize = 1;
    pub(super) const QKV: usize = 2;
    pub(super) const ROPE: usize = 3;
    pub(super) const ATTENTION: usize = 4;
    pub(super) const OUTPUT: usize = 5;
    pub(super) const MLP_NORM: usize = 6;
    pub(super) const GATE_UP: usize = 7;
    pub(super) const SWIGLU: usize = 8;
    pub(super) const DOWN: usize = 9;
    pub(super) const GATHER: usize = 10;
    pub(super) const FINAL_NORM: usize = 11;
    pub(super) const HEAD: usize = 12;
    pub(super) const SAMPLE: usize = 13;
}

impl Activations {
    /// Bytes of all of them.
    pub(crate) fn n_bytes(config: &ModelConfig, dtype: Dtype, size: ActivationSizes) -> usize {
        TensorLayout::of(&tensors(config, dtype, size)).n_bytes
    }

    /// Their places in `memory`, which has [`Activations::n_bytes`] or more.
    pub(crate) fn place(memory: Slice, config: &ModelConfig, dtype: Dtype, size: ActivationSizes) -> Self {
        let tensors = tensors(config, dtype, size);
        let layout = TensorLayout::of(&tensors);
        let mut parts =
            tensors.iter().zip(&layout.offsets).map(|(tensor, &offset)| memory.part(offset, tensor.n_bytes));
        let mut next = || parts.next().expect("a place for each tensor");
        Self {
            residual: next(),
            normed: next(),
            qkv: next(),
            q: next(),
            partial: next(),
            attended: next(),
            mlp_normed: next(),
            gate_up: next(),
            inner: next(),
            gathered: next(),
            hidden: next(),
            logits: next(),
            scratch: next(),
        }
    }
}

/// In the order of the fields of [`Activations`].
fn tensors(config: &ModelConfig, dtype: Dtype, size: ActivationSizes) -> Vec<Tensor> {
    let ModelConfig { vocab_size, hidden_size, intermediate_size, n_heads, n_kv_heads, head_dim, .. } =
        *config;
    let ActivationSizes { n_tokens, n_logits_rows, partial_bytes } = size;
    let (token, row) = (n_tokens * dtype.n_bytes(), n_logits_rows * dtype.n_bytes());
    let scratch_bytes = logits::scratch_bytes(n_logits_rows, vocab_size);
    let tensor = |name, n_bytes, first_use, last_use| Tensor { name, n_bytes, first_use, last_use };
    vec![
        tensor("residual", n_tokens * hidden_size * 4, at::EMBED, at::SAMPLE),
        tensor("normed", token * hidden_size, at::NORM, at::QKV),
        tensor("qkv", token * (n_heads + 2 * n_kv_heads) * head_dim, at::QKV, at::ROPE),
        tensor("q", token * n_heads * head_dim, at::ROPE, at::ATTENTION),
        tensor("partial", partial_bytes, at::ATTENTION, at::ATTENTION),
        tensor("attended", token * n_heads * head_dim, at::ATTENTION, at::OUTPUT),
        tensor("mlp_normed", token * hidden_size, at::MLP_NORM, at::GATE_UP),
        tensor("gate_up", token * 2 * intermediate_size, at::GATE_UP, at::SWIGLU),
        tensor("inner", token * intermediate_size, at::SWIGLU, at::DOWN),
        tensor("gathered", n_logits_rows * hidden_size * 4, at::GATHER, at::HEAD),
        tensor("hidden", row * hidden_size, at::FINAL_NORM, at::SAMPLE),
        tensor("logits", n_logits_rows * vocab_size * 4, at::HEAD, at::SAMPLE),
        tensor("scratch", scratch_bytes, at::SAMPLE, at::SAMPLE),
    ]
}
