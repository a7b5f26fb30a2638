//! `config.json` to [`ModelConfig`], with the defaults of transformers' configuration classes.

use super::config::{Architecture, ModelConfig};
use super::error::ModelError;
use super::fields::{Fields, parse_object};
use super::rope_file::rope_config;

/// Well above every published model, and small enough that no product of two overflows.
pub(crate) const VOCAB_SIZE_MAX: usize = 1 << 18;
pub(crate) const HIDDEN_SIZE_MAX: usize = 1 << 17;
pub(crate) const INTERMEDIATE_SIZE_MAX: usize = 1 << 20;
pub(crate) const N_LAYERS_MAX: usize = 1024;
pub(crate) const N_HEADS_MAX: usize = 1024;
pub(crate) const HEAD_DIM_MAX: usize = 1024;
pub(crate) const N_POSITIONS_MAX: usize = 1 << 24;

const ARCHITECTURES: [(&str, Architecture); 4] = [
    ("LlamaForCausalLM", Architecture::Llama),
    ("MistralForCausalLM", Architecture::Mistral),
    ("Qwen2ForCausalLM", Architecture::Qwen2),
    ("Qwen3ForCausalLM", Architecture::Qwen3),
];

impl ModelConfig {
    /// Reads the bytes of a `config.json`; `file` is its name in errors.
    ///
    /// # Errors
    ///
    /// [`ModelError::Syntax`] when it is not a JSON object, [`ModelError::Field`] when a field is missing,
    /// of the wrong type, out of range, or in contradiction to another.
    pub fn from_json(file: &str, bytes: &[u8]) -> Result<Self, ModelError> {
        let map = parse_object(file, bytes)?;
        let fields = Fields::new(file, &map);

        let architecture = architecture(&fields)?;
        if !matches!(fields.text("hidden_act")?, None | Some("silu")) {
            return Err(fields.error("hidden_act", "\"silu\""));
        }

        let hidden_size = fields.required_count("hidden_size", 1, HIDDEN_SIZE_MAX)?;
        let n_heads = fields.required_count("num_attention_heads", 1, N_HEADS_MAX)?;
        let n_kv_heads = fields.count("num_key_value_heads", 1, N_HEADS_MAX)?.unwrap_or(n_heads);
        if !n_heads.is_multiple_of(n_kv_heads) {
            return Err(fields.error(
                "num_key_value_heads",
                format!("a divisor of num_attention_heads, which is {n_heads}"),
            ));
        }
        let head_dim = head_dim(&fields, hidden_size, n_heads)?;
        let n_layers = fields.required_count("num_hidden_layers", 1, N_LAYERS_MAX)?;
        let n_positions = fields.required_count("max_position_embeddings", 1, N_POSITIONS_MAX)?;

        let flag = |field: &str| fields.flag(field).map(Option::unwrap_or_default);
        let (qkv_bias, attention_output_bias, mlp_bias) = match architecture {
            Architecture::Llama => (flag("attention_bias")?, flag("attention_bias")?, flag("mlp_bias")?),
            Architecture::Mistral => (false, false, false),
            Architecture::Qwen2 => (true, false, false),
            Architecture::Qwen3 => (flag("attention_bias")?, flag("attention_bias")?, false),
        };

        Ok(Self {
            architecture,
            vocab_size: fields.required_count("vocab_size", 1, VOCAB_SIZE_MAX)?,
            hidden_size,
            intermediate_size: fields.required_count("intermediate_size", 1, INTERMEDIATE_SIZE_MAX)?,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            n_positions,
            rms_norm_eps: fields.number("rms_norm_eps", 1e-12, 1.0)?.unwrap_or(1e-6) as f32,
            rope: rope_config(&fields)?,
            tied_embeddings: flag("tie_word_embeddings")?,
            qkv_bias,
            attention_output_bias,
            mlp_bias,
            qk_norm: architecture == Architecture::Qwen3,
            windows: windows(&fields, architecture, n_layers)?,
        })
    }
}

fn architecture(fields: &Fields) -> Result<Architecture, ModelError> {
    let expected = || {
        let names = ARCHITECTURES.map(|(name, _)| format!("\"{name}\""));
        format!("a list with one of {}", names.join(", "))
    };
    let fail = || fields.error("architectures", expected());
    let list = fields.get("architectures").and_then(|value| value.as_array()).ok_or_else(fail)?;
    let [name] = list.as_slice() else { return Err(fail()) };
    ARCHITECTURES
        .iter()
        .find(|(known, _)| name.as_str() == Some(known))
        .map(|(_, architecture)| *architecture)
        .ok_or_else(fail)
}

fn head_dim(fields: &Fields, hidden_size: usize, n_heads: usize) -> Result<usize, ModelError> {
    let head_dim = match fields.count("head_dim", 1, HEAD_DIM_MAX)? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
        None => {
            return Err(fields.error(
                "head_dim",
                format!(
                    "a value, since hidden_size {hidden_size} is no multiple of {n_heads} attention heads"
                ),
            ));
        }
    };
    if !head_dim.is_multiple_of(2) || head_dim > HEAD_DIM_MAX {
        let expected = format!("an even number up to {HEAD_DIM_MAX}, not {head_dim}: RoPE rotates pairs");
        return Err(fields.error("head_dim", expected));
    }
    Ok(head_dim)
}

/// Follows `MistralConfig`, `Qwen2Config` and `Qwen3Config` of transformers.
fn windows(
    fields: &Fields,
    architecture: Architecture,
    n_layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let window = || fields.count("sliding_window", 1, N_POSITIONS_MAX);
    let written_or = |default: usize| {
        Ok::<_, ModelError>(if fields.has("sliding_window") { window()? } else { Some(default) })
    };
    match architecture {
        Architecture::Llama => Ok(vec![None; n_layers]),
        Architecture::Mistral => Ok(vec![written_or(4096)?; n_layers]),
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let window = match fields.flag("use_sliding_window")? {
                Some(true) => written_or(4096)?,
                Some(false) | None => None,
            };
            let Some(layer_types) = fields.get("layer_types") else {
                let n_full = fields.count("max_window_layers", 0, usize::MAX)?.unwrap_or(28);
                return Ok((0..n_layers).map(|idx| if idx >= n_full { window } else { None }).collect());
            };
            let fail = || {
                let kinds = match window {
                    Some(_) => "\"full_attention\" or \"sliding_attention\"",
                    None => "\"full_attention\", since no sliding window is in use",
                };
                fields.error("layer_types", format!("{n_layers} entries, each {kinds}"))
            };
            let layer_types =
                layer_types.as_array().filter(|list| list.len() == n_layers).ok_or_else(fail)?;
            layer_types
                .iter()
                .map(|kind| match (kind.as_str(), window) {
                    (Some("full_attention"), _) => Ok(None),
                    (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
                    _ => Err(fail()),
                })
                .collect()
        }
    }
}
