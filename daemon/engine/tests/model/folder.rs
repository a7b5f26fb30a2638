//! Small random models of every form, written and opened again.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype as FileDtype, TensorView, serialize};
use serde_json::{Value, json};
use tempfile::TempDir;
use trellis_engine::model::{Dtype, Model, ModelConfig, ModelError, ModelSource, tensors};

/// A model folder under construction.
pub(crate) struct Draft {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, (FileDtype, Vec<usize>, Vec<u8>)>,
    pub(crate) n_shards: usize,
}

impl Draft {
    /// A random model of an architecture, with `changes` to its config.
    pub(crate) fn new(architecture: &str, changes: Value, dtype: FileDtype) -> Self {
        let mut config = json!({
            "architectures": [architecture], "hidden_size": 24, "intermediate_size": 20, "head_dim": 8,
            "max_position_embeddings": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 3, "vocab_size": 4096, "eos_token_id": 1, "bos_token_id": 0,
        });
        for (field, value) in changes.as_object().unwrap() {
            config[field] = value.clone();
        }
        let parsed = ModelConfig::from_json("config.json", config.to_string().as_bytes()).unwrap();
        let mut state = 1u64;
        let tensors = tensors::expected(&parsed)
            .into_iter()
            .map(|spec| {
                let n_elements: usize = spec.shape.iter().product();
                let bytes = (0..n_elements).flat_map(|_| element(random(&mut state), dtype)).collect();
                (spec.name, (dtype, spec.shape, bytes))
            })
            .collect();
        Self { config, tensors, n_shards: 1 }
    }

    pub(crate) fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let tiny = super::bundled_path("tiny");
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(tiny.join(name), folder.path().join(name)).unwrap();
        }
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        self.write_weights(folder.path());
        folder
    }

    fn write_weights(&self, folder: &Path) {
        if self.n_shards == 1 {
            fs::write(folder.join("model.safetensors"), self.shard(0)).unwrap();
            return;
        }
        let file_name = |idx: usize| format!("model-{:05}-of-{:05}.safetensors", idx + 1, self.n_shards);
        let mut places = serde_json::Map::new();
        for (idx, name) in self.tensors.keys().enumerate() {
            places.insert(name.clone(), json!(file_name(idx % self.n_shards)));
        }
        for idx in 0..self.n_shards {
            fs::write(folder.join(file_name(idx)), self.shard(idx)).unwrap();
        }
        let index = json!({"metadata": {"total_size": 0}, "weight_map": places});
        fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    fn shard(&self, shard_idx: usize) -> Vec<u8> {
        let views = self.tensors.iter().enumerate().filter(|(idx, _)| idx % self.n_shards == shard_idx).map(
            |(_, (name, (dtype, shape, bytes)))| {
                (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
            },
        );
        serialize(views, None).unwrap()
    }
}

pub(crate) fn open(folder: &TempDir) -> Result<Model, ModelError> {
    Model::open("test", &ModelSource::Folder(folder.path().to_owned()))
}

/// In `[-1, 1)` with 8 significant bits, so that every element type holds it exactly.
fn random(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 56) as f32 - 128.0) / 128.0
}

fn element(value: f32, dtype: FileDtype) -> Vec<u8> {
    match dtype {
        FileDtype::F32 => value.to_le_bytes().to_vec(),
        FileDtype::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        FileDtype::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => unreachable!("tests write three types"),
    }
}

/// The numbers that [`Draft::new`] put into the tensors, in their order of use.
fn assert_weights(model: &Model) {
    let mut state = 1;
    for spec in tensors::expected(&model.config) {
        let info = model.checkpoint.tensor(&spec.name).unwrap();
        assert_eq!(info.shape, spec.shape);
        let mut found = vec![f32::NAN; info.n_elements()];
        model.checkpoint.read_f32(&spec.name, &mut found).unwrap();
        let expected: Vec<f32> = found.iter().map(|_| random(&mut state)).collect();
        assert!(found == expected, "{}", spec.name);
        let mut bytes = vec![0; info.n_bytes];
        model.checkpoint.read_bytes(&spec.name, &mut bytes).unwrap();
        let file_dtype = match info.dtype {
            Dtype::F32 => FileDtype::F32,
            Dtype::F16 => FileDtype::F16,
            Dtype::Bf16 => FileDtype::BF16,
        };
        assert!(bytes == expected.iter().flat_map(|x| element(*x, file_dtype)).collect::<Vec<_>>());
    }
}

#[test]
fn every_architecture_element_type_and_sharding() {
    let forms = [
        ("LlamaForCausalLM", json!({})),
        ("LlamaForCausalLM", json!({"tie_word_embeddings": true, "num_key_value_heads": 1})),
        ("LlamaForCausalLM", json!({"attention_bias": true, "mlp_bias": true})),
        ("MistralForCausalLM", json!({"sliding_window": 16, "num_key_value_heads": 4})),
        ("Qwen2ForCausalLM", json!({"tie_word_embeddings": true})),
        ("Qwen3ForCausalLM", json!({"head_dim": 16})),
        ("Qwen3ForCausalLM", json!({"attention_bias": true})),
    ];
    let dtypes = [(FileDtype::F32, Dtype::F32), (FileDtype::F16, Dtype::F16), (FileDtype::BF16, Dtype::Bf16)];
    for (architecture, changes) in forms {
        for (file_dtype, dtype) in dtypes {
            let mut draft = Draft::new(architecture, changes.clone(), file_dtype);
            let n_parameters: usize =
                draft.tensors.values().map(|(_, shape, _)| shape.iter().product::<usize>()).sum();
            let mut fingerprints = Vec::new();
            for n_shards in [1, 3] {
                draft.n_shards = n_shards;
                let folder = draft.write();
                let model = open(&folder).unwrap();
                assert_weights(&model);
                assert_eq!((model.dtype, model.n_parameters), (dtype, n_parameters as u64));
                fingerprints.push(model.fingerprint);
            }
            assert_ne!(fingerprints[0], fingerprints[1]);
        }
    }
}

#[test]
fn a_tensor_longer_than_one_chunk_is_read_whole() {
    for dtype in [FileDtype::F32, FileDtype::BF16] {
        // 4096 x 200 elements; 200 divides no power of two, so that the last chunk is a part.
        let draft =
            Draft::new("LlamaForCausalLM", json!({"hidden_size": 200, "num_hidden_layers": 1}), dtype);
        assert_weights(&open(&draft.write()).unwrap());
    }
}

#[test]
fn leftovers_of_old_versions_are_let_pass() {
    let mut draft = Draft::new("LlamaForCausalLM", json!({"tie_word_embeddings": true}), FileDtype::F32);
    let head = draft.tensors[tensors::EMBEDDING].clone();
    draft.tensors.insert(tensors::LM_HEAD.into(), head);
    let inv_freq = (FileDtype::F32, vec![4], vec![0; 16]);
    draft.tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), inv_freq);
    open(&draft.write()).unwrap();
}

#[test]
fn weights_alone_change_the_fingerprint() {
    let mut draft = Draft::new("LlamaForCausalLM", json!({}), FileDtype::F32);
    let before = open(&draft.write()).unwrap().fingerprint;
    assert_eq!(before, open(&draft.write()).unwrap().fingerprint);
    draft.tensors.get_mut("model.layers.2.mlp.up_proj.weight").unwrap().2[5] ^= 1;
    assert_ne!(before, open(&draft.write()).unwrap().fingerprint);
}

#[test]
fn stop_and_start_tokens_come_from_the_right_file() {
    let draft = Draft::new("LlamaForCausalLM", json!({"eos_token_id": [2, 5, 2]}), FileDtype::F32);
    let folder = draft.write();
    assert_eq!(open(&folder).unwrap().stop_tokens, [2, 5]);
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": 9}"#).unwrap();
    assert_eq!(open(&folder).unwrap().stop_tokens, [9]);

    let bos_token = |tokenizer_config: &str| {
        fs::write(folder.path().join("tokenizer_config.json"), tokenizer_config).unwrap();
        open(&folder).unwrap().bos_token
    };
    assert_eq!(bos_token(r#"{"bos_token": {"content": "<|user|>"}}"#), Some(3));
    assert_eq!(bos_token(r#"{"bos_token": null}"#), None);
    assert_eq!(bos_token("{}"), Some(0));
    fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
    let model = open(&folder).unwrap();
    assert!(model.chat.is_none());
    assert_eq!(model.bos_token, Some(0));
}
