//! Blocks that llama.cpp's quantiser wrote, and blocks of any bytes, against what its Python package makes of them.

use crate::files::{Gguf, Meta, Type};
use crate::{golden, open};

#[test]
fn blocks_are_the_numbers_that_llama_cpp_has_for_them() {
    let golden = golden("gguf-blocks");
    let mut n_types = 0;
    for kind in Type::ALL {
        let Some(of_type) = golden["types"].get(kind.name()) else { continue };
        let bytes = unhex(&of_type["bytes"]);
        let expected = unhex(&of_type["values"]);
        let n_rows = expected.len() / 4 / 256;
        // A tensor of the right name and shape in a model that is otherwise a small one.
        let model = open(&with_embedding(n_rows, kind, bytes));
        let mut found = vec![0; expected.len()];
        model.checkpoint.read_bytes("model.embed_tokens.weight", &mut found).expect("it is there");
        let stored = model.checkpoint.tensor("model.embed_tokens.weight").expect("it is there");
        assert_eq!(stored.type_name().to_uppercase(), kind.name());
        for (idx, (found, expected)) in found.chunks(4).zip(expected.chunks(4)).enumerate() {
            let of = |four: &[u8]| f32::from_le_bytes(four.try_into().expect("four bytes"));
            let (found, expected) = (of(found), of(expected));
            // The sign of a zero is nobody's.
            assert!(
                found == expected || found.is_nan() && expected.is_nan(),
                "{kind:?} {idx}: {found} {expected}"
            );
        }
        n_types += 1;
    }
    assert_eq!(n_types, 4, "all types of blocks");
}

/// A decoder of one layer whose embedding has these bytes.
fn with_embedding(n_rows: usize, kind: Type, bytes: Vec<u8>) -> Gguf {
    let mut file = crate::vocabularies::layer(256);
    let texts: Vec<String> = (0..n_rows).map(|idx| format!("t{idx}")).collect();
    file.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
    file.set("tokenizer.ggml.pre", Meta::Text("qwen2".into()));
    file.set("tokenizer.ggml.tokens", Meta::Texts(texts));
    file.set("tokenizer.ggml.merges", Meta::Texts(Vec::new()));
    file.add("token_embd.weight", &[n_rows, 256], kind.id(), bytes);
    file
}

fn unhex(value: &serde_json::Value) -> Vec<u8> {
    let digits = value.as_str().expect("hexadecimal digits").as_bytes();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("digits"))
        .collect()
}
