//! Names of tensors in GGUF files, as transformers writes them. Theirs: `gguf-py/gguf/tensor_mapping.py` of llama.cpp.

use super::super::tensors::{EMBEDDING, FINAL_NORM, LM_HEAD, layer_tensor};

const OF_LAYERS: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// `None` for one that no decoder here has.
pub(super) fn transformers_name(name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some(EMBEDDING.to_owned()),
        "output_norm.weight" => return Some(FINAL_NORM.to_owned()),
        "output.weight" => return Some(LM_HEAD.to_owned()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer_idx: usize = layer.parse().ok()?;
    // One way to write it, so that no two names are one.
    let (part, end) = rest.rsplit_once('.').filter(|_| layer_idx.to_string() == layer)?;
    let (_, own) = OF_LAYERS.iter().find(|(known, _)| *known == part)?;
    matches!(end, "weight" | "bias").then(|| layer_tensor(layer_idx, &format!("{own}.{end}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tensor_has_one_name() {
        let of = |name: &str| transformers_name(name);
        assert_eq!(of("token_embd.weight").as_deref(), Some("model.embed_tokens.weight"));
        assert_eq!(of("blk.11.attn_q.bias").as_deref(), Some("model.layers.11.self_attn.q_proj.bias"));
        assert_eq!(
            of("blk.0.ffn_norm.weight").as_deref(),
            Some("model.layers.0.post_attention_layernorm.weight")
        );
        for other in [
            "blk.01.attn_q.weight",
            "blk.+1.attn_q.weight",
            "blk.0.attn_qkv.weight",
            "blk.0.attn_q.scale",
            "blk.0",
            "x",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
