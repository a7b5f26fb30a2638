//! The metadata of a GGUF file to [`ModelConfig`]. Keys: `gguf-py/gguf/constants.py` of llama.cpp; defaults: its
//! `llama-model.cpp`.

use super::super::config::{Architecture, ModelConfig, RopeConfig, RopeScaling};
use super::super::config_file::{
    HEAD_DIM_MAX, HIDDEN_SIZE_MAX, INTERMEDIATE_SIZE_MAX, N_HEADS_MAX, N_LAYERS_MAX, N_POSITIONS_MAX,
    VOCAB_SIZE_MAX,
};
use super::super::error::ModelError;
use super::super::fields::Fields;
use super::super::rope_file::{FACTOR_MAX, THETA_DEFAULT, THETA_MAX};

/// Names in `general.architecture`. Llama and Mistral are one there, without a sliding window.
const ARCHITECTURES: [(&str, Architecture); 3] =
    [("llama", Architecture::Llama), ("qwen2", Architecture::Qwen2), ("qwen3", Architecture::Qwen3)];

/// What frequencies may be divided by: angles stay finite at every position.
const DIVISORS: std::ops::RangeInclusive<f32> = 1e-6..=1e6;

/// What the config takes from the tensors.
pub(super) struct Facts<'a> {
    /// Entries of the embedding, or else of the vocabulary.
    pub(super) vocab_size: usize,
    /// Whether there is a tensor of this name.
    pub(super) has: &'a dyn Fn(&str) -> bool,
    /// What each pair's frequency is divided by: `rope_freqs.weight`.
    pub(super) divisors: Option<Vec<f32>>,
}

/// Which way a model of this file is built.
///
/// # Errors
/// [`ModelError::Field`] for another than those that are known.
pub(super) fn architecture(fields: &Fields) -> Result<(&'static str, Architecture), ModelError> {
    let found = fields.text("general.architecture")?;
    let known = ARCHITECTURES.into_iter().find(|(name, _)| found == Some(*name));
    known.ok_or_else(|| fields.error("general.architecture", "\"llama\", \"qwen2\" or \"qwen3\""))
}

/// # Errors
/// [`ModelError::Field`] when a key is missing, of the wrong type, out of range, in contradiction to another, or says what no
/// decoder here does.
pub(super) fn config(fields: &Fields, facts: Facts) -> Result<ModelConfig, ModelError> {
    let (name, architecture) = architecture(fields)?;
    let key = |key: &str| format!("{name}.{key}");
    let required = |of: &str, max: usize| fields.required_count(&key(of), 1, max);

    if fields.count(&key("expert_count"), 0, usize::MAX)?.is_some_and(|n| n > 0) {
        return Err(fields.error(&key("expert_count"), "none: a mixture of experts is not supported"));
    }
    if fields.flag(&key("attention.causal"))? == Some(false) {
        return Err(fields.error(&key("attention.causal"), "true: a token sees those before it alone"));
    }
    let vocab_size = facts.vocab_size;
    if !(1..=VOCAB_SIZE_MAX).contains(&vocab_size) {
        let expected = format!("1 to {VOCAB_SIZE_MAX} tokens, not {vocab_size}");
        return Err(fields.error("tokenizer.ggml.tokens", expected));
    }
    let hidden_size = required("embedding_length", HIDDEN_SIZE_MAX)?;
    let n_layers = required("block_count", N_LAYERS_MAX)?;
    let n_heads = of_layers(fields, &key("attention.head_count"), n_layers)?.ok_or_else(|| {
        fields.error(&key("attention.head_count"), format!("an integer from 1 to {N_HEADS_MAX}"))
    })?;
    let n_kv_heads = of_layers(fields, &key("attention.head_count_kv"), n_layers)?.unwrap_or(n_heads);
    if !n_heads.is_multiple_of(n_kv_heads) {
        let expected = format!("a divisor of {}, which is {n_heads}", key("attention.head_count"));
        return Err(fields.error(&key("attention.head_count_kv"), expected));
    }
    let head_dim = head_dim(fields, &key, hidden_size, n_heads)?;
    let has_in_layers = |suffix: &str| (facts.has)(&format!("blk.0.{suffix}"));
    let (qkv_bias, attention_output_bias, mlp_bias) = match architecture {
        Architecture::Qwen2 => (true, false, false),
        _ => {
            (has_in_layers("attn_q.bias"), has_in_layers("attn_output.bias"), has_in_layers("ffn_gate.bias"))
        }
    };
    Ok(ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size: required("feed_forward_length", INTERMEDIATE_SIZE_MAX)?,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        n_positions: required("context_length", N_POSITIONS_MAX)?,
        rms_norm_eps: fields.required_number(&key("attention.layer_norm_rms_epsilon"), 1e-12, 1.0)? as f32,
        rope: rope(fields, &key, head_dim, facts.divisors)?,
        tied_embeddings: !(facts.has)("output.weight"),
        qkv_bias,
        attention_output_bias,
        mlp_bias,
        qk_norm: architecture == Architecture::Qwen3,
        windows: vec![None; n_layers],
    })
}

/// A number of heads: one number, or one for each layer that are all the same.
fn of_layers(fields: &Fields, key: &str, n_layers: usize) -> Result<Option<usize>, ModelError> {
    let Some(list) = fields.get(key).and_then(|value| value.as_array()) else {
        return fields.count(key, 1, N_HEADS_MAX);
    };
    let fail = || {
        fields.error(key, format!("an integer from 1 to {N_HEADS_MAX}, the same in all {n_layers} layers"))
    };
    let first = list.first().and_then(serde_json::Value::as_u64).ok_or_else(fail)?;
    let is_one = list.len() == n_layers && list.iter().all(|n| n.as_u64() == Some(first));
    let n = usize::try_from(first).ok().filter(|n| is_one && (1..=N_HEADS_MAX).contains(n));
    n.map(Some).ok_or_else(fail)
}

fn head_dim(
    fields: &Fields,
    key: &dyn Fn(&str) -> String,
    hidden_size: usize,
    n_heads: usize,
) -> Result<usize, ModelError> {
    let named = key("attention.key_length");
    let head_dim = match fields.count(&named, 1, HEAD_DIM_MAX)? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
        None => {
            let expected = format!(
                "a value, since an embedding of {hidden_size} is no multiple of {n_heads} attention heads"
            );
            return Err(fields.error(&named, expected));
        }
    };
    if !head_dim.is_multiple_of(2) || head_dim > HEAD_DIM_MAX {
        let expected = format!("an even number up to {HEAD_DIM_MAX}, not {head_dim}: RoPE rotates pairs");
        return Err(fields.error(&named, expected));
    }
    let others = [
        ("attention.value_length", "the length of values is that of keys"),
        ("rope.dimension_count", "all of a head is rotated"),
    ];
    for (other, why) in others {
        if fields.count(&key(other), 0, usize::MAX)?.is_some_and(|length| length != head_dim) {
            return Err(fields.error(&key(other), format!("{head_dim}: {why}")));
        }
    }
    Ok(head_dim)
}

fn rope(
    fields: &Fields,
    key: &dyn Fn(&str) -> String,
    head_dim: usize,
    divisors: Option<Vec<f32>>,
) -> Result<RopeConfig, ModelError> {
    let theta = fields.number(&key("rope.freq_base"), 1.0, THETA_MAX)?.unwrap_or(THETA_DEFAULT);
    let kind = key("rope.scaling.type");
    let factor = match fields.text(&kind)? {
        Some("none") => 1.0,
        // As in llama.cpp, where it is linear if nothing is said, the older key is looked at last, and 0 is no scaling.
        None | Some("linear") => {
            let mut name = key("rope.scaling.factor");
            let mut said = fields.number(&name, 0.0, FACTOR_MAX)?;
            if said.is_none() {
                name = key("rope.scale_linear");
                said = fields.number(&name, 0.0, FACTOR_MAX)?;
            }
            match said {
                None | Some(0.0) => 1.0,
                Some(factor) if factor < 1.0 => return Err(fields.error(&name, "0, or a number from 1")),
                Some(factor) => factor,
            }
        }
        Some(_) => return Err(fields.error(&kind, "\"none\" or \"linear\"")),
    };
    fields.number(&key("rope.scaling.attn_factor"), 1.0, 1.0)?;
    let scaling = match divisors {
        Some(divisors) => {
            let is_used =
                divisors.len() == head_dim / 2 && divisors.iter().all(|divisor| DIVISORS.contains(divisor));
            if !is_used {
                let (least, most) = (DIVISORS.start(), DIVISORS.end());
                let expected = format!("{} numbers from {least} to {most}", head_dim / 2);
                return Err(fields.error("rope_freqs.weight", expected));
            }
            RopeScaling::Divided {
                divisors: divisors.iter().map(|divisor| divisor * factor as f32).collect(),
            }
        }
        None if factor == 1.0 => RopeScaling::Default,
        None => RopeScaling::Linear { factor },
    };
    Ok(RopeConfig { theta, scaling })
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;

    fn llama() -> Value {
        json!({
            "general.architecture": "llama", "llama.embedding_length": 64, "llama.block_count": 2,
            "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2, "llama.feed_forward_length": 96,
            "llama.context_length": 128, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": 8,
        })
    }

    fn of(fields: &Value, tensors: &[&str], divisors: Option<Vec<f32>>) -> Result<ModelConfig, String> {
        let map: &Map<String, Value> = fields.as_object().expect("an object");
        let has = |name: &str| tensors.contains(&name);
        let facts = Facts { vocab_size: 100, has: &has, divisors };
        config(&Fields::new("x.gguf", map), facts).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_of_the_architecture_become_the_config() {
        let config = of(&llama(), &[], None).expect("a config");
        assert_eq!((config.hidden_size, config.n_layers, config.intermediate_size), (64, 2, 96));
        assert_eq!((config.n_heads, config.n_kv_heads, config.head_dim), (8, 2, 8));
        assert_eq!((config.n_positions, config.rms_norm_eps, config.vocab_size), (128, 1e-5, 100));
        assert_eq!(config.rope, RopeConfig { theta: 1e4, scaling: RopeScaling::Default });
        assert!(config.tied_embeddings && !config.qkv_bias && !config.qk_norm);
        let config = of(&llama(), &["output.weight", "blk.0.attn_q.bias"], None).expect("a config");
        assert!(!config.tied_embeddings && config.qkv_bias && !config.attention_output_bias);
    }

    #[test]
    fn scaling_is_linear_or_by_the_divisors_of_the_file() {
        let mut fields = llama();
        fields["llama.rope.scaling.type"] = json!("linear");
        fields["llama.rope.scaling.factor"] = json!(4.0);
        let scaling = |divisors| of(&fields, &[], divisors).map(|config| config.rope.scaling);
        assert_eq!(scaling(None), Ok(RopeScaling::Linear { factor: 4.0 }));
        let divided = RopeScaling::Divided { divisors: vec![4.0, 4.0, 8.0, 32.0] };
        assert_eq!(scaling(Some(vec![1.0, 1.0, 2.0, 8.0])), Ok(divided));
        for divisors in
            [vec![1.0; 3], vec![1.0, 0.0, 1.0, 1.0], vec![1.0, f32::NAN, 1.0, 1.0], vec![1e-40; 4]]
        {
            assert!(
                scaling(Some(divisors)).expect_err("refused").contains("4 numbers from 0.000001 to 1000000")
            );
        }
        // The type is linear if none is said; the older key is looked at last.
        for (said, factor) in [
            (json!({ "llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0 }), 4.0),
            (json!({ "llama.rope.scale_linear": 2.0 }), 2.0),
            (json!({ "llama.rope.scaling.factor": 0.0, "llama.rope.scale_linear": 2.0 }), 1.0),
        ] {
            let mut untyped = llama();
            for (key, value) in said.as_object().expect("an object") {
                untyped[key] = value.clone();
            }
            let scaling = of(&untyped, &[], None).expect("it is in order").rope.scaling;
            let expected = if factor == 1.0 { RopeScaling::Default } else { RopeScaling::Linear { factor } };
            assert_eq!(scaling, expected, "{said}");
        }
        fields["llama.rope.scaling.attn_factor"] = json!(1.2);
        assert!(of(&fields, &[], None).expect_err("refused").contains("attn_factor"));
        fields["llama.rope.scaling.attn_factor"] = json!(1.0);
        fields["llama.rope.scaling.type"] = json!("yarn");
        assert!(of(&fields, &[], None).expect_err("refused").contains("\"none\" or \"linear\""));
    }

    #[test]
    fn what_no_decoder_does_is_refused_by_its_key() {
        let cases = [
            ("general.architecture", json!("gemma"), "qwen3"),
            ("llama.expert_count", json!(8), "mixture of experts"),
            ("llama.attention.causal", json!(false), "those before it alone"),
            ("llama.block_count", json!(null), "an integer from 1 to"),
            ("llama.attention.head_count_kv", json!(3), "a divisor of llama.attention.head_count"),
            ("llama.attention.head_count", json!([8, 4]), "the same in all 2 layers"),
            ("llama.attention.value_length", json!(16), "8: the length of values"),
            ("llama.rope.dimension_count", json!(4), "8: all of a head"),
            ("llama.attention.key_length", json!(7), "an even number"),
            ("llama.attention.layer_norm_rms_epsilon", json!("NaN"), "a number from"),
        ];
        for (key, value, expected) in cases {
            let mut fields = llama();
            fields[key] = value;
            let refused = of(&fields, &[], None).expect_err("refused");
            assert!(refused.contains(key) && refused.contains(expected), "{refused}");
        }
        let mut fields = llama();
        fields["llama.attention.head_count"] = json!([8, 8]);
        assert_eq!(of(&fields, &[], None).expect("all the same").n_heads, 8);
    }
}
