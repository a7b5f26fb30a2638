//! Names and shapes of a decoder's tensors, as Hugging Face writes them.

use std::collections::HashSet;

use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::error::ModelError;

/// The token embedding: `[vocab_size, hidden_size]`.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The RMSNorm after the last layer: `[hidden_size]`.
pub const FINAL_NORM: &str = "model.norm.weight";
/// The output projection, unless it is the embedding: `[vocab_size, hidden_size]`.
pub const LM_HEAD: &str = "lm_head.weight";

/// The name of a tensor of one layer, such as `self_attn.q_proj.weight`.
pub fn layer_tensor(layer_idx: usize, suffix: &str) -> String {
    format!("model.layers.{layer_idx}.{suffix}")
}

/// A tensor that a model has to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in the checkpoint.
    pub name: String,
    /// Lengths of its dimensions; a projection is `[n_outputs, n_inputs]`.
    pub shape: Vec<usize>,
}

/// Every tensor of a model, in the order of use. A tied output projection is not among them.
pub fn expected(config: &ModelConfig) -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    let mut add = |name: String, shape: &[usize]| specs.push(TensorSpec { name, shape: shape.to_vec() });

    let hidden = config.hidden_size;
    let inner = config.intermediate_size;
    let q = config.n_heads * config.head_dim;
    let kv = config.n_kv_heads * config.head_dim;
    let projections = [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.attention_output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ];

    add(EMBEDDING.into(), &[config.vocab_size, hidden]);
    for layer_idx in 0..config.n_layers {
        let name = |suffix: &str| layer_tensor(layer_idx, suffix);
        add(name("input_layernorm.weight"), &[hidden]);
        if config.qk_norm {
            add(name("self_attn.q_norm.weight"), &[config.head_dim]);
            add(name("self_attn.k_norm.weight"), &[config.head_dim]);
        }
        add(name("post_attention_layernorm.weight"), &[hidden]);
        for (projection, n_outputs, n_inputs, bias) in projections {
            add(name(&format!("{projection}.weight")), &[n_outputs, n_inputs]);
            if bias {
                add(name(&format!("{projection}.bias")), &[n_outputs]);
            }
        }
    }
    add(FINAL_NORM.into(), &[hidden]);
    if !config.tied_embeddings {
        add(LM_HEAD.into(), &[config.vocab_size, hidden]);
    }
    specs
}

/// Checks that a checkpoint holds the tensors of the config and no others.
///
/// Two kinds of extra tensors are let pass, since old versions of transformers wrote them: rotary
/// frequencies, and a copy of a tied output projection.
///
/// # Errors
///
/// [`ModelError::MissingTensor`], [`ModelError::TensorShape`] or [`ModelError::UnexpectedTensor`].
pub fn check(config: &ModelConfig, checkpoint: &Checkpoint) -> Result<(), ModelError> {
    let mut specs = expected(config);
    for spec in &specs {
        if checkpoint.tensor(&spec.name).is_none() {
            return Err(ModelError::MissingTensor {
                file: checkpoint.name().to_owned(),
                tensor: spec.name.clone(),
                expected: spec.shape.clone(),
            });
        }
    }
    if config.tied_embeddings {
        specs.push(TensorSpec { name: LM_HEAD.into(), shape: vec![config.vocab_size, config.hidden_size] });
    }
    for spec in &specs {
        let Some(info) = checkpoint.tensor(&spec.name) else { continue };
        if info.shape != spec.shape {
            return Err(ModelError::TensorShape {
                file: checkpoint.file_of(info).to_owned(),
                tensor: spec.name.clone(),
                expected: spec.shape.clone(),
                found: info.shape.clone(),
            });
        }
    }
    let known: HashSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    for (name, info) in checkpoint.tensors() {
        if !known.contains(name) && !name.ends_with(".rotary_emb.inv_freq") {
            return Err(ModelError::UnexpectedTensor {
                file: checkpoint.file_of(info).to_owned(),
                tensor: name.to_owned(),
                found: info.shape.clone(),
            });
        }
    }
    Ok(())
}
