//! Models in GGUF files: what is read of them against llama.cpp, the folder they were made of, and broken files.

pub mod files;

mod blocks;
mod parity;
mod refused;
mod vocabularies;

use std::path::PathBuf;

use serde_json::Value;
use trellis_engine::model::{Model, ModelError, ModelSource};

use files::Gguf;

fn bundled_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models").join(name)
}

/// What `tests/golden/llama_cpp.py` wrote.
fn golden(name: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/{name}.json"));
    serde_json::from_slice(&std::fs::read(path).expect("the golden file is there")).expect("it is JSON")
}

fn open_bytes(bytes: &[u8]) -> Result<Model, ModelError> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).expect("written");
    Model::open("model", &ModelSource::at(path))
}

fn open(file: &Gguf) -> Model {
    open_bytes(&file.bytes()).expect("the file opens")
}

fn tokens(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("tokens")
}

/// Writes what `tests/golden/llama_cpp.py` gives to llama.cpp.
#[test]
#[ignore = "it makes goldens"]
fn files_for_goldens() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("gguf");
    std::fs::create_dir_all(&folder).expect("made");
    for kind in files::Type::ALL {
        let file = files::of_folder(&bundled_path("tiny"), kind);
        std::fs::write(folder.join(format!("tiny-{}.gguf", kind.name())), file.bytes()).expect("written");
    }
    for (name, file) in vocabularies::all() {
        std::fs::write(folder.join(format!("vocabulary-{name}.gguf")), file.bytes()).expect("written");
    }
    for (name, file) in vocabularies::of_every_name() {
        std::fs::write(folder.join(format!("name-{name}.gguf")), file.bytes()).expect("written");
    }
    println!("{}", folder.display());
}
