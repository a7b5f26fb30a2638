//! GGUF files: whatever they say, nothing outside of the file is read, and each tensor is as long as its shape.

use arbitrary::{Result, Unstructured};
use trellis_engine::model::{Model, ModelFacts, ModelSource, SpecialTokens};

use crate::folder::{Draft, with_files};
use crate::gguf_writer::{Gguf, Meta};

const FILE: &str = "model.gguf";

/// Numbers of types of tensors, of which the last are not read.
const TYPES: [(u32, usize, usize); 8] = [
    (0, 1, 4),
    (1, 1, 2),
    (30, 1, 2),
    (8, 32, 34),
    (2, 32, 18),
    (12, 256, 144),
    (14, 256, 210),
    (13, 256, 176),
];

/// Keys that mean something.
const KEYS: [&str; 19] = [
    "general.architecture",
    "general.alignment",
    "llama.block_count",
    "llama.embedding_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.rope.scaling.type",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.merges",
    "tokenizer.chat_template",
];

const WORDS: [&str; 16] = [
    "llama",
    "qwen2",
    "qwen3",
    "gpt2",
    "tekken",
    "llama-bpe",
    "linear",
    "yarn",
    "▁",
    "<0x41>",
    "a",
    "{{ messages }}",
    "</s>",
    "<|end|>",
    "[PAD]",
    "",
];

/// Opens a file of these bytes: as they are, or one that is right but for changes in its keys, its tensors and its bytes.
///
/// # Panics
/// A tensor of a file that was opened cannot be read, or what is told of a file is not what is in it.
pub fn check(input: &[u8]) {
    let Some((&kind, bytes)) = input.split_first() else { return };
    match kind % 2 {
        0 => opened(bytes),
        _ => opened(&changed(&mut Unstructured::new(bytes)).expect("zeros make a file")),
    }
}

fn opened(bytes: &[u8]) {
    with_files(&[Draft { name: FILE, bytes }], |folder| {
        let source = ModelSource::Gguf(folder.join(FILE));
        match ModelFacts::of("fuzzed", &source) {
            Ok((facts, Ok(model))) => {
                assert_eq!(facts.n_bytes, bytes.len() as u64);
                is_whole(&model, bytes.len());
            }
            Ok((_, Err(error))) | Err(error) => assert!(error.to_string().contains(FILE), "{error}"),
        }
    });
}

/// Every tensor of a model can be read, in one go and in parts.
fn is_whole(model: &Model, n_file_bytes: usize) {
    for (name, info) in model.checkpoint.tensors() {
        let product: usize = info.shape.iter().product();
        assert_eq!(product, info.n_elements(), "{name}");
        // The smallest elements take four bits and a half.
        assert!(info.n_elements() <= 2 * n_file_bytes, "{name}");
        let mut whole = vec![0; info.n_bytes];
        model.checkpoint.read_bytes(name, &mut whole).expect("it lies in the file");
        let start = info.n_bytes / 3;
        let mut part = vec![0; info.n_bytes - start];
        model.checkpoint.read_bytes_at(name, start, &mut part).expect("it lies in the file");
        assert!(part == whole[start..], "{name}");
    }
    let is_token = |token: &u32| (*token as usize) < model.config.vocab_size;
    assert!(model.stop_tokens.iter().chain(&model.bos_token).all(is_token), "{:?}", model.stop_tokens);
    if let Ok(tokens) = model.tokenizer.encode("a ab<s>\u{e9}", SpecialTokens::AsText) {
        assert!(tokens.iter().all(is_token), "{tokens:?}");
    }
}

/// A model of one layer with a few changes.
fn changed(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut file = Gguf::default();
    let counts = [
        ("context_length", 64),
        ("embedding_length", 256),
        ("block_count", 1),
        ("feed_forward_length", 8),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 4),
    ];
    file.set("general.architecture", Meta::Text("llama".into()));
    for (key, count) in counts {
        file.set(&format!("llama.{key}"), Meta::U32(count));
    }
    file.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5));
    vocabulary(&mut file, input)?;
    for _ in 0..input.int_in_range(0..=3)? {
        let key = *input.choose(&KEYS)?;
        let value = match input.int_in_range(0..=7)? {
            0 => Meta::U32(input.arbitrary()?),
            1 => Meta::F32(input.arbitrary()?),
            2 => Meta::Flag(input.arbitrary()?),
            3 => Meta::Text((*input.choose(&WORDS)?).to_owned()),
            4 => Meta::Texts(texts(input)?),
            5 => Meta::I32s(input.arbitrary()?),
            6 => Meta::F32s(input.arbitrary()?),
            _ => {
                file.remove(key);
                continue;
            }
        };
        file.set(key, value);
    }
    let tensors: [(&str, &[usize]); 12] = [
        ("token_embd", &[4, 256]),
        ("output_norm", &[256]),
        ("blk.0.attn_norm", &[256]),
        ("blk.0.ffn_norm", &[256]),
        ("blk.0.attn_q", &[8, 256]),
        ("blk.0.attn_k", &[4, 256]),
        ("blk.0.attn_v", &[4, 256]),
        ("blk.0.attn_output", &[256, 8]),
        ("blk.0.ffn_gate", &[8, 256]),
        ("blk.0.ffn_up", &[8, 256]),
        ("blk.0.ffn_down", &[256, 8]),
        ("rope_freqs", &[2]),
    ];
    for (name, shape) in tensors {
        let of_blocks = if shape.last() == Some(&256) { TYPES.len() - 1 } else { 2 };
        let (type_id, block_len, block_bytes) = TYPES[input.int_in_range(0..=of_blocks)?];
        let n_blocks = shape.iter().product::<usize>() / block_len;
        let seed: u8 = input.arbitrary()?;
        let bytes = (0..n_blocks * block_bytes).map(|idx| (idx as u8).wrapping_mul(37) ^ seed);
        file.add(&format!("{name}.weight"), shape, type_id, bytes.collect());
    }
    let mut bytes = file.bytes();
    for _ in 0..input.int_in_range(0..=2)? {
        let place = input.int_in_range(0..=bytes.len() - 1)?;
        bytes[place] = input.arbitrary()?;
    }
    if input.ratio(1, 8)? {
        bytes.truncate(input.int_in_range(0..=bytes.len())?);
    }
    Ok(bytes)
}

fn texts(input: &mut Unstructured<'_>) -> Result<Vec<String>> {
    let n = input.int_in_range(0..=6)?;
    (0..n)
        .map(|_| match input.arbitrary()? {
            true => Ok((*input.choose(&WORDS)?).to_owned()),
            false => input.arbitrary(),
        })
        .collect()
}

fn vocabulary(file: &mut Gguf, input: &mut Unstructured<'_>) -> Result<()> {
    let own = ["a", "b", "ab", "<s>"].map(str::to_owned);
    file.set("tokenizer.ggml.tokens", Meta::Texts(own.to_vec()));
    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1, 1, 1, 3]));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(3));
    if input.arbitrary()? {
        file.set("tokenizer.ggml.model", Meta::Text("llama".into()));
        file.set("tokenizer.ggml.scores", Meta::F32s(input.arbitrary::<[f32; 4]>()?.to_vec()));
    } else {
        file.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
        file.set("tokenizer.ggml.pre", Meta::Text("qwen2".into()));
        file.set("tokenizer.ggml.merges", Meta::Texts(vec!["a b".to_owned()]));
    }
    Ok(())
}
