//! Texts to tokens, as llama.cpp has them with the same file.

use trellis_engine::model::{SpecialText, SpecialTokens};

use crate::files::{Gguf, Meta, Type, add_byte_pairs};
use crate::{bundled_path, golden, open, tokens};

const PRES: [&str; 5] = ["llama-bpe", "qwen2", "gpt-2", "smollm", "tekken"];

/// Pieces that SentencePiece might have learned, best first, behind special tokens and bytes.
const PIECES: [&str; 44] = [
    "▁t",
    "he",
    "▁the",
    "in",
    "re",
    "er",
    "▁a",
    "on",
    "or",
    "▁▁",
    "▁▁▁▁",
    "ing",
    "an",
    "it",
    "▁s",
    "at",
    "is",
    "▁the▁",
    "en",
    "nd",
    "▁and",
    "th",
    "▁th",
    "▁",
    "e",
    "t",
    "a",
    "o",
    "n",
    "i",
    "s",
    "r",
    "h",
    "d",
    "g",
    "l",
    "u",
    "c",
    "m",
    "p",
    "é",
    ".",
    "1",
    "2",
];

/// A decoder of one layer, without embedding and vocabulary.
pub(crate) fn layer(hidden_size: usize) -> Gguf {
    let mut file = Gguf::default();
    file.set("general.architecture", Meta::Text("llama".into()));
    let counts = [
        ("context_length", 256),
        ("embedding_length", hidden_size),
        ("block_count", 1),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("rope.dimension_count", 16),
    ];
    for (key, count) in counts {
        file.set(&format!("llama.{key}"), Meta::U32(count as u32));
    }
    file.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5));
    let mut add = |name: &str, shape: &[usize]| {
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|idx: usize| (idx % 7) as f32 / 70.0).collect();
        file.add(name, shape, Type::F32.id(), Type::F32.encode(&values));
    };
    for norm in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        add(&format!("{norm}.weight"), &[hidden_size]);
    }
    for (name, n_outputs, n_inputs) in [
        ("attn_q", 32, hidden_size),
        ("attn_k", 16, hidden_size),
        ("attn_v", 16, hidden_size),
        ("attn_output", hidden_size, 32),
        ("ffn_gate", 32, hidden_size),
        ("ffn_up", 32, hidden_size),
        ("ffn_down", hidden_size, 32),
    ] {
        add(&format!("blk.0.{name}.weight"), &[n_outputs, n_inputs]);
    }
    file
}

fn embedded(mut file: Gguf, n_tokens: usize) -> Gguf {
    let values = vec![0.125; n_tokens * 32];
    file.add("token_embd.weight", &[n_tokens, 32], Type::F32.id(), Type::F32.encode(&values));
    file
}

/// A vocabulary in the manner of SentencePiece.
pub(crate) fn of_pieces() -> Gguf {
    let mut file = layer(32);
    let specials = ["<unk>", "<s>", "</s>"].map(str::to_owned);
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let own = ["<|user|>", "[tool]"].map(str::to_owned);
    let texts: Vec<String> =
        specials.into_iter().chain(bytes).chain(PIECES.map(str::to_owned)).chain(own).collect();
    let n = texts.len();
    let kinds = [2, 3, 3].into_iter().chain([6; 256]).chain([1; PIECES.len()]).chain([3, 4]).collect();
    let scores = [0.0; 259].into_iter().chain((0..PIECES.len()).map(|idx| -(idx as f32))).chain([-1000.0; 2]);
    file.set("tokenizer.ggml.model", Meta::Text("llama".into()));
    file.set("tokenizer.ggml.tokens", Meta::Texts(texts));
    file.set("tokenizer.ggml.scores", Meta::F32s(scores.collect()));
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(1));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(2));
    embedded(file, n)
}

fn of_byte_pairs(pre: &str) -> Gguf {
    let mut file = layer(32);
    add_byte_pairs(&mut file, &bundled_path("tiny"), pre);
    embedded(file, 4096)
}

/// By the names of their goldens.
pub(crate) fn all() -> Vec<(String, Gguf)> {
    let mut unprefixed = of_pieces();
    unprefixed.set("tokenizer.ggml.add_space_prefix", Meta::Flag(false));
    let pieces = [("pieces".to_owned(), of_pieces()), ("pieces-unprefixed".to_owned(), unprefixed)];
    PRES.iter().map(|pre| ((*pre).to_owned(), of_byte_pairs(pre))).chain(pieces).collect()
}

#[test]
fn texts_become_the_tokens_of_llama_cpp() {
    let golden = golden("gguf-tokens");
    let texts: Vec<String> = serde_json::from_value(golden["texts"].clone()).expect("texts");
    assert!(texts.len() > 10);
    for (name, file) in all() {
        let model = open(&file);
        let of_vocabulary =
            golden["vocabularies"][&name].as_array().expect("the golden file knows the vocabulary");
        assert_eq!(of_vocabulary.len(), texts.len());
        for (text, expected) in texts.iter().zip(of_vocabulary) {
            for (specials, key) in [(SpecialTokens::Parse, "parsed"), (SpecialTokens::AsText, "as_text")] {
                let found = model.tokenizer.encode(text, specials).expect("it encodes");
                assert_eq!(found, tokens(&expected[key]), "{name} {key} {text:?}");
            }
        }
    }
}

#[test]
fn pieces_are_text_again() {
    let model = open(&of_pieces());
    let tokenizer = &model.tokenizer;
    for text in ["the thing", "  é 日本 the", "a\nb", ""] {
        let tokens = tokenizer.encode(text, SpecialTokens::AsText).expect("it encodes");
        assert_eq!(tokenizer.decode(&tokens, SpecialText::Keep), text);
    }
    assert_eq!((model.bos_token, model.stop_tokens.as_slice()), (Some(1), &[2][..]));
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(304), "what a user defined is ordinary");
}

#[test]
fn a_text_begins_as_the_file_says() {
    let mut file = of_pieces();
    file.set("tokenizer.ggml.add_bos_token", Meta::Flag(false));
    file.set("tokenizer.ggml.eot_token_id", Meta::U32(303));
    let model = open(&file);
    assert_eq!((model.bos_token, model.stop_tokens.as_slice()), (None, &[2, 303][..]));
    let mut file = of_byte_pairs("qwen2");
    file.remove("tokenizer.ggml.add_bos_token");
    assert_eq!(open(&file).bos_token, None, "as with Qwen");
    file.set("tokenizer.ggml.pre", Meta::Text("llama-bpe".into()));
    assert_eq!(open(&file).bos_token, Some(0), "as with Llama 3");
}
