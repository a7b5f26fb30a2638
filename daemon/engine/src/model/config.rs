//! What a decoder of the Llama family looks like.

use serde::{Deserialize, Serialize};

/// A family of decoders, by the name in `config.json`'s `architectures`. What a GGUF file calls `llama` is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Architecture {
    /// `LlamaForCausalLM`
    Llama,
    /// `MistralForCausalLM`: sliding window attention.
    Mistral,
    /// `Qwen2ForCausalLM`: biases on Q, K and V.
    Qwen2,
    /// `Qwen3ForCausalLM`: RMSNorm over each head of Q and K.
    Qwen3,
}

impl Architecture {
    /// The name in `config.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// Shapes and constants of one decoder, checked against each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Length of a hidden state.
    pub hidden_size: usize,
    /// Length of the MLP's inner activations.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Length of one head; not always `hidden_size / n_heads`.
    pub head_dim: usize,
    /// The most positions of one context.
    pub n_positions: usize,
    /// Added to the mean square in every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Whether the output projection is the embedding matrix.
    pub tied_embeddings: bool,
    /// Biases on the Q, K and V projections.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub attention_output_bias: bool,
    /// Biases on the three MLP projections.
    pub mlp_bias: bool,
    /// RMSNorm over each head of Q and K before the rotation.
    pub qk_norm: bool,
    /// Sliding window: a position sees itself and the `window - 1` before it. One entry for each layer.
    pub windows: Vec<Option<usize>>, // [n_layers]
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the frequencies are scaled.
    pub scaling: RopeScaling,
}

/// Forms of RoPE scaling, most as `rope_type` in transformers' `modeling_rope_utils.py`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// The base grows with the length past the trained one; contexts here never pass it.
    Dynamic {
        /// Growth of the base.
        factor: f64,
    },
    /// Each frequency divided by a number of its own, as GGUF files write Llama 3.1's form.
    Divided {
        /// The divisors: `[head_dim / 2]`.
        divisors: Vec<f32>,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths above `original_n_positions / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_n_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Positions of the unscaled model.
        original_n_positions: usize,
    },
}

impl ModelConfig {
    /// What a row of logits costs beside a token: the weights of the output projection over those of all layers.
    #[must_use]
    pub fn logits_tokens(&self) -> f32 {
        let Self { hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, head_dim, .. } = *self;
        let attention = hidden_size * head_dim * (2 * n_heads + 2 * n_kv_heads);
        let layers = n_layers * (attention + 3 * hidden_size * intermediate_size);
        (self.vocab_size * hidden_size) as f32 / layers as f32
    }
}
