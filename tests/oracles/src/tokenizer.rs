//! `tokenizer.json`: what opens cuts any text, and puts it together again without losing its mind.

use std::sync::LazyLock;

use arbitrary::Unstructured;
use serde_json::{Map, Value, json};
use trellis_engine::model::{DecodeStream, SpecialText, SpecialTokens, Tokenizer};

use crate::json;

const VOCAB_SIZE: usize = 300;

/// Kinds of parts, their fields, and what stands in them.
const WORDS: [&str; 40] = [
    "type",
    "Sequence",
    "normalizers",
    "pretokenizers",
    "decoders",
    "Prepend",
    "prepend",
    "Replace",
    "pattern",
    "String",
    "Regex",
    "content",
    "Lowercase",
    "NFC",
    "NFKC",
    "Strip",
    "ByteLevel",
    "add_prefix_space",
    "use_regex",
    "Metaspace",
    "replacement",
    "▁",
    "prepend_scheme",
    "Split",
    "behavior",
    "Isolated",
    "invert",
    "Digits",
    "Fuse",
    "ByteFallback",
    "BPE",
    "vocab",
    "merges",
    "byte_fallback",
    "ignore_merges",
    "single_word",
    "lstrip",
    "rstrip",
    "normalized",
    "special",
];

/// In the manner of Llama 2: marks for spaces, bytes as `<0xNN>`, one token that strips spaces.
static PIECES: LazyLock<Value> = LazyLock::new(|| {
    let mut vocab = Map::new();
    for (token, special) in ["<unk>", "<s>", "</s>"].into_iter().enumerate() {
        vocab.insert(special.into(), json!(token));
    }
    for byte in 0..=255u8 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
    }
    for piece in ["▁", "h", "i", "a", "▁h", "▁hi", "é"] {
        vocab.insert(piece.into(), json!(vocab.len()));
    }
    let added = |token: u32, text: &str, strips: bool| {
        json!({"id": token, "content": text, "single_word": false, "lstrip": strips, "rstrip": strips,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>", false), added(1, "<s>", false), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": [["▁", "h"], ["▁h", "i"]]},
    })
});

/// Opens a file of these bytes, or one with changes, and cuts a text with it: what stands before the first byte of 0.
///
/// # Panics
/// A token is out of the vocabulary, or a stream of tokens has another text than all of them together.
pub fn check(input: &[u8]) {
    let Some((&kind, rest)) = input.split_first() else { return };
    let at = rest.iter().position(|&byte| byte == 0).unwrap_or(rest.len());
    let (text, bytes) = rest.split_at(at);
    let bytes = bytes.get(1..).unwrap_or_default();
    let file = match kind % 4 {
        0 => bytes.to_vec(),
        _ => {
            let changed = json::changed(&PIECES, &WORDS, &mut Unstructured::new(bytes));
            changed.expect("zeros make a file").to_string().into_bytes()
        }
    };
    match Tokenizer::from_json("tokenizer.json", &file, VOCAB_SIZE) {
        Ok(tokenizer) => cuts(&tokenizer, &String::from_utf8_lossy(text)),
        Err(error) => assert!(error.to_string().contains("tokenizer.json"), "{error}"),
    }
}

fn cuts(tokenizer: &Tokenizer, text: &str) {
    for specials in [SpecialTokens::AsText, SpecialTokens::Parse] {
        let Ok(tokens) = tokenizer.encode(text, specials) else { continue };
        let n_tokens = tokenizer.vocab_size();
        assert!(tokens.iter().all(|&token| (token as usize) < n_tokens), "{tokens:?} of {n_tokens}");
        for shown in [SpecialText::Keep, SpecialText::Skip] {
            let decoded = tokenizer.decode(&tokens, shown);
            let mut stream = DecodeStream::new(shown);
            let mut streamed: String = tokens.iter().map(|&token| stream.push(tokenizer, token)).collect();
            streamed.push_str(&stream.finish());
            // A stream keeps the space that SentencePiece puts before a text.
            let without_space = streamed.strip_prefix(" ").unwrap_or(&streamed);
            assert!(decoded == streamed || decoded == without_space, "{tokens:?}: {streamed:?}, {decoded:?}");
        }
    }
}
