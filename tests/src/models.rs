//! Models to test with: the bundled ones, and small ones of random weights.

use trellis_engine::model::{Architecture, Dtype, Model, ModelConfig, ModelSource, RopeConfig, RopeScaling};

/// A bundled model.
///
/// # Panics
/// It cannot be opened.
#[must_use]
pub fn bundled(name: &str) -> Model {
    let source = trellis::bundled::source(name).expect("a bundled model");
    Model::open(name, &source).expect("the bundled model opens")
}

/// A decoder of random weights, with the tokenizer of the bundled models.
///
/// # Panics
/// The shape is not one of a decoder.
#[must_use]
pub fn random(name: &str, config: ModelConfig, dtype: Dtype) -> Model {
    Model::with_random_weights(name, config, dtype, 7, tokenizer_json()).expect("the shape is a decoder's")
}

fn tokenizer_json() -> &'static [u8] {
    let Some(ModelSource::Embedded(files)) = trellis::bundled::source("tiny") else {
        panic!("the bundled models are embedded");
    };
    let (_, bytes) = files.iter().find(|(name, _)| *name == "tokenizer.json").expect("it has a tokenizer");
    bytes
}

/// The shape of a decoder that computes little: two layers, 128 key and value elements a position in each.
#[must_use]
pub fn small(n_positions: usize) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        vocab_size: 4096,
        hidden_size: 256,
        intermediate_size: 512,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 64,
        n_positions,
        rms_norm_eps: 1e-5,
        rope: RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default },
        tied_embeddings: true,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None; 2],
    }
}
