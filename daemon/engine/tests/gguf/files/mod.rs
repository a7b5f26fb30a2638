//! GGUF files for tests: the bundled models in each of the types that are read, as llama.cpp's `convert_hf_to_gguf.py` writes them.
//!
//! Used by the tests of the engine and by those from end to end.

mod quantize;
mod writer;

use std::fs;
use std::path::Path;

use serde_json::Value;
use trellis_engine::model::{Architecture, Model, ModelSource, tensors};

pub use quantize::Type;
pub use writer::{Gguf, Meta};

/// What every file has: the shape of a decoder, under the keys of its architecture.
#[must_use]
pub fn shape(model: &Model) -> Gguf {
    let config = &model.config;
    let name = match config.architecture {
        Architecture::Llama | Architecture::Mistral => "llama",
        Architecture::Qwen2 => "qwen2",
        Architecture::Qwen3 => "qwen3",
    };
    let mut file = Gguf::default();
    file.set("general.architecture", Meta::Text(name.to_owned()));
    let counts = [
        ("context_length", config.n_positions),
        ("embedding_length", config.hidden_size),
        ("block_count", config.n_layers),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.n_heads),
        ("attention.head_count_kv", config.n_kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
    ];
    for (key, count) in counts {
        file.set(&format!("{name}.{key}"), Meta::U32(count as u32));
    }
    file.set(&format!("{name}.attention.layer_norm_rms_epsilon"), Meta::F32(config.rms_norm_eps));
    file.set(&format!("{name}.rope.freq_base"), Meta::F32(config.rope.theta as f32));
    file
}

/// The tensors of a model, matrices in one type and the rest in f32.
///
/// # Panics
/// A weight cannot be read.
pub fn add_tensors(file: &mut Gguf, model: &Model, matrices: Type) {
    let config = &model.config;
    for spec in tensors::expected(config) {
        let mut values = vec![0.0; spec.shape.iter().product()];
        model.checkpoint.read_f32(&spec.name, &mut values).expect("a tensor of the model");
        let row_len = spec.shape.get(1).copied().unwrap_or(1);
        let is_rotated = spec.name.contains("q_proj") || spec.name.contains("k_proj");
        if is_rotated && config.architecture == Architecture::Llama {
            values = by_pairs(&values, config.head_dim, row_len);
        }
        let kind = if spec.shape.len() == 2 { matrices } else { Type::F32 };
        file.add(&ggml_name(&spec.name), &spec.shape, kind.id(), kind.encode(&values));
    }
}

/// Rows of each head in the order in which ggml rotates them: the first of the lower half, the first of the upper one, and so on.
fn by_pairs(values: &[f32], head_dim: usize, row_len: usize) -> Vec<f32> {
    let heads = values.chunks_exact(head_dim * row_len);
    heads
        .flat_map(|head| {
            let rows: Vec<&[f32]> = head.chunks_exact(row_len).collect();
            (0..head_dim / 2)
                .flat_map(move |idx| [rows[idx], rows[idx + head_dim / 2]])
                .flatten()
                .copied()
                .collect::<Vec<_>>()
        })
        .collect()
}

fn ggml_name(name: &str) -> String {
    let parts = [
        ("model.embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("model.norm", "output_norm"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    parts.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// The vocabulary of byte pairs of a folder's `tokenizer.json`, to be cut into words in the manner of `pre`.
///
/// # Panics
/// The folder has none.
pub fn add_byte_pairs(file: &mut Gguf, folder: &Path, pre: &str) {
    add_byte_pairs_and(file, folder, pre, &[]);
}

/// As [`add_byte_pairs`], with more tokens behind them: texts, and what `tokenizer.ggml.token_type` says of them.
///
/// # Panics
/// The folder has none.
pub fn add_byte_pairs_and(file: &mut Gguf, folder: &Path, pre: &str, more: &[(&str, i32)]) {
    let json = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(folder.join(name)).expect("it is there")).expect("it is JSON")
    };
    let tokenizer = json("tokenizer.json");
    let vocab = tokenizer["model"]["vocab"].as_object().expect("a vocabulary");
    let mut tokens = vec![String::new(); vocab.len()];
    for (text, token) in vocab {
        text.clone_into(&mut tokens[token.as_u64().expect("a number") as usize]);
    }
    let mut kinds = vec![1; tokens.len()];
    for added in tokenizer["added_tokens"].as_array().expect("a list") {
        kinds[added["id"].as_u64().expect("a number") as usize] = 3;
    }
    tokens.extend(more.iter().map(|(text, _)| (*text).to_owned()));
    kinds.extend(more.iter().map(|(_, kind)| *kind));
    let merges = tokenizer["model"]["merges"].as_array().expect("a list").iter().map(|merge| match merge {
        Value::String(merge) => merge.clone(),
        pair => format!("{} {}", pair[0].as_str().expect("a text"), pair[1].as_str().expect("a text")),
    });
    file.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
    file.set("tokenizer.ggml.pre", Meta::Text(pre.into()));
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    file.set("tokenizer.ggml.merges", Meta::Texts(merges.collect()));
    let config = json("config.json");
    let first = |value: &Value| value.as_u64().or_else(|| value[0].as_u64()).expect("a token") as u32;
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(first(&config["bos_token_id"])));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(first(&config["eos_token_id"])));
    file.set("tokenizer.ggml.add_bos_token", Meta::Flag(true));
    if let Some(template) = json("tokenizer_config.json")["chat_template"].as_str() {
        file.set("tokenizer.chat_template", Meta::Text(template.into()));
    }
}

/// A model of a folder as one file, its matrices in one type.
///
/// # Panics
/// There is no such model.
#[must_use]
pub fn of_folder(folder: &Path, matrices: Type) -> Gguf {
    let model = Model::open("original", &ModelSource::Folder(folder.to_owned())).expect("the model opens");
    let mut file = shape(&model);
    add_byte_pairs(&mut file, folder, "qwen2");
    add_tensors(&mut file, &model, matrices);
    file
}
