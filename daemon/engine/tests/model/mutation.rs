//! Files with random damage: an error or a model, never a panic.

use std::fs;
use std::sync::LazyLock;

use proptest::prelude::*;
use safetensors::tensor::Dtype as FileDtype;
use serde_json::json;
use tempfile::TempDir;
use trellis_engine::model::{GenerationPrompt, Message, Role, SpecialText, SpecialTokens};

use super::folder::{Draft, open};

const FILES: [&str; 5] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
];

/// A sharded model of which every file is small.
static FOLDER: LazyLock<(TempDir, Vec<Vec<u8>>)> = LazyLock::new(|| {
    let changes = json!({"vocab_size": 300, "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}});
    let mut draft = Draft::new("Qwen3ForCausalLM", changes, FileDtype::F16);
    draft.n_shards = 2;
    let folder = draft.write();
    fs::write(folder.path().join("tokenizer.json"), super::tokenizer::pieces_json()).unwrap();
    let config = json!({"bos_token": "<s>", "chat_template":
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    open(&folder).unwrap();
    let files = FILES.map(|name| fs::read(folder.path().join(name)).unwrap()).to_vec();
    (folder, files)
});

/// Characters that JSON is made of, digits, and any byte.
fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![prop::sample::select(b"{}[]\",:0129-.eE\\ntf<>".to_vec()), any::<u8>()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_never_panic(
        file_idx in 0..FILES.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), byte(), 0..3u8), 1..6),
    ) {
        let (folder, files) = &*FOLDER;
        let mut bytes = files[file_idx].clone();
        // The header is where a weights file can be wrong.
        let n_reachable = bytes.len().min(6000);
        for (place, byte, kind) in changes {
            let place = place.index(n_reachable.min(bytes.len()));
            match kind {
                0 => bytes[place] = byte,
                1 => bytes.insert(place, byte),
                _ => { bytes.remove(place); }
            }
        }
        let path = folder.path().join(FILES[file_idx]);
        fs::write(&path, &bytes).unwrap();
        let result = open(folder);
        fs::write(&path, &files[file_idx]).unwrap();
        match result {
            Ok(model) => {
                let text = "hi </s> hi <s>€\n";
                if let Ok(tokens) = model.tokenizer.encode(text, SpecialTokens::Parse) {
                    model.tokenizer.decode(&tokens, SpecialText::Skip);
                }
                let messages = [Message { role: Role::User, content: text.into() }];
                if let Some(chat) = &model.chat {
                    chat.encode(&model.tokenizer, &messages, GenerationPrompt::Add, None).ok();
                }
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
