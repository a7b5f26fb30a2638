//! Weights of a decoder in the form that the CPU multiplies with.

use super::linear::Linear;
use crate::model::{ModelConfig, tensors};

/// All weights, in f32.
pub(super) struct Weights {
    pub(super) embedding: Vec<f32>, // [vocab_size, hidden_size]
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: Vec<f32>, // [hidden_size]
    pub(super) lm_head: Linear,
}

/// One decoder layer. Projections of the same input are one.
pub(super) struct LayerWeights {
    pub(super) input_norm: Vec<f32>, // [hidden_size]
    pub(super) qkv: Linear,          // to (n_heads + 2 n_kv_heads) · head_dim
    pub(super) head_norms: Option<HeadNorms>,
    pub(super) attention_output: Linear, // to hidden_size
    pub(super) mlp_norm: Vec<f32>,       // [hidden_size]
    pub(super) gate_up: Linear,          // to 2 · intermediate_size
    pub(super) down: Linear,             // to hidden_size
}

/// RMSNorm weights of the heads of Q and of K.
pub(super) struct HeadNorms {
    pub(super) query: Vec<f32>, // [head_dim]
    pub(super) key: Vec<f32>,   // [head_dim]
}

impl Weights {
    /// Loads every tensor once. `read` fills the buffer with the named tensor.
    pub(super) fn load<E>(
        config: &ModelConfig,
        read: impl FnMut(&str, &mut [f32]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut reader = Reader { read };
        let ModelConfig { vocab_size, hidden_size, .. } = *config;
        let embedding = reader.tensor(tensors::EMBEDDING, vocab_size * hidden_size)?;
        let layers = (0..config.n_layers)
            .map(|layer_idx| reader.layer(config, layer_idx))
            .collect::<Result<_, E>>()?;
        let final_norm = reader.tensor(tensors::FINAL_NORM, hidden_size)?;
        let lm_head = if config.tied_embeddings {
            Linear::new(&embedding, hidden_size, None)
        } else {
            Linear::new(&reader.tensor(tensors::LM_HEAD, vocab_size * hidden_size)?, hidden_size, None)
        };
        Ok(Self { embedding, layers, final_norm, lm_head })
    }
}

struct Reader<R> {
    read: R,
}

impl<E, R: FnMut(&str, &mut [f32]) -> Result<(), E>> Reader<R> {
    fn tensor(&mut self, name: &str, len: usize) -> Result<Vec<f32>, E> {
        let mut values = vec![0.0; len];
        (self.read)(name, &mut values)?;
        Ok(values)
    }

    /// One projection out of several that have the same input: name and number of outputs of each.
    fn linear(
        &mut self,
        layer_idx: usize,
        parts: &[(&str, usize)],
        n_inputs: usize,
        has_bias: bool,
    ) -> Result<Linear, E> {
        let n_outputs: usize = parts.iter().map(|&(_, n)| n).sum();
        let mut fused = |suffix: &str, width: usize| -> Result<Vec<f32>, E> {
            let mut values = vec![0.0; n_outputs * width];
            let mut rest = values.as_mut_slice();
            for &(part, n) in parts {
                let (values, after) = rest.split_at_mut(n * width);
                (self.read)(&tensors::layer_tensor(layer_idx, &format!("{part}.{suffix}")), values)?;
                rest = after;
            }
            Ok(values)
        };
        let bias = if has_bias { Some(fused("bias", 1)?) } else { None };
        Ok(Linear::new(&fused("weight", n_inputs)?, n_inputs, bias))
    }

    fn layer(&mut self, config: &ModelConfig, layer_idx: usize) -> Result<LayerWeights, E> {
        let ModelConfig { hidden_size, intermediate_size, n_heads, n_kv_heads, head_dim, .. } = *config;
        let (q, kv) = (n_heads * head_dim, n_kv_heads * head_dim);
        let name = |suffix: &str| tensors::layer_tensor(layer_idx, suffix);
        let head_norms = if config.qk_norm {
            Some(HeadNorms {
                query: self.tensor(&name("self_attn.q_norm.weight"), head_dim)?,
                key: self.tensor(&name("self_attn.k_norm.weight"), head_dim)?,
            })
        } else {
            None
        };
        let qkv = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
        let gate_up = [("mlp.gate_proj", intermediate_size), ("mlp.up_proj", intermediate_size)];
        Ok(LayerWeights {
            input_norm: self.tensor(&name("input_layernorm.weight"), hidden_size)?,
            qkv: self.linear(layer_idx, &qkv, hidden_size, config.qkv_bias)?,
            head_norms,
            attention_output: self.linear(
                layer_idx,
                &[("self_attn.o_proj", hidden_size)],
                q,
                config.attention_output_bias,
            )?,
            mlp_norm: self.tensor(&name("post_attention_layernorm.weight"), hidden_size)?,
            gate_up: self.linear(layer_idx, &gate_up, hidden_size, config.mlp_bias)?,
            down: self.linear(
                layer_idx,
                &[("mlp.down_proj", hidden_size)],
                intermediate_size,
                config.mlp_bias,
            )?,
        })
    }
}
