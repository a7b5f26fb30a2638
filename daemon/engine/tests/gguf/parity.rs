//! `tiny` in each type against llama.cpp with the same file, and against the model that it was made of.

use serde_json::Value;
use trellis_engine::backend::{Backend, PAGE_LEN};
use trellis_engine::batch::{
    Batch, Input, Output, OutputKind, OutputRequest, PageId, Row, SlotId, Token, Tokens,
};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::{Dtype, GenerationPrompt, Message, Model, ModelSource, Role, SpecialTokens};

use crate::files::{Type, of_folder};
use crate::{bundled_path, golden, open, tokens};

/// Of log-probabilities that llama.cpp computes in f32 from the numbers in the file: what CPU and Hugging Face may differ by.
const SAME_NUMBERS: f32 = 1e-3;

/// How far the numbers of a type take the three likeliest log-probabilities from those of the original, at most and on average: half as
/// much again as was measured. `f16` and `bf16` hold nearly all, and all, of the weights of `tiny`.
fn own_error(kind: Type) -> (f32, f32) {
    match kind {
        Type::F32 | Type::Bf16 => (1e-3, 1e-3),
        Type::F16 => (5e-3, 1e-3),
        Type::Q8_0 => (0.4, 0.06),
        Type::Q6K => (2.0, 0.25),
        Type::Q4K => (9.0, 1.0),
        Type::Q4_0 => (6.5, 1.0),
    }
}

/// The log-probabilities behind each token.
fn logprobs(backend: &mut CpuBackend, tokens: &[Token]) -> Vec<Vec<f32>> {
    let pages: Vec<PageId> = (0..tokens.len().div_ceil(PAGE_LEN) as u32).map(PageId).collect();
    let outputs =
        (0..tokens.len()).map(|position| OutputRequest { position, kind: OutputKind::Full }).collect();
    let row = Row {
        slot: SlotId(0),
        tokens: Tokens::from(tokens),
        start: 0,
        pages: &pages,
        n_same_pages: 0,
        n_pages_alike: 0,
        outputs,
        input: Input::Known,
        evicted: None,
        steered: None,
    };
    let outputs = backend.forward(&Batch { copies: &[], rows: vec![row] }).expect("the backend runs");
    outputs
        .into_iter()
        .map(|output| match output {
            Output::Full(row) => row,
            other => panic!("expected a full row, got {other:?}"),
        })
        .collect()
}

fn backend(model: &Model) -> CpuBackend {
    let options =
        CpuOptions { n_pages: 64, n_host_pages: 4, n_threads: None, n_rows_max: 8, n_tokens_max: 512 };
    CpuBackend::new(model, &options).expect("the model loads")
}

/// The difference at the likely tokens of each position: the most, and the mean.
fn differences(rows: &[Vec<f32>], ids: &Value, logprobs: &Value) -> (f32, f32) {
    let ids: Vec<Vec<usize>> = serde_json::from_value(ids.clone()).expect("tokens");
    let expected: Vec<Vec<f32>> = serde_json::from_value(logprobs.clone()).expect("numbers");
    assert!(rows.len() == ids.len() && rows.len() == expected.len() && !rows.is_empty());
    let all = rows.iter().zip(ids.iter().zip(&expected)).flat_map(|(row, (ids, expected))| {
        ids.iter().zip(expected).map(|(&id, expected)| (row[id] - expected).abs())
    });
    let all: Vec<f32> = all.collect();
    assert!(all.iter().all(|diff| diff.is_finite()), "{all:?}");
    (all.iter().copied().fold(0.0, f32::max), all.iter().sum::<f32>() / all.len() as f32)
}

#[test]
fn logprobs_of_each_type_are_those_of_llama_cpp_and_near_the_original() {
    let (of_llama_cpp, original) = (golden("gguf-tiny"), golden("tiny"));
    for kind in Type::ALL {
        let model = open(&of_folder(&bundled_path("tiny"), kind));
        let mut backend = backend(&model);
        for case in of_llama_cpp["types"][kind.name()].as_array().expect("cases") {
            let rows = logprobs(&mut backend, &tokens(&case["tokens"]));
            let (most, _) = differences(&rows, &case["top_ids"], &case["top_logprobs"]);
            assert!(most <= SAME_NUMBERS, "{kind:?}: {most} from llama.cpp");
        }
        let (mut most, mut mean, mut n) = (0.0_f32, 0.0, 0.0);
        for case in original["cases"].as_array().expect("cases").iter().take(6) {
            let rows = logprobs(&mut backend, &tokens(&case["prompt_ids"]));
            let first_three = |row: &Value| Value::Array(row.as_array().expect("a row")[..3].to_vec());
            let likely = |of: &Value| of.as_array().expect("positions").iter().map(first_three).collect();
            let (case_most, case_mean) =
                differences(&rows, &likely(&case["top10_ids"]), &likely(&case["top10_logprobs"]));
            (most, mean, n) = (most.max(case_most), mean + case_mean, n + 1.0);
        }
        let (allowed_most, allowed_mean) = own_error(kind);
        println!("{kind:?}: {most} at most, {} on average from the original", mean / n);
        assert!(most <= allowed_most && mean / n <= allowed_mean, "{kind:?}: {most} {}", mean / n);
    }
}

/// What `tests/golden/llama_cpp.py quantised` writes with llama.cpp's quantiser, into the folder of `files_for_goldens`.
#[test]
#[ignore = "it needs llama.cpp's files"]
fn files_of_the_quantiser_are_read() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("gguf");
    for kind in [Type::Q8_0, Type::Q4_0, Type::Q4K, Type::Q6K] {
        let path = folder.join(format!("quantised-{}", kind.name()));
        let model =
            Model::open("quantised", &ModelSource::at(path.with_extension("gguf"))).expect("it opens");
        let cases = std::fs::read(path.with_extension("json")).expect("it is there");
        let cases: Value = serde_json::from_slice(&cases).expect("JSON");
        let mut backend = backend(&model);
        for case in cases.as_array().expect("cases") {
            let rows = logprobs(&mut backend, &tokens(&case["tokens"]));
            let (most, mean) = differences(&rows, &case["top_ids"], &case["top_logprobs"]);
            println!("{kind:?}: {most} at most, {mean} on average from llama.cpp");
            assert!(most <= SAME_NUMBERS, "{kind:?}: {most} from llama.cpp");
        }
    }
}

#[test]
fn a_file_is_the_model_of_its_folder() {
    let folder = Model::open("tiny", &ModelSource::Folder(bundled_path("tiny"))).expect("it opens");
    let file = open(&of_folder(&bundled_path("tiny"), Type::Bf16));
    assert_eq!(file.config, folder.config);
    assert_eq!((file.bos_token, &file.stop_tokens), (folder.bos_token, &folder.stop_tokens));
    assert_eq!((file.n_parameters, file.dtype), (folder.n_parameters, Dtype::Bf16));
    assert_eq!(file.tokenizer.fingerprint(), folder.tokenizer.fingerprint());
    for (name, info) in folder.checkpoint.tensors() {
        let read = |model: &Model| {
            let mut values = vec![0.0; info.n_elements()];
            model.checkpoint.read_f32(name, &mut values).expect("it is there");
            values
        };
        assert!(read(&file) == read(&folder), "{name}");
    }
    for text in ["", " two  spaces", "<|end|> 12345 naïve 你好\r\n\n x", "it's DON'T"] {
        for specials in [SpecialTokens::Parse, SpecialTokens::AsText] {
            let of = |model: &Model| model.tokenizer.encode(text, specials).expect("it encodes");
            assert_eq!(of(&file), of(&folder), "{text:?}");
        }
    }
    let messages =
        [(Role::System, "Be brief."), (Role::User, "What is <|end|> 2 + 2?"), (Role::Assistant, "4")];
    let messages = messages.map(|(role, content)| Message { role, content: content.to_owned() });
    let chat = |model: &Model| {
        let template = model.chat.as_ref().expect("it has a template");
        template.encode(&model.tokenizer, &messages, GenerationPrompt::Add, None).expect("it encodes")
    };
    assert_eq!(chat(&file), chat(&folder));
    assert!(file.folder.is_some_and(|path| path.ends_with("model.gguf")));
    assert_ne!(file.fingerprint, folder.fingerprint);
}

#[test]
fn a_quantised_model_is_loaded_in_bf16_and_told_from_another() {
    let of = |kind| open(&of_folder(&bundled_path("draft"), kind));
    let (eight, four) = (of(Type::Q8_0), of(Type::Q4_0));
    assert_eq!((eight.dtype, four.dtype), (Dtype::Bf16, Dtype::Bf16));
    assert_eq!(of(Type::F16).dtype, Dtype::F16);
    assert_ne!(eight.fingerprint, four.fingerprint);
    let card = serde_json::to_vec(&four.card()).expect("data");
    let far = Model::without_weights(serde_json::from_slice(&card).expect("a card")).expect("a model");
    let of = |model: &Model| model.tokenizer.encode("as here", SpecialTokens::Parse).expect("it encodes");
    assert_eq!(of(&far), of(&four));
}
