//! Texts to tokens, as llama.cpp has them with the same file.

use trellis_engine::model::{SpecialText, SpecialTokens};

use crate::files::{Gguf, Meta, Type, add_byte_pairs_and};
use crate::{bundled_path, golden, open, open_bytes, tokens};

/// Of those that are alike one.
const PRES: [&str; 7] = ["llama-bpe", "smaug-bpe", "qwen2", "gpt-2", "smollm", "tekken", "seed-coder"];

/// Tokens that llama.cpp knows by their text, of which it does not mind the type.
const ENDS: [(&str, i32); 12] = [
    ("<|endoftext|>", 3),
    ("<|im_start|>", 3),
    ("<|im_end|>", 1),
    ("<|fim_prefix|>", 4),
    ("<|fim_suffix|>", 3),
    ("<|fim_middle|>", 3),
    ("<|fim_pad|>", 4),
    ("<|repo_name|>", 3),
    ("<|file_sep|>", 3),
    ("</s>", 4),
    ("[tool]", 4),
    ("", 1),
];

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
    of_byte_pairs_and(pre, &[])
}

fn of_byte_pairs_and(pre: &str, more: &[(&str, i32)]) -> Gguf {
    let mut file = layer(32);
    add_byte_pairs_and(&mut file, &bundled_path("tiny"), pre, more);
    embedded(file, 4096 + more.len())
}

/// A part of Qwen's own vocabulary: bytes, what its merges make of them, and its tokens that are none.
fn of_qwen() -> Gguf {
    let path =
        std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen-merges.txt");
    let merges = std::fs::read_to_string(path).expect("it is in the repository");
    let merges: Vec<String> = merges.lines().map(str::to_owned).collect();
    // As GPT-2 writes bytes: printable ones as they are, the others from 256 on.
    let is_printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let others = 256 + (0..256).filter(|byte| !is_printable(byte)).count() as u32;
    let bytes = (0..256).filter(is_printable).chain(256..others);
    let mut texts: Vec<String> =
        bytes.map(|code| char::from_u32(code).expect("a letter").to_string()).collect();
    texts.extend(merges.iter().map(|merge| merge.replacen(' ', "", 1)));
    let n_ordinary = texts.len();
    let own = &ENDS[..9];
    texts.extend(own.iter().map(|(text, _)| (*text).to_owned()));
    let n = texts.len();
    let mut file = layer(32);
    file.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
    file.set("tokenizer.ggml.pre", Meta::Text("qwen2".into()));
    file.set("tokenizer.ggml.tokens", Meta::Texts(texts));
    let kinds = (0..n).map(|token| if token < n_ordinary { 1 } else { 3 });
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds.collect()));
    file.set("tokenizer.ggml.merges", Meta::Texts(merges));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(n_ordinary as u32));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(n_ordinary as u32 + 2));
    file.set("tokenizer.ggml.add_bos_token", Meta::Flag(false));
    embedded(file, n)
}

/// All names that errors tell.
fn known_pres() -> Vec<String> {
    let error = open_bytes(&of_byte_pairs("default").bytes()).expect_err("it has no expression").to_string();
    let (_, names) = error.split_once("expected one of ").expect("the names that are known");
    names.split(", ").map(|name| name.trim_matches('"').to_owned()).collect()
}

/// By the names of their goldens.
pub(crate) fn all() -> Vec<(String, Gguf)> {
    let mut unprefixed = of_pieces();
    unprefixed.set("tokenizer.ggml.add_space_prefix", Meta::Flag(false));
    let mut unnamed = of_pieces();
    unnamed.remove("tokenizer.ggml.bos_token_id");
    unnamed.remove("tokenizer.ggml.eos_token_id");
    let mut ends = of_byte_pairs_and("qwen2", &ENDS);
    ends.remove("tokenizer.ggml.add_bos_token");
    let own = [
        ("pieces".to_owned(), of_pieces()),
        ("pieces-unprefixed".to_owned(), unprefixed),
        ("pieces-unnamed".to_owned(), unnamed),
        ("ends".to_owned(), ends),
        ("qwen".to_owned(), of_qwen()),
    ];
    PRES.iter().map(|pre| ((*pre).to_owned(), of_byte_pairs(pre))).chain(own).collect()
}

#[test]
fn texts_become_the_tokens_of_llama_cpp() {
    let golden = golden("gguf-tokens");
    let texts: Vec<String> = serde_json::from_value(golden["texts"].clone()).expect("texts");
    assert!(texts.len() > 10);
    for (name, file) in all() {
        let model = open(&file);
        let of_vocabulary =
            golden["vocabularies"][&name]["texts"].as_array().expect("the golden file knows the vocabulary");
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
fn texts_begin_and_end_as_with_llama_cpp() {
    let golden = golden("gguf-tokens");
    for (name, file) in all() {
        let (model, of_vocabulary) = (open(&file), &golden["vocabularies"][&name]);
        assert_eq!(model.stop_tokens, tokens(&of_vocabulary["ends"]), "{name}");
        let bos = serde_json::from_value(of_vocabulary["bos"].clone()).expect("a token, or none");
        assert_eq!(model.bos_token, bos, "{name}");
    }
}

/// By one text with all others in it, and without what the file says of its beginning.
#[test]
fn every_name_of_a_way_to_cut_is_that_of_llama_cpp() {
    let golden = golden("gguf-tokens");
    let texts: Vec<String> = serde_json::from_value(golden["texts"].clone()).expect("texts");
    let names = known_pres();
    assert!(names.len() > 40 && !names.iter().any(|name| name == "default"), "{names:?}");
    for name in names {
        let model = open(&unsaid(&name));
        let found = model.tokenizer.encode(&texts.join("\n"), SpecialTokens::AsText).expect("it encodes");
        let expected = &golden["names"][&name];
        assert!(expected.is_object(), "llama.cpp has no {name}");
        assert_eq!(found, tokens(&expected["tokens"]), "{name}");
        assert_eq!(serde_json::to_value(model.bos_token).expect("a number"), expected["bos"], "{name}");
    }
}

/// A file that does not say how a text begins.
fn unsaid(pre: &str) -> Gguf {
    let mut file = of_byte_pairs(pre);
    file.remove("tokenizer.ggml.add_bos_token");
    file
}

/// By their names, for goldens.
pub(crate) fn of_every_name() -> Vec<(String, Gguf)> {
    known_pres().into_iter().map(|name| (name.clone(), unsaid(&name))).collect()
}

#[test]
fn what_ends_a_text_is_no_part_of_one() {
    let model = open(&of_byte_pairs_and("qwen2", &ENDS));
    for (idx, (text, _)) in ENDS.iter().enumerate().take(ENDS.len() - 2) {
        let token = 4096 + idx as u32;
        let encoded = |specials| model.tokenizer.encode(text, specials).expect("it encodes");
        assert_eq!(encoded(SpecialTokens::Parse), [token], "{text}");
        assert!(
            !encoded(SpecialTokens::AsText).contains(&token) && model.tokenizer.is_special(token),
            "{text}"
        );
    }
    assert_eq!(model.tokenizer.token_bytes(4096 + 11), None, "a token without a text");
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
