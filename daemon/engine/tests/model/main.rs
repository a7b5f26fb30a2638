//! Model folders: what opens, what comes out, and what every broken file is told.

mod bad_input;
mod bundled;
mod chat;
mod config;
mod folder;
mod mutation;
mod parts;
mod random;
mod tokenizer;

use std::path::PathBuf;

use serde_json::Value;
use trellis_engine::model::{Model, ModelSource};

fn bundled_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models").join(name)
}

fn open_bundled(name: &str) -> Model {
    Model::open(name, &ModelSource::Folder(bundled_path(name))).expect("a bundled model opens")
}

/// The cases of a golden file, written by transformers.
fn golden_cases(name: &str) -> Vec<Value> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/{name}.json"));
    let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap().clone();
    assert!(!cases.is_empty());
    cases
}

fn golden_tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32).collect()
}
