use super::bundled_path;
use trellis_engine::backend::{Backend, PAGE_LEN};
use trellis_engine::batch::{
    Batch, Input, Output, OutputKind, OutputRequest, PageId, Requests, Row, SlotId, Token, Tokens,
};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::{
    DecodeStream, Dtype, Model, ModelConfig, ModelError, SHAPES, SpecialText, SpecialTokens, shape, tensors,
};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

fn tokenizer_json() -> Vec<u8> {
    std::fs::read(bundled_path("tiny").join("tokenizer.json")).unwrap()
}

/// Odd sizes, biases and head norms.
fn small() -> ModelConfig {
    ModelConfig {
        vocab_size: 5001,
        hidden_size: 90,
        intermediate_size: 131,
        n_layers: 2,
        n_heads: 6,
        n_kv_heads: 3,
        head_dim: 14,
        n_positions: 256,
        qkv_bias: true,
        mlp_bias: true,
        qk_norm: true,
        windows: vec![None, Some(20)],
        ..shape("llama-3.2-1b").unwrap()
    }
}

fn random(config: ModelConfig, dtype: Dtype, seed: u64) -> Model {
    Model::with_random_weights("random", config, dtype, seed, &tokenizer_json()).unwrap()
}

/// Sizes as on the models' pages: parameters over all tensors of their safetensors files.
#[test]
fn shapes_have_the_published_numbers_of_parameters() {
    let published =
        [8_030_261_248, 1_235_814_400, 3_212_749_824, 7_241_732_096, 7_615_616_512, 8_190_735_360];
    for (name, n_parameters) in SHAPES.into_iter().zip(published) {
        let config = shape(name).unwrap();
        assert_eq!(config.windows.len(), config.n_layers);
        let model = random(config, Dtype::Bf16, 1);
        assert_eq!((model.n_parameters, model.dtype), (n_parameters, Dtype::Bf16), "{name}");
    }
    assert!(shape("llama").is_none());
}

#[test]
fn values_are_finite_and_small_in_every_type() {
    for dtype in DTYPES {
        let model = random(small(), dtype, 1);
        for spec in tensors::expected(&model.config) {
            let mut values = vec![f32::NAN; spec.shape.iter().product()];
            model.checkpoint.read_f32(&spec.name, &mut values).unwrap();
            if spec.name.ends_with("norm.weight") {
                assert!(values.iter().all(|&x| x == 1.0), "{}", spec.name);
                continue;
            }
            assert!(values.iter().all(|x| (1.0 / 128.0..1.0 / 32.0).contains(&x.abs())), "{}", spec.name);
            let n = values.len() as f64;
            let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
            let deviation = (values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n).sqrt();
            assert!(mean.abs() <= 5.0 * 0.02 / n.sqrt(), "{}: mean {mean}", spec.name);
            if n > 1000.0 {
                assert!((0.018..0.020).contains(&deviation), "{}: {deviation}", spec.name);
            }
        }
    }
}

#[test]
fn ranges_are_parts_of_the_whole() {
    for dtype in DTYPES {
        let model = random(small(), dtype, 1);
        for name in ["model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.bias"] {
            let mut whole = vec![0; model.checkpoint.tensor(name).unwrap().n_bytes];
            model.checkpoint.read_bytes(name, &mut whole).unwrap();
            for start in [0, 1, 2, 7, 8, 9, 33, whole.len() - 3, whole.len()] {
                for len in [0, 1, 3, 8, 21, whole.len()] {
                    let len = len.min(whole.len() - start);
                    let mut part = vec![0; len];
                    model.checkpoint.read_bytes_at(name, start, &mut part).unwrap();
                    assert_eq!(part, whole[start..start + len], "{name} {start} {len}");
                }
            }
        }
    }
}

#[test]
fn ranges_of_a_file_are_parts_of_the_whole() {
    let model = super::open_bundled("tiny");
    let name = "model.layers.3.self_attn.k_proj.weight";
    let mut whole = vec![0; model.checkpoint.tensor(name).unwrap().n_bytes];
    model.checkpoint.read_bytes(name, &mut whole).unwrap();
    let mut part = vec![0; 1001];
    model.checkpoint.read_bytes_at(name, 777, &mut part).unwrap();
    assert_eq!(part, whole[777..1778]);
    let missing = model.checkpoint.read_bytes_at("lm_head.weight", 0, &mut part);
    assert!(matches!(missing, Err(ModelError::UnknownTensor { .. })));
}

#[test]
#[should_panic(expected = "2 bytes from 179 on of model.norm.weight, which has 180")]
fn a_range_past_the_end_is_a_bug() {
    let _ = random(small(), Dtype::Bf16, 1).checkpoint.read_bytes_at("model.norm.weight", 179, &mut [0; 2]);
}

#[test]
fn the_fingerprint_tells_shape_type_and_seed() {
    let of = |config, dtype, seed| random(config, dtype, seed).fingerprint;
    let first = of(small(), Dtype::Bf16, 1);
    assert_eq!(first, of(small(), Dtype::Bf16, 1));
    assert_ne!(first, of(small(), Dtype::Bf16, 2));
    assert_ne!(first, of(small(), Dtype::F16, 1));
    assert_ne!(first, of(ModelConfig { n_positions: 255, ..small() }, Dtype::Bf16, 1));
}

/// The vocabulary of the config goes past that of the tokenizer.
#[test]
fn tokens_past_the_tokenizer_stand_for_nothing() {
    let model = random(small(), Dtype::Bf16, 1);
    assert!(model.chat.is_none() && model.bos_token.is_none() && model.stop_tokens.is_empty());
    let mut tokens = model.tokenizer.encode("one two", SpecialTokens::Parse).unwrap();
    assert!(model.tokenizer.vocab_size() <= 4096);
    for token in [4096, 5000, 5001, Token::MAX] {
        assert_eq!(model.tokenizer.token_bytes(token), None);
        assert!(!model.tokenizer.is_special(token));
        tokens.push(token);
    }
    assert_eq!(model.tokenizer.decode(&tokens, SpecialText::Keep), "one two");
    let mut stream = DecodeStream::new(SpecialText::Skip);
    let text: String = tokens.iter().map(|&token| stream.push(&model.tokenizer, token)).collect();
    assert_eq!(text + &stream.finish(), "one two");

    let few = ModelConfig { vocab_size: 100, ..small() };
    let refused = Model::with_random_weights("random", few, Dtype::Bf16, 1, &tokenizer_json());
    assert!(matches!(refused, Err(ModelError::Vocabulary { vocab_size: 100, .. })));
}

#[test]
fn the_cpu_runs_a_random_model() {
    let options =
        CpuOptions { n_pages: 8, n_host_pages: 0, n_threads: None, n_rows_max: 1, n_tokens_max: 64 };
    let tokens: Vec<Token> = (0..50).map(|i| i * 101 % 5001).collect();
    for dtype in DTYPES {
        let model = random(small(), dtype, 1);
        let mut backend = CpuBackend::new(&model, &options).unwrap();
        assert_eq!(backend.weights().dtype, Dtype::F32);
        assert_eq!(backend.weights().n_bytes, 4 * model.n_parameters);
        let row = Row {
            slot: SlotId(0),
            tokens: Tokens::from(&tokens),
            start: 0,
            pages: &(0..tokens.len().div_ceil(PAGE_LEN) as u32).map(PageId).collect::<Vec<_>>(),
            n_same_pages: 0,
            n_pages_alike: 0,
            outputs: Requests::from_iter([OutputRequest { position: 49, kind: OutputKind::Full }]),
            input: Input::Known,
            evicted: None,
            steered: None,
        };
        let outputs = backend.forward(&Batch { copies: &[], rows: vec![row] }).unwrap();
        let [Output::Full(logprobs)] = &outputs[..] else { panic!("{outputs:?}") };
        let sum: f64 = logprobs.iter().map(|&logprob| f64::from(logprob).exp()).sum();
        assert!((sum - 1.0).abs() <= 1e-4, "{sum}");
        let best = logprobs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert!(best > (1.0f32 / 5001.0).ln(), "{best}");
    }
}
