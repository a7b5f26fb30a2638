//! `config.json`: what is taken can be computed with.

use arbitrary::Unstructured;
use serde_json::{Value, json};
use trellis_engine::model::{ModelConfig, inverse_frequencies, tensors};

use crate::json;

/// Names and values that mean something.
const WORDS: [&str; 30] = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "architectures",
    "hidden_act",
    "silu",
    "head_dim",
    "num_key_value_heads",
    "num_attention_heads",
    "hidden_size",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "full_attention",
    "sliding_attention",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_type",
    "type",
    "linear",
    "dynamic",
    "llama3",
    "factor",
    "attention_bias",
    "mlp_bias",
    "partial_rotary_factor",
    "tie_word_embeddings",
];

/// Reads the bytes as a file, or as changes of a file that is right.
///
/// # Panics
/// A configuration is taken with which there is no model.
pub fn check(input: &[u8]) {
    let Some((&kind, bytes)) = input.split_first() else { return };
    let file = match kind % 2 {
        0 => bytes.to_vec(),
        _ => {
            let changed = json::changed(&base(), &WORDS, &mut Unstructured::new(bytes));
            changed.expect("zeros make a file").to_string().into_bytes()
        }
    };
    match ModelConfig::from_json("config.json", &file) {
        Ok(config) => is_possible(&config),
        Err(error) => assert!(error.to_string().contains("config.json"), "{error}"),
    }
}

fn base() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "vocab_size": 300, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        "attention_bias": false, "use_sliding_window": true, "sliding_window": 32, "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32},
    })
}

fn is_possible(config: &ModelConfig) {
    assert_eq!(config.windows.len(), config.n_layers);
    assert!(config.n_heads.is_multiple_of(config.n_kv_heads) && config.head_dim.is_multiple_of(2));
    assert!(config.windows.iter().flatten().all(|&window| window > 0));
    assert!(config.rms_norm_eps > 0.0, "{}", config.rms_norm_eps);
    let frequencies = inverse_frequencies(&config.rope, config.head_dim);
    assert!(
        frequencies.iter().all(|frequency| frequency.is_finite() && *frequency >= 0.0),
        "{frequencies:?}"
    );
    let n_parameters = tensors::expected(config).iter().try_fold(0_usize, |sum, spec| {
        let n_elements = spec.shape.iter().try_fold(4_usize, |n, &length| n.checked_mul(length))?;
        sum.checked_add(n_elements)
    });
    assert!(n_parameters.is_some(), "the weights of {config:?} can be counted");
}
