//! Published models by name, without their weights.

use super::config::{Architecture, ModelConfig, RopeConfig, RopeScaling};

/// The names that [`shape`] knows.
pub const SHAPES: [&str; 6] =
    ["llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"];

/// What the `config.json` of a published model says, such as `meta-llama/Llama-3.1-8B` for `llama-3.1-8b`;
/// `mistralai/Mistral-7B-v0.1` for `mistral-7b`, with its sliding window.
#[must_use]
pub fn shape(name: &str) -> Option<ModelConfig> {
    Some(match name {
        "llama-3.1-8b" => ModelConfig {
            rope: llama3_rope(8.0),
            n_positions: 131_072,
            vocab_size: 128_256,
            ..base(Architecture::Llama, 32)
        },
        "llama-3.2-1b" => ModelConfig {
            rope: llama3_rope(32.0),
            n_positions: 131_072,
            vocab_size: 128_256,
            hidden_size: 2048,
            intermediate_size: 8192,
            head_dim: 64,
            tied_embeddings: true,
            ..base(Architecture::Llama, 16)
        },
        "llama-3.2-3b" => ModelConfig {
            rope: llama3_rope(32.0),
            n_positions: 131_072,
            vocab_size: 128_256,
            hidden_size: 3072,
            intermediate_size: 8192,
            n_heads: 24,
            tied_embeddings: true,
            ..base(Architecture::Llama, 28)
        },
        "mistral-7b" => ModelConfig { windows: vec![Some(4096); 32], ..base(Architecture::Mistral, 32) },
        "qwen2.5-7b" => ModelConfig {
            rope: RopeConfig { theta: 1e6, scaling: RopeScaling::Default },
            n_positions: 131_072,
            vocab_size: 152_064,
            hidden_size: 3584,
            intermediate_size: 18_944,
            n_heads: 28,
            n_kv_heads: 4,
            rms_norm_eps: 1e-6,
            qkv_bias: true,
            ..base(Architecture::Qwen2, 28)
        },
        "qwen3-8b" => ModelConfig {
            rope: RopeConfig { theta: 1e6, scaling: RopeScaling::Default },
            n_positions: 40_960,
            vocab_size: 151_936,
            intermediate_size: 12_288,
            rms_norm_eps: 1e-6,
            qk_norm: true,
            ..base(Architecture::Qwen3, 36)
        },
        _ => return None,
    })
}

/// Mistral 7B without its window, from which the others differ in less than they share.
fn base(architecture: Architecture, n_layers: usize) -> ModelConfig {
    ModelConfig {
        architecture,
        vocab_size: 32_000,
        hidden_size: 4096,
        intermediate_size: 14_336,
        n_layers,
        n_heads: 32,
        n_kv_heads: 8,
        head_dim: 128,
        n_positions: 32_768,
        rms_norm_eps: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::Default },
        tied_embeddings: false,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None; n_layers],
    }
}

fn llama3_rope(factor: f64) -> RopeConfig {
    let (low_freq_factor, high_freq_factor, original_n_positions) = (1.0, 4.0, 8192);
    let scaling = RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_n_positions };
    RopeConfig { theta: 5e5, scaling }
}
