//! Weights of a decoder on the card: what they are, where each lies, and which parts of the checkpoint fill them.

use trellis_engine::model::{Dtype, ModelConfig, tensors};

use super::load::Part;
use crate::memory::Reserved;
use crate::{CudaError, Gpu, Slice};

/// Every matrix starts at a multiple of this; a line of the L2.
const ALIGNMENT: usize = 256;

/// All weights, in one piece of memory and of one type T.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) embedding: Slice, // T [vocab_size, hidden_size]
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Slice, // T [hidden_size]
    pub(crate) lm_head: Slice,    // T [vocab_size, hidden_size]
    _memory: Reserved,
}

/// One decoder layer. Projections of the same input are one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerWeights {
    pub(crate) input_norm: Slice, // T [hidden_size]
    pub(crate) qkv: Linear,       // to (n_heads + 2 n_kv_heads) · head_dim
    pub(crate) head_norms: Option<HeadNorms>,
    pub(crate) attention_output: Linear, // to hidden_size
    pub(crate) mlp_norm: Slice,          // T [hidden_size]
    pub(crate) gate_up: Linear,          // to 2 · intermediate_size
    pub(crate) down: Linear,             // to hidden_size
}

/// A projection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    pub(crate) matrix: Slice,       // T [n_out, n_in]
    pub(crate) bias: Option<Slice>, // T [n_out]
    pub(crate) n_out: usize,
    pub(crate) n_in: usize,
}

/// RMSNorm weights of the heads of Q and of K.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorms {
    pub(crate) query: Slice, // T [head_dim]
    pub(crate) key: Slice,   // T [head_dim]
}

/// Bytes of all weights of a model on a card.
pub(crate) fn n_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
    let nowhere = Slice { address: 0, n_bytes: usize::MAX };
    let mut layout = Layout { memory: nowhere, n_used: 0, dtype, parts: Vec::new() };
    layout.weights(config);
    layout.n_used as u64
}

impl Weights {
    /// Takes the memory and says what has to be loaded into it.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(crate) fn allocate(
        gpu: &Gpu,
        config: &ModelConfig,
        dtype: Dtype,
    ) -> Result<(Self, Vec<Part>), CudaError> {
        let memory = gpu.take("weights", n_bytes(config, dtype) as usize)?;
        let mut layout = Layout { memory: memory.slice(), n_used: 0, dtype, parts: Vec::new() };
        let (embedding, layers, final_norm, lm_head) = layout.weights(config);
        Ok((Self { embedding, layers, final_norm, lm_head, _memory: memory }, layout.parts))
    }
}

/// Gives out memory from the start, and notes what goes where.
struct Layout {
    memory: Slice,
    n_used: usize,
    dtype: Dtype,
    parts: Vec<Part>,
}

impl Layout {
    fn weights(&mut self, config: &ModelConfig) -> (Slice, Vec<LayerWeights>, Slice, Slice) {
        let ModelConfig { vocab_size, hidden_size, .. } = *config;
        let embedding = self.tensor(tensors::EMBEDDING.to_owned(), vocab_size * hidden_size);
        let layers = (0..config.n_layers).map(|layer_idx| self.layer(config, layer_idx)).collect();
        let final_norm = self.tensor(tensors::FINAL_NORM.to_owned(), hidden_size);
        let lm_head = if config.tied_embeddings {
            embedding
        } else {
            self.tensor(tensors::LM_HEAD.to_owned(), vocab_size * hidden_size)
        };
        (embedding, layers, final_norm, lm_head)
    }

    fn layer(&mut self, config: &ModelConfig, layer_idx: usize) -> LayerWeights {
        let ModelConfig { hidden_size, intermediate_size, n_heads, n_kv_heads, head_dim, .. } = *config;
        let (q, kv) = (n_heads * head_dim, n_kv_heads * head_dim);
        let name = |suffix: &str| tensors::layer_tensor(layer_idx, suffix);
        let input_norm = self.tensor(name("input_layernorm.weight"), hidden_size);
        let qkv = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
        let gate_up = [("mlp.gate_proj", intermediate_size), ("mlp.up_proj", intermediate_size)];
        let o = [("self_attn.o_proj", hidden_size)];
        let down = [("mlp.down_proj", hidden_size)];
        LayerWeights {
            input_norm,
            qkv: self.linear(layer_idx, &qkv, hidden_size, config.qkv_bias),
            head_norms: config.qk_norm.then(|| HeadNorms {
                query: self.tensor(name("self_attn.q_norm.weight"), head_dim),
                key: self.tensor(name("self_attn.k_norm.weight"), head_dim),
            }),
            attention_output: self.linear(layer_idx, &o, q, config.attention_output_bias),
            mlp_norm: self.tensor(name("post_attention_layernorm.weight"), hidden_size),
            gate_up: self.linear(layer_idx, &gate_up, hidden_size, config.mlp_bias),
            down: self.linear(layer_idx, &down, intermediate_size, config.mlp_bias),
        }
    }

    fn tensor(&mut self, name: String, n_elements: usize) -> Slice {
        let slice = self.take(n_elements);
        self.parts.push(Part { tensor: name, destination: slice });
        slice
    }

    /// One projection out of several that have the same input: name and number of outputs of each.
    fn linear(&mut self, layer_idx: usize, parts: &[(&str, usize)], n_in: usize, has_bias: bool) -> Linear {
        let n_out: usize = parts.iter().map(|&(_, n)| n).sum();
        let matrix = self.fused(layer_idx, "weight", parts, n_in);
        let bias = has_bias.then(|| self.fused(layer_idx, "bias", parts, 1));
        Linear { matrix, bias, n_out, n_in }
    }

    fn fused(&mut self, layer_idx: usize, suffix: &str, parts: &[(&str, usize)], width: usize) -> Slice {
        let n_out: usize = parts.iter().map(|&(_, n)| n).sum();
        let fused = self.take(n_out * width);
        let mut start = 0;
        for &(part, n) in parts {
            let n_bytes = n * width * self.dtype.n_bytes();
            let tensor = tensors::layer_tensor(layer_idx, &format!("{part}.{suffix}"));
            self.parts.push(Part { tensor, destination: fused.part(start, n_bytes) });
            start += n_bytes;
        }
        fused
    }

    fn take(&mut self, n_elements: usize) -> Slice {
        let n_bytes = n_elements * self.dtype.n_bytes();
        let slice = self.memory.part(self.n_used, n_bytes);
        self.n_used += n_bytes.next_multiple_of(ALIGNMENT);
        slice
    }
}
