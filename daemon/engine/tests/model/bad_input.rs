//! Broken folders: each is told what was expected and what was found, and none panics.

use std::fs;
use std::path::Path;

use safetensors::tensor::Dtype as FileDtype;
use serde_json::{Value, json};
use tempfile::TempDir;
use trellis_engine::model::{Model, ModelError, ModelSource};

use super::folder::{Draft, open};

fn llama() -> Draft {
    Draft::new("LlamaForCausalLM", json!({}), FileDtype::BF16)
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

fn error(folder: &TempDir) -> ModelError {
    open(folder).expect_err("a broken folder does not open")
}

#[test]
fn missing_files() {
    let nowhere = ModelSource::Folder("/nowhere/at/all".into());
    assert!(
        matches!(Model::open("x", &nowhere), Err(ModelError::NotAFolder { path }) if path == "/nowhere/at/all")
    );
    assert!(matches!(
        Model::open("x", &ModelSource::Embedded(&[])),
        Err(ModelError::MissingFile { file, .. }) if file == "config.json"
    ));
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = llama().write();
        let path = folder.path().join(name);
        fs::remove_file(&path).unwrap();
        assert!(
            matches!(error(&folder), ModelError::MissingFile { file, .. } if file == path.display().to_string())
        );
        fs::create_dir(&path).unwrap();
        assert!(matches!(error(&folder), ModelError::Io { file, .. } if file == path.display().to_string()));
    }
}

#[test]
fn a_config_beyond_all_reason() {
    let folder = llama().write();
    fs::write(folder.path().join("config.json"), vec![b' '; 5 << 20]).unwrap();
    assert!(matches!(
        error(&folder),
        ModelError::TooLarge { found_bytes: 5_242_880, limit_bytes: 4_194_304, .. }
    ));
}

#[test]
fn truncated_and_lengthened_weights() {
    for n_shards in [1, 2] {
        let mut draft = llama();
        draft.n_shards = n_shards;
        let folder = draft.write();
        let name = if n_shards == 1 { "model.safetensors" } else { "model-00002-of-00002.safetensors" };
        let path = folder.path().join(name);
        let whole = fs::read(&path).unwrap();
        let length = whole.len() as u64;
        for change in [-1, -1000, 1] {
            let mut bytes = whole.clone();
            bytes.resize((length as i64 + change) as usize, 0);
            fs::write(&path, &bytes).unwrap();
            match error(&folder) {
                ModelError::FileLength { file, expected_bytes, found_bytes } => {
                    assert_eq!(file, path.display().to_string());
                    assert_eq!((expected_bytes, found_bytes), (length, (length as i64 + change) as u64));
                }
                other => panic!("{other}"),
            }
        }
        for n_bytes in [0, 7, 8, 100] {
            fs::write(&path, &whole[..n_bytes]).unwrap();
            assert!(
                matches!(error(&folder), ModelError::FileLength { found_bytes, .. } if found_bytes == n_bytes as u64)
            );
        }
    }
}

#[test]
fn broken_headers() {
    let header_error = |header: &[u8], length: u64| {
        let folder = llama().write();
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(header);
        bytes.resize(bytes.len() + 64, 0);
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        error(&folder)
    };
    let cases = [
        r#"not json"#.to_owned(),
        r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[-16,0]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[16],"data_offsets":[64,128]}}"#.into(),
        r#"{"a":{"dtype":"F99","shape":[16],"data_offsets":[0,64]}}"#.into(),
        format!(r#"{{"a":{{"dtype":"F32","shape":[{0},{0}],"data_offsets":[0,64]}}}}"#, u64::MAX / 2),
        "[".repeat(100_000),
    ];
    for header in cases {
        let found = header_error(header.as_bytes(), header.len() as u64);
        assert!(matches!(found, ModelError::Header { .. }), "{header:.80}: {found}");
    }
    for length in [u64::MAX, u64::MAX - 8, 1 << 40] {
        assert!(matches!(header_error(b"{}", length), ModelError::Header { .. }));
    }
    let huge =
        format!(r#"{{"a":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{}]}}}}"#, 1u64 << 50, 1u64 << 52);
    let found = header_error(huge.as_bytes(), huge.len() as u64);
    assert!(matches!(found, ModelError::FileLength { .. }), "{found}");
}

#[test]
fn other_element_types() {
    let mut draft = llama();
    let tensor = draft.tensors.get_mut("model.norm.weight").unwrap();
    (tensor.0, tensor.2) = (FileDtype::I64, vec![0; 24 * 8]);
    match error(&draft.write()) {
        ModelError::TensorDtype { tensor, found, .. } => {
            assert_eq!((tensor.as_str(), found.as_str()), ("model.norm.weight", "I64"));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn indexes_that_contradict_their_shards() {
    let sharded = || {
        let mut draft = llama();
        draft.n_shards = 2;
        let folder = draft.write();
        let index = folder.path().join("model.safetensors.index.json");
        (folder, index)
    };
    let second = "model-00002-of-00002.safetensors";

    let (folder, _) = sharded();
    fs::remove_file(folder.path().join(second)).unwrap();
    assert!(matches!(error(&folder), ModelError::MissingFile { file, .. } if file.ends_with(second)));

    let (folder, index) = sharded();
    edit_json(&index, |index| index["weight_map"]["model.phantom.weight"] = json!(second));
    assert!(matches!(error(&folder), ModelError::NotInShard { tensor, shard_file, .. }
        if tensor == "model.phantom.weight" && shard_file.ends_with(second)));

    // The first tensor by name is in the first shard.
    let (folder, index) = sharded();
    edit_json(&index, |index| index["weight_map"]["lm_head.weight"] = json!(second));
    assert!(matches!(error(&folder), ModelError::NotInShard { tensor, .. } if tensor == "lm_head.weight"));

    let (folder, index) = sharded();
    fs::copy(folder.path().join(second), folder.path().join("copy.safetensors")).unwrap();
    edit_json(&index, |index| {
        let places = index["weight_map"].as_object_mut().unwrap();
        let tensor = places.iter().find(|(_, place)| *place == second).unwrap().0.clone();
        places.insert(tensor, json!("copy.safetensors"));
    });
    assert!(matches!(error(&folder), ModelError::DuplicateTensor { .. }));

    for place in ["../model.safetensors", "/etc/passwd", "a\\b", "", ".."] {
        let (folder, index) = sharded();
        edit_json(&index, |index| index["weight_map"]["lm_head.weight"] = json!(place));
        assert!(
            matches!(error(&folder), ModelError::Field { field, .. } if field == "weight_map.lm_head.weight")
        );
    }

    for text in ["", "{}", r#"{"weight_map": {"a": 1}}"#, r#"{"weight_map": []}"#] {
        let (folder, index) = sharded();
        fs::write(index, text).unwrap();
        assert!(matches!(error(&folder), ModelError::Syntax { .. }), "{text}");
    }
    let (folder, index) = sharded();
    fs::write(index, r#"{"weight_map": {}}"#).unwrap();
    assert!(matches!(error(&folder), ModelError::Field { field, .. } if field == "weight_map"));
}

#[test]
fn weights_that_contradict_the_config() {
    let missing = |mut draft: Draft, name: &str, shape: &[usize]| {
        draft.tensors.remove(name).unwrap();
        match error(&draft.write()) {
            ModelError::MissingTensor { tensor, expected, file } => {
                assert_eq!((tensor.as_str(), expected.as_slice()), (name, shape));
                assert!(file.ends_with("model.safetensors"));
            }
            other => panic!("{other}"),
        }
    };
    missing(llama(), "lm_head.weight", &[4096, 24]);
    missing(llama(), "model.layers.2.self_attn.k_proj.weight", &[16, 24]);
    let qwen2 = Draft::new("Qwen2ForCausalLM", json!({}), FileDtype::BF16);
    missing(qwen2, "model.layers.0.self_attn.q_proj.bias", &[32]);
    let qwen3 = Draft::new("Qwen3ForCausalLM", json!({}), FileDtype::BF16);
    missing(qwen3, "model.layers.1.self_attn.q_norm.weight", &[8]);

    let misshapen = |changes: Value, name: &str, expected_shape: &[usize], found_shape: &[usize]| {
        let mut draft = llama();
        for (field, value) in changes.as_object().unwrap() {
            draft.config[field] = value.clone();
        }
        match error(&draft.write()) {
            ModelError::TensorShape { tensor, expected, found, .. } => {
                assert_eq!(tensor, name);
                assert_eq!((expected.as_slice(), found.as_slice()), (expected_shape, found_shape));
            }
            other => panic!("{other}"),
        }
    };
    misshapen(json!({"vocab_size": 5000}), "model.embed_tokens.weight", &[5000, 24], &[4096, 24]);
    misshapen(
        json!({"num_key_value_heads": 4}),
        "model.layers.0.self_attn.k_proj.weight",
        &[32, 24],
        &[16, 24],
    );
    misshapen(json!({"head_dim": 6}), "model.layers.0.self_attn.q_proj.weight", &[24, 24], &[32, 24]);

    let unexpected = |draft: Draft, name: &str| match error(&draft.write()) {
        ModelError::UnexpectedTensor { tensor, .. } => assert_eq!(tensor, name),
        other => panic!("{other}"),
    };
    let mut biased = Draft::new("LlamaForCausalLM", json!({"attention_bias": true}), FileDtype::BF16);
    biased.config["attention_bias"] = json!(false);
    unexpected(biased, "model.layers.0.self_attn.k_proj.bias");
    let mut deeper = llama();
    deeper.config["num_hidden_layers"] = json!(2);
    unexpected(deeper, "model.layers.2.input_layernorm.weight");
}

#[test]
fn tokens_out_of_range() {
    for eos in [json!(4096), json!(-1), json!([1, 4096]), json!("</s>"), json!(vec![1; 1000])] {
        let mut draft = llama();
        draft.config["eos_token_id"] = eos.clone();
        let found = error(&draft.write());
        assert!(
            matches!(&found, ModelError::Field { field, .. } if field == "eos_token_id"),
            "{eos}: {found}"
        );
    }
    let folder = llama().write();
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"bos_token": "<nope>"}"#).unwrap();
    assert!(matches!(error(&folder), ModelError::Field { field, .. } if field == "bos_token"));
}

#[test]
fn broken_tokenizers() {
    let broken = |edit: fn(&mut Value)| {
        let folder = llama().write();
        edit_json(&folder.path().join("tokenizer.json"), edit);
        error(&folder)
    };
    type Damage = (&'static str, fn(&mut Value));
    let cases: [Damage; 6] = [
        ("no object", |value| *value = json!(3)),
        ("no model", |value| *value = json!({"version": "1.0"})),
        ("merge of unknown pieces", |value| value["model"]["merges"][0] = json!(["no such", "piece"])),
        ("another decoder", |value| {
            value["decoder"] =
                json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true})
        }),
        ("no decoder", |value| value["decoder"] = json!(null)),
        ("random merges", |value| value["model"]["dropout"] = json!(0.5)),
    ];
    for (what, edit) in cases {
        let found = broken(edit);
        assert!(matches!(found, ModelError::Tokenizer { .. }), "{what}: {found}");
    }
    let found = broken(|value| value["model"]["vocab"]["far out"] = json!(u32::MAX));
    assert!(matches!(found, ModelError::Vocabulary { token: u32::MAX, vocab_size: 4096, .. }), "{found}");

    let folder = llama().write();
    let path = folder.path().join("tokenizer.json");
    let whole = fs::read(&path).unwrap();
    for n_bytes in [0, 1, 1000, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..n_bytes]).unwrap();
        assert!(matches!(error(&folder), ModelError::Tokenizer { .. }));
    }
}

#[test]
fn broken_chat_templates() {
    let folder = llama().write();
    let path = folder.path().join("tokenizer_config.json");
    for template in [json!(3), json!({}), json!([]), json!([{"name": "rag", "template": "x"}])] {
        fs::write(&path, json!({"chat_template": template}).to_string()).unwrap();
        assert!(
            matches!(error(&folder), ModelError::Field { field, .. } if field == "chat_template"),
            "{template}"
        );
    }
    for template in ["{% for %}", "{{ ", "{% if x %}"] {
        fs::write(&path, json!({"chat_template": template}).to_string()).unwrap();
        assert!(matches!(error(&folder), ModelError::Template { .. }), "{template}");
    }
    fs::write(folder.path().join("chat_template.jinja"), b"\xff").unwrap();
    assert!(
        matches!(error(&folder), ModelError::Syntax { file, .. } if file.ends_with("chat_template.jinja"))
    );
}
