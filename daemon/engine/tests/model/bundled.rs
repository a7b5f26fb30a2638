use super::{bundled_path, golden_cases, golden_tokens, open_bundled};
use trellis_engine::model::{Architecture, Dtype, Model, ModelSource, RopeScaling, SpecialTokens, tensors};

static TINY_EMBEDDED: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../../../models/tiny/config.json")),
    ("generation_config.json", include_bytes!("../../../models/tiny/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../../models/tiny/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../models/tiny/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../../../models/tiny/model.safetensors")),
];

#[test]
fn tiny_is_what_its_config_says() {
    let tiny = open_bundled("tiny");
    assert_eq!(tiny.name, "tiny");
    assert_eq!(tiny.config.architecture, Architecture::Llama);
    assert_eq!((tiny.config.n_layers, tiny.config.hidden_size, tiny.config.vocab_size), (8, 256, 4096));
    assert_eq!((tiny.config.n_heads, tiny.config.n_kv_heads, tiny.config.head_dim), (4, 2, 64));
    assert_eq!(tiny.config.rope.scaling, RopeScaling::Default);
    assert_eq!(tiny.config.windows, vec![None; 8]);
    assert!(tiny.config.tied_embeddings);
    assert_eq!(tiny.bos_token, Some(0));
    assert_eq!(tiny.stop_tokens, [1, 6]);
    assert_eq!(tiny.dtype, Dtype::Bf16);
    // Two bytes for each weight; the rest of the file is its header.
    let file_bytes = std::fs::metadata(bundled_path("tiny").join("model.safetensors")).unwrap().len();
    assert!((1..10_000).contains(&(file_bytes - 2 * tiny.n_parameters)));
}

#[test]
fn a_folder_and_the_same_files_embedded_are_the_same_model() {
    let folder = open_bundled("tiny");
    let embedded = Model::open("tiny", &ModelSource::Embedded(TINY_EMBEDDED)).unwrap();
    assert_eq!(folder.config, embedded.config);
    assert_eq!(folder.fingerprint, embedded.fingerprint);
    assert_ne!(folder.fingerprint, open_bundled("draft").fingerprint);

    let name = tensors::layer_tensor(3, "mlp.down_proj.weight");
    let info = folder.checkpoint.tensor(&name).unwrap();
    let (mut from_folder, mut from_memory) = (vec![0.0; info.n_elements()], vec![1.0; info.n_elements()]);
    folder.checkpoint.read_f32(&name, &mut from_folder).unwrap();
    embedded.checkpoint.read_f32(&name, &mut from_memory).unwrap();
    assert_eq!(from_folder, from_memory);
    let mean_square = from_folder.iter().map(|x| x * x).sum::<f32>() / from_folder.len() as f32;
    assert!((1e-6..1.0).contains(&mean_square), "{mean_square}");
}

#[test]
fn golden_prompts_encode_to_the_tokens_of_transformers() {
    for name in ["tiny", "draft"] {
        let model = open_bundled(name);
        for case in golden_cases(name) {
            let prompt = case["prompt"].as_str().unwrap();
            let tokens = model.tokenizer.encode(prompt, SpecialTokens::Parse).unwrap();
            assert_eq!(tokens, golden_tokens(&case["prompt_ids"]), "{prompt:?}");
        }
    }
}
