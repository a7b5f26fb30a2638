//! GGUF files where a model folder goes: from the command line and in the configuration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use trellis::config::Config;
use trellis_tests::daemons::{self, Served};
use trellis_tests::gguf::{Gguf, Type, of_folder};
use trellis_tests::{guests, pack};

use crate::exe;

/// What a run says, and its status.
fn said(command: &mut Command) -> (String, Option<i32>) {
    let output = daemons::output(command);
    (String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8"), output.status.code())
}

fn alone(arguments: &[&str]) -> (String, Option<i32>) {
    said(daemons::trellis(exe()).args(arguments))
}

/// The bundled draft as one file of this type.
fn draft(folder: &TempDir, kind: Type) -> PathBuf {
    let path = folder.path().join(format!("draft-{}.gguf", kind.name()));
    write(&path, &of_folder(&pack::root().join("daemon/models/draft"), kind));
    path
}

fn write(path: &Path, file: &Gguf) {
    fs::write(path, file.bytes()).expect("written");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn a_file_is_loaded_and_answers_as_its_folder_does() {
    const ARGUMENTS: [&str; 4] = ["--max-tokens", "24", "--temperature=0", "Once upon a time"];
    let folder = tempfile::tempdir().expect("a folder");
    let (file, eight) = (draft(&folder, Type::Bf16), draft(&folder, Type::Q8_0));
    let component = folder.path().join("complete.wasm");
    fs::write(&component, guests::example("complete")).expect("written");
    // In the configuration, from the command line of a daemon that runs, and inside a process of its own.
    let models = vec![text(&file).to_owned(), "draft".to_owned()];
    let served = Served::start_with(exe(), &Config { models, ..daemons::config(exe()) }, &[]);
    let run = |model: &str| {
        let arguments = ["run", "--model", model, text(&component)];
        let (answer, status) = said(&mut served.trellis(&[&arguments[..], &ARGUMENTS].concat()));
        assert_eq!(status, Some(0), "{answer}");
        answer
    };
    let expected = run("draft");
    assert!(!expected.trim().is_empty());
    assert_eq!(run("draft-BF16"), expected);
    assert_eq!(run(text(&file)), expected, "by its path as by its name");
    let (loaded, status) = said(&mut served.trellis(&["load", text(&eight)]));
    assert!(status == Some(0) && loaded.contains("loaded draft-Q8_0 from "), "{loaded}");
    assert!(!run("draft-Q8_0").trim().is_empty());
    let (again, status) = said(&mut served.trellis(&["load", text(&eight)]));
    assert!(status == Some(2) && again.contains("is loaded already, from "), "{again}");
    let arguments = ["run", "--local", "--device", "cpu", "--model", text(&file), text(&component)];
    let (answer, status) = alone(&[&arguments[..], &ARGUMENTS].concat());
    assert!(status == Some(0) && answer.contains(expected.trim()), "{answer}");
}

#[test]
fn a_model_is_explained_before_it_is_loaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = draft(&folder, Type::Q8_0);
    let explain = |path: &str, more: &[&str]| {
        alone(&[&["models", "explain", path, "--device", "cpu"][..], more].concat())
    };
    let (json, status) = explain(text(&file), &["--json"]);
    assert_eq!(status, Some(0), "{json}");
    let of_file: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        (&of_file["format"], &of_file["architecture"], &of_file["name"]),
        (&"GGUF".into(), &"llama".into(), &"draft-Q8_0".into())
    );
    assert_eq!(
        (&of_file["types"][0]["name"], &of_file["tokenizer"]),
        (&"Q8_0".into(), &"gpt2 (qwen2)".into())
    );
    assert_eq!(of_file["file_bytes"], fs::metadata(&file).expect("it is there").len());
    let original = pack::root().join("daemon/models/draft");
    let (json, status) = explain(text(&original), &["--json"]);
    assert_eq!(status, Some(0), "{json}");
    let of_folder: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        (&of_folder["format"], &of_folder["types"][0]["name"]),
        (&"safetensors".into(), &"bf16".into())
    );
    for same in ["n_parameters", "n_positions", "n_tokens", "needs", "has_chat_template", "is_usable"] {
        assert_eq!(of_file[same], of_folder[same], "{same}");
    }
    let (said, status) = explain(text(&file), &[]);
    assert!(status == Some(0) && said.ends_with("can be loaded  yes\n"), "{said}");
}

#[test]
fn a_file_that_cannot_be_used_is_explained_and_refused_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut file = of_folder(&pack::root().join("daemon/models/draft"), Type::Bf16);
    file.add("blk.0.extra.weight", &[256], 13, vec![0; 176]);
    let path = folder.path().join("five.gguf");
    write(&path, &file);
    const REASON: &str =
        "tensor blk.0.extra.weight is Q5_K; expected F32, F16, BF16, Q8_0, Q4_0, Q4_K or Q6_K";
    let (said_of_it, status) = alone(&["models", "explain", text(&path), "--device", "cpu"]);
    assert!(status == Some(1) && said_of_it.contains(REASON) && said_of_it.contains("llama"), "{said_of_it}");
    let served =
        Served::start_with(exe(), &Config { models: vec!["tiny".to_owned()], ..daemons::config(exe()) }, &[]);
    let (refused, status) = said(&mut served.trellis(&["load", text(&path)]));
    assert!(status == Some(2) && refused.contains(REASON), "{refused}");
    let (nothing, status) = alone(&["models", "explain", "/no/such/file.gguf"]);
    assert!(status == Some(2) && nothing.contains("nor a GGUF file"), "{nothing}");
}
