use proptest::prelude::*;
use serde_json::{Map, Value, json};
use trellis_engine::model::{DecodeStream, SpecialText, SpecialTokens, Tokenizer};

use super::{bundled_path, golden_cases, golden_tokens, open_bundled};

fn byte_level() -> Tokenizer {
    let bytes = std::fs::read(bundled_path("tiny").join("tokenizer.json")).unwrap();
    Tokenizer::from_json("tokenizer.json", &bytes, 4096).unwrap()
}

/// The `tokenizers` crate's own pipeline, as the reference.
fn reference(specials: SpecialTokens) -> tokenizers::Tokenizer {
    let mut tokenizer =
        tokenizers::Tokenizer::from_file(bundled_path("tiny").join("tokenizer.json")).unwrap();
    tokenizer.set_encode_special_tokens(specials == SpecialTokens::AsText);
    tokenizer
}

/// A vocabulary in the manner of Llama 2: marks for spaces, bytes as `<0xNN>`, one token stripping space.
pub(crate) fn pieces_json() -> String {
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
    let added = |token: u32, text: &str, strip: bool| {
        json!({"id": token, "content": text, "single_word": false, "lstrip": strip, "rstrip": strip,
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
            "vocab": Value::Object(vocab), "merges": [["▁", "h"], ["▁h", "i"]]},
    })
    .to_string()
}

fn pieces() -> Tokenizer {
    Tokenizer::from_json("tokenizer.json", pieces_json().as_bytes(), 300).unwrap()
}

#[test]
fn greedy_goldens_survive_decoding_and_encoding() {
    let tokenizer = open_bundled("tiny").tokenizer;
    for case in golden_cases("tiny") {
        let tokens = golden_tokens(&case["prompt_ids"]);
        assert_eq!(tokenizer.decode(&tokens, SpecialText::Keep), case["prompt"].as_str().unwrap());
    }
}

#[test]
fn special_tokens_as_text_or_as_tokens() {
    let tokenizer = byte_level();
    assert_eq!(tokenizer.special_tokens().collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    assert_eq!(tokenizer.token("<|end|>"), Some(6));
    assert_eq!(tokenizer.encode("<|end|>", SpecialTokens::Parse).unwrap(), [6]);
    let tokens = tokenizer.encode("<|end|>", SpecialTokens::AsText).unwrap();
    assert!(tokens.iter().all(|token| !tokenizer.is_special(*token)), "{tokens:?}");
    assert_eq!(tokenizer.decode(&tokens, SpecialText::Skip), "<|end|>");
    assert_eq!(tokenizer.decode(&[6], SpecialText::Keep), "<|end|>");
    assert_eq!(tokenizer.decode(&[6], SpecialText::Skip), "");
    assert!(tokenizer.encode("", SpecialTokens::Parse).unwrap().is_empty());
}

#[test]
fn unknown_tokens_have_no_bytes() {
    let tokenizer = byte_level();
    assert_eq!(tokenizer.vocab_size(), 4096);
    for token in [4096, u32::MAX] {
        assert_eq!(tokenizer.token_bytes(token), None);
        assert_eq!(tokenizer.decode(&[token], SpecialText::Keep), "");
    }
}

#[test]
fn every_byte_is_the_bytes_of_one_token() {
    let tokenizer = byte_level();
    let single: std::collections::BTreeSet<u8> = (0..4096)
        .filter_map(|token| match tokenizer.token_bytes(token) {
            Some(&[byte]) => Some(byte),
            _ => None,
        })
        .collect();
    assert_eq!(single.len(), 256);
}

#[test]
fn a_long_run_of_one_character_neither_fails_nor_hangs() {
    let tokenizer = byte_level();
    for text in [" ".repeat(200_000), "\n".repeat(200_000), "a".repeat(200_000), "<|".repeat(100_000)] {
        let tokens = tokenizer.encode(&text, SpecialTokens::Parse).unwrap();
        assert_eq!(tokenizer.decode(&tokens, SpecialText::Keep), text);
    }
}

#[test]
fn pieces_with_marks_and_byte_fallback() {
    let tokenizer = pieces();
    let token = |piece: &str| tokenizer.token(piece).unwrap();
    assert_eq!(tokenizer.token_bytes(token("▁hi")), Some(&b" hi"[..]));
    assert_eq!(tokenizer.token_bytes(token("é")), Some("é".as_bytes()));
    assert_eq!(tokenizer.token_bytes(token("<0xE2>")), Some(&[0xE2][..]));
    assert_eq!(tokenizer.token_bytes(1), Some(&b"<s>"[..]));

    let tokens = tokenizer.encode("hi €", SpecialTokens::Parse).unwrap();
    let expected = ["▁hi", "▁", "<0xE2>", "<0x82>", "<0xAC>"].map(token);
    assert_eq!(tokens, expected);
    assert_eq!(tokenizer.decode(&tokens, SpecialText::Keep), "hi €");

    let mut stream = DecodeStream::new(SpecialText::Keep);
    let texts: Vec<String> = tokens.iter().map(|token| stream.push(&tokenizer, *token)).collect();
    assert_eq!(texts, [" hi", " ", "", "", "€"]);
    assert_eq!(stream.finish(), "");
}

#[test]
fn space_around_a_stripping_token_belongs_to_it() {
    let tokenizer = pieces();
    let reference = tokenizers::Tokenizer::from_bytes(pieces_json()).unwrap();
    for text in ["hi </s> hi", "  </s>  </s>  ", "<s>hi</s>", "</s>", "a<s> </s>a", " ", "</s"] {
        let expected = reference.encode_fast(text, false).unwrap();
        assert_eq!(tokenizer.encode(text, SpecialTokens::Parse).unwrap(), expected.get_ids(), "{text:?}");
    }
}

#[test]
fn an_unfinished_character_ends_as_a_replacement() {
    let tokenizer = pieces();
    let mut stream = DecodeStream::new(SpecialText::Skip);
    assert_eq!(stream.push(&tokenizer, tokenizer.token("<0xF0>").unwrap()), "");
    assert_eq!(stream.push(&tokenizer, 2), "");
    assert_eq!(stream.push(&tokenizer, tokenizer.token("<0x9F>").unwrap()), "");
    assert_eq!(stream.clone().finish(), "\u{FFFD}");
    assert_eq!(stream.push(&tokenizer, tokenizer.token("a").unwrap()), "\u{FFFD}a");
    assert_eq!(stream.finish(), "");
}

/// Text rich in special tokens, parts of them, and characters of several bytes.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("<|end|>".to_owned()),
        Just("<|user|>".to_owned()),
        Just("<|".to_owned()),
        Just("|>".to_owned()),
        Just("\n".to_owned()),
        Just("  ".to_owned()),
        "[a-zA-Z0-9 ,.']{0,8}",
        "\\PC{0,4}",
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn encoding_agrees_with_the_tokenizers_crate(texts in prop::collection::vec(text(), 8)) {
        let tokenizer = byte_level();
        for specials in [SpecialTokens::Parse, SpecialTokens::AsText] {
            let reference = reference(specials);
            for text in &texts {
                let tokens = tokenizer.encode(text, specials).unwrap();
                let expected = reference.encode_fast(text.as_str(), false).unwrap();
                prop_assert_eq!(&tokens, expected.get_ids());
                prop_assert_eq!(&tokenizer.decode(&tokens, SpecialText::Keep), text);
            }
        }
    }

    #[test]
    fn decoding_agrees_with_the_tokenizers_crate(tokens in prop::collection::vec(0u32..4096, 0..64)) {
        let (tokenizer, reference) = (byte_level(), reference(SpecialTokens::Parse));
        let (keep, skip) = (SpecialText::Keep, SpecialText::Skip);
        prop_assert_eq!(tokenizer.decode(&tokens, keep), reference.decode(&tokens, false).unwrap());
        prop_assert_eq!(tokenizer.decode(&tokens, skip), reference.decode(&tokens, true).unwrap());
    }

    #[test]
    fn streamed_pieces_join_to_the_whole(
        tokens in prop::collection::vec(prop_oneof![0u32..4200, 8u32..270], 0..96),
        skips in any::<bool>(),
    ) {
        let tokenizer = byte_level();
        let specials = if skips { SpecialText::Skip } else { SpecialText::Keep };
        let mut stream = DecodeStream::new(specials);
        let mut joined: String = tokens.iter().map(|token| stream.push(&tokenizer, *token)).collect();
        joined += &stream.finish();
        prop_assert_eq!(joined, tokenizer.decode(&tokens, specials));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn texts_leave_no_memory_behind() {
    const N_THREADS: usize = 3;
    let resident_bytes = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let tokenizer = byte_level();
    let before_bytes = resident_bytes();
    let encoded = std::sync::Barrier::new(N_THREADS + 1);
    std::thread::scope(|scope| {
        for thread in 0..N_THREADS {
            let (tokenizer, encoded) = (&tokenizer, &encoded);
            scope.spawn(move || {
                for word in 0..9_000_u64 {
                    // No two are the same, and none is in the vocabulary.
                    let letter = |n: u64| {
                        let mixed = (word * 997 + n * n + thread as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                        char::from(b'a' + (mixed >> 59) as u8 % 26)
                    };
                    let text: String = (0..250).map(letter).collect();
                    tokenizer.encode(&text, SpecialTokens::AsText).unwrap();
                }
                encoded.wait();
                encoded.wait();
            });
        }
        encoded.wait();
        let kept_bytes = resident_bytes().saturating_sub(before_bytes);
        encoded.wait();
        // The threads are still there, and so is what they keep; other tests take some as well.
        assert!(kept_bytes < 48 << 20, "{kept_bytes} bytes");
    });
}

#[test]
fn a_fingerprint_says_what_tokens_stand_for_and_nothing_else() {
    let json: Value = serde_json::from_str(&pieces_json()).unwrap();
    let of = |json: &Value| {
        let bytes = serde_json::to_vec(json).unwrap();
        Tokenizer::from_json("tokenizer.json", &bytes, 300).unwrap().fingerprint().to_owned()
    };
    let same = Tokenizer::from_json("other.json", pieces_json().as_bytes(), 400).unwrap();
    assert_eq!(of(&json), same.fingerprint(), "the number of embeddings is the model's");
    let mut without_merges = json.clone();
    without_merges["model"]["merges"] = json!([]);
    assert_eq!(of(&json), of(&without_merges));
    let mut swapped = json.clone();
    swapped["model"]["vocab"]["h"] = json["model"]["vocab"]["i"].clone();
    swapped["model"]["vocab"]["i"] = json["model"]["vocab"]["h"].clone();
    assert_ne!(of(&json), of(&swapped));
    let mut ordinary = json.clone();
    ordinary["added_tokens"][2]["special"] = json!(false);
    assert_ne!(of(&json), of(&ordinary));
}
