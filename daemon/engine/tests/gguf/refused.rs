//! What is told of files that cannot be used.

use trellis_engine::model::{ModelError, ModelFacts, ModelSource};

use crate::files::{Gguf, Meta, Type};
use crate::vocabularies::of_pieces;
use crate::{open, open_bytes};

fn refused(file: &Gguf) -> String {
    open_bytes(&file.bytes()).expect_err("refused").to_string()
}

#[test]
fn a_type_that_is_not_read_is_named_with_its_tensor() {
    for (type_id, name) in [(13, "Q5_K"), (16, "IQ2_XXS"), (20, "IQ4_NL"), (99, "type 99")] {
        let mut file = of_pieces();
        file.add("blk.0.extra.weight", &[256], type_id, vec![0; 64]);
        let error = refused(&file);
        assert!(
            error.contains(&format!("tensor blk.0.extra.weight is {name}; expected F32, F16")),
            "{error}"
        );
    }
}

#[test]
fn what_is_missing_or_has_no_place_is_named() {
    let mut file = of_pieces();
    file.add("blk.0.extra.weight", &[32], Type::F32.id(), vec![0; 128]);
    assert!(refused(&file).contains("tensor blk.0.extra.weight with shape [32] has no place"));
    let mut file = of_pieces();
    file.set("llama.block_count", Meta::U32(2));
    assert!(refused(&file).contains("no tensor model.layers.1.input_layernorm.weight"));
    let mut file = of_pieces();
    file.set("llama.feed_forward_length", Meta::U32(64));
    assert!(refused(&file).contains("has shape [32, 32]; the config expects [64, 32]"));
    let mut file = of_pieces();
    file.set("tokenizer.ggml.model", Meta::Text("bert".into()));
    assert!(refused(&file).contains("tokenizer.ggml.model is \"bert\"; expected \"gpt2\" or \"llama\""));
    let mut file = of_pieces();
    file.set("split.count", Meta::U32(3));
    assert!(refused(&file).contains("llama-gguf-split --merge"));
    let mut file = of_pieces();
    file.set("tokenizer.ggml.scores", Meta::F32s(vec![0.0]));
    assert!(refused(&file).contains("a number for each of 305 tokens"));
    let mut file = of_pieces();
    file.set("tokenizer.ggml.tokens", Meta::Texts(vec!["x".repeat(1 << 20); 17]));
    assert!(refused(&file).contains("at most 262144 texts of 16777216 bytes together"));
    let mut file = of_pieces();
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(305));
    assert!(refused(&file).contains("tokenizer.ggml.bos_token_id is 305; expected an integer from 0 to 304"));
}

/// Every string of up to 16 letters, of two, is a piece: there are 1.8 million ways to part one into two others.
#[test]
fn pieces_that_part_in_too_many_ways_are_refused() {
    let mut file = of_pieces();
    let texts: Vec<String> = (1..17)
        .flat_map(|n| {
            (0..1_u32 << n)
                .map(move |bits| (0..n).map(|idx| if bits >> idx & 1 == 1 { 'a' } else { 'b' }).collect())
        })
        .collect();
    let n = texts.len();
    file.set("tokenizer.ggml.tokens", Meta::Texts(texts));
    file.set("tokenizer.ggml.scores", Meta::F32s(vec![0.0; n]));
    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; n]));
    assert!(refused(&file).contains("at most 1048576 merges"));
}

#[test]
fn a_file_that_was_cut_is_never_opened() {
    let whole = of_pieces().bytes();
    assert!(open_bytes(&whole).is_ok());
    for n in (0..whole.len() - 32).step_by(97) {
        let error = open_bytes(&whole[..n]).expect_err("it is cut");
        assert!(
            matches!(error, ModelError::GgufHeader { .. } | ModelError::FileLength { .. }),
            "{n}: {error}"
        );
    }
}

#[test]
fn frequencies_are_divided_by_what_the_file_says() {
    let mut file = of_pieces();
    let divisors: Vec<f32> = (0..8).map(|idx| 1.0 + idx as f32).collect();
    file.add("rope_freqs.weight", &[8], Type::F32.id(), Type::F32.encode(&divisors));
    let model = open(&file);
    let found = trellis_engine::model::inverse_frequencies(&model.config.rope, 16);
    let mut plain = model.config.rope.clone();
    plain.scaling = trellis_engine::model::RopeScaling::Default;
    let expected = trellis_engine::model::inverse_frequencies(&plain, 16);
    let expected: Vec<f32> =
        expected.iter().zip(&divisors).map(|(frequency, divisor)| frequency / divisor).collect();
    assert_eq!(found, expected);
    let mut file = of_pieces();
    let mut steeper = of_pieces();
    let others: Vec<f32> = divisors.iter().map(|divisor| divisor + 1.0).collect();
    steeper.add("rope_freqs.weight", &[8], Type::F32.id(), Type::F32.encode(&others));
    let steeper = open(&steeper);
    assert_ne!(steeper.fingerprint, model.fingerprint, "it computes something else");
    assert_ne!(steeper.identity(), model.identity());
    file.add("rope_freqs.weight", &[4], Type::F32.id(), vec![0; 16]);
    assert!(refused(&file).contains("8 numbers from 0.000001 to 1000000"));
}

#[test]
fn a_file_is_told_about_although_it_cannot_be_used() {
    let mut file = of_pieces();
    file.add("blk.0.extra.weight", &[256], 13, vec![0; 176]);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("x.gguf");
    std::fs::write(&path, file.bytes()).expect("written");
    let (facts, opened) = ModelFacts::of("x", &ModelSource::at(path.clone())).expect("it has a header");
    assert!(opened.expect_err("refused").to_string().contains("Q5_K"));
    assert_eq!(
        (facts.format, facts.architecture.as_deref(), facts.n_positions),
        ("GGUF", Some("llama"), Some(256))
    );
    assert_eq!((facts.n_tokens, facts.tokenizer.as_deref()), (Some(305), Some("llama")));
    let types: Vec<(&str, usize)> = facts.types.iter().map(|of| (of.name.as_str(), of.n_tensors)).collect();
    assert_eq!(types, [("F32", 11), ("Q5_K", 1)]);
    file.set("general.architecture", Meta::Text("x".repeat(1 << 20)));
    std::fs::write(&path, file.bytes()).expect("written");
    let (facts, _) = ModelFacts::of("x", &ModelSource::at(path)).expect("it has a header");
    assert_eq!(facts.architecture.map(|name| name.len()), Some(40));
    let source = ModelSource::Folder("/no/such/folder".into());
    assert!(ModelFacts::of("x", &source).is_err());
}
