//! The models of the settings, opened as a daemon opens them; no weight is read.

use std::fs;
use std::io;
use std::path::Path;

use trellis_engine::model::{Model, ModelError};

use super::finding::{Check, Code, Finding};
use crate::cli::access::{Identity, Wanted};
use crate::config::Config;
use crate::daemon::{DaemonError, open_model};

/// Those that could be opened.
pub(super) fn check(config: &Config) -> (Check, Vec<Model>) {
    let mut check = Check::new("models", "");
    let mut models: Vec<Model> = Vec::new();
    for choice in &config.models {
        match open_model(choice, config) {
            Ok(model) if models.iter().any(|other| other.name == model.name) => {
                let said = format!("two models are named {:?}: guests could not tell them apart", model.name);
                let remedy = "take one out of `models`, or rename its folder";
                check.findings.push(Finding::problem(Code::ModelTwice, said, remedy).with(choice));
            }
            Ok(model) => {
                let (folder, dtype) = (model.folder.as_deref(), model.dtype.name());
                let place =
                    folder.map_or_else(|| "inside the program".to_owned(), |path| path.display().to_string());
                check
                    .details
                    .push(format!("{}: {} parameters in {dtype}, {place}", model.name, model.n_parameters));
                models.push(model);
            }
            Err(error) => check.findings.push(finding_of(path_of(choice, config), &error)),
        }
    }
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    check.said = if names.is_empty() { "none at the start".to_owned() } else { names.join(", ") };
    (check, models)
}

/// Those of the catalog that are not among these, and could be opened.
pub(super) fn check_declared(config: &Config, models: &[Model], check: &mut Check) -> Vec<Model> {
    let is_there = |name: &String| models.iter().any(|model| model.name == *name);
    let mut declared = Vec::new();
    for name in config.catalog.keys().filter(|name| !is_there(name)) {
        match open_model(name, config) {
            Ok(model) => {
                check.details.push(format!("{name}: {} parameters, on demand", model.n_parameters));
                declared.push(model);
            }
            // One of the start is said already.
            Err(_) if config.models.contains(name) => {}
            Err(error) => check.findings.push(finding_of(path_of(name, config), &error)),
        }
    }
    declared
}

/// Where a model is that is asked for so.
fn path_of<'a>(choice: &'a str, config: &'a Config) -> &'a str {
    config.catalog.get(choice).map_or(choice, |model| &model.path)
}

/// What is wrong with a model, by its file's name; the folder is a detail.
fn finding_of(choice: &str, error: &DaemonError) -> Finding {
    let error = match error {
        DaemonError::Model { source, .. } => source,
        DaemonError::UnknownModel { .. } => return missing(choice),
        error => {
            return Finding::problem(
                Code::ModelMissing,
                error.to_string(),
                "give `models` a name or a folder that is there",
            );
        }
    };
    let whole = error.to_string();
    // A file by its name, without the folder that it is in.
    let folder = match Path::new(choice) {
        path if path.is_file() => {
            path.parent().map(|folder| folder.display().to_string()).unwrap_or_default()
        }
        _ => choice.trim_end_matches('/').to_owned(),
    };
    let prefix = format!("{folder}/");
    let said = format!("model {:?}: {}", name(choice), whole.replace(&prefix, ""));
    let again = "download the file again: it is not as it was published";
    let (code, remedy) = match &**error {
        ModelError::NotAFolder { .. } => {
            (Code::ModelMissing, "give `models` a folder in the Hugging Face layout, or a GGUF file")
        }
        ModelError::MissingFile { .. } => {
            (Code::ModelFileMissing, "download the model again, with all of its files")
        }
        ModelError::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            return unreadable(choice, said);
        }
        ModelError::Io { .. } => {
            (Code::ModelUnreadable, "see whether the file system works: `dmesg`, `mount`")
        }
        ModelError::FileLength { expected_bytes, found_bytes, .. } if found_bytes < expected_bytes => {
            (Code::ModelFileCutOff, "download the file again: its end is missing")
        }
        ModelError::TensorDtype { .. } => (
            Code::ModelWrongDtype,
            "take a version of the model that is stored in one of the types that are expected",
        ),
        ModelError::TensorShape { .. } => {
            (Code::ModelWrongShape, "download config.json and the weights again: they are of two models")
        }
        ModelError::MissingTensor { .. }
        | ModelError::UnknownTensor { .. }
        | ModelError::NotInShard { .. }
        | ModelError::UnexpectedTensor { .. }
        | ModelError::DuplicateTensor { .. } => (
            Code::ModelWrongTensors,
            "download config.json, the index and all weights again: they do not belong together",
        ),
        ModelError::Vocabulary { .. } => {
            (Code::ModelFileBroken, "download config.json and tokenizer.json again: they are of two models")
        }
        _ => (Code::ModelFileBroken, again),
    };
    Finding::problem(code, said, remedy).with(whole)
}

/// Nothing that could be opened: no such folder, no config.json in it, or none that this user may see.
fn missing(choice: &str) -> Finding {
    let config = Path::new(choice).join("config.json");
    let said = |what: &str| format!("model {:?}: {what}", name(choice));
    match fs::metadata(&config) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            unreadable(choice, said("this user may not read its folder"))
        }
        _ if Path::new(choice).is_dir() => {
            let remedy = "download the model again, with all of its files";
            Finding::problem(Code::ModelFileMissing, said("config.json: no such file"), remedy)
                .with(config.display().to_string())
        }
        _ => {
            let remedy = "give `models` a bundled name (tiny, draft), or a folder or file that is there";
            Finding::problem(Code::ModelMissing, said("there is no such folder or file"), remedy).with(choice)
        }
    }
}

fn unreadable(choice: &str, said: String) -> Finding {
    let who = Identity::this_process();
    let folder = Path::new(choice);
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let wanted = if folder.is_file() { Wanted::Read } else { Wanted::List };
    let closed = who.kept_from(folder, wanted);
    let closed = closed.or_else(|| files.into_iter().find_map(|file| who.kept_from(&file, Wanted::Read)));
    let remedy = closed.as_ref().map_or_else(
        || "look at what confines this process: SELinux, AppArmor, a container".to_owned(),
        |closed| closed.remedy(&who),
    );
    let finding = Finding::problem(Code::ModelUnreadable, said, remedy);
    match closed {
        Some(closed) => finding.with(closed.details()),
        None => finding.with(choice),
    }
}

/// The last part of a path, as models are named.
fn name(choice: &str) -> String {
    let name = Path::new(choice).file_name().map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|| choice.to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::Value;
    use trellis_engine::model::ModelSource;

    use super::*;
    use crate::bundled;

    /// The bundled model in a folder.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let Some(ModelSource::Embedded(files)) = bundled::source("draft") else { panic!("it is bundled") };
        for (name, bytes) in files {
            fs::write(folder.path().join(name), bytes).expect("written");
        }
        folder
    }

    fn found(folder: &Path) -> Finding {
        let models = vec![folder.to_str().expect("UTF-8").to_owned()];
        let (check, models) = check(&Config { models, ..Config::default() });
        assert!(models.is_empty(), "{check:?}");
        let [found] = &check.findings[..] else { panic!("{check:?}") };
        assert!(found.is_problem() && !found.said.contains(folder.to_str().expect("UTF-8")), "{found:?}");
        found.clone()
    }

    /// Changes what the head of a weights file says.
    fn edit_head(path: &Path, edit: impl FnOnce(&mut serde_json::Map<String, Value>)) {
        let bytes = fs::read(path).expect("it is there");
        let n =
            usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"))).expect("it fits");
        let mut head: Value = serde_json::from_slice(&bytes[8..8 + n]).expect("JSON");
        edit(head.as_object_mut().expect("an object"));
        let head = head.to_string().into_bytes();
        let length = (head.len() as u64).to_le_bytes();
        fs::write(path, [&length[..], &head, &bytes[8 + n..]].concat()).expect("written");
    }

    fn first_matrix(head: &mut serde_json::Map<String, Value>) -> &mut Value {
        let is_matrix = |value: &Value| value["shape"].as_array().is_some_and(|shape| shape.len() == 2);
        head.values_mut().find(|value| is_matrix(value)).expect("there are projections")
    }

    #[test]
    fn models_that_can_be_opened_are_listed() {
        let folder = folder();
        let models = vec!["tiny".to_owned(), folder.path().display().to_string()];
        let (check, models) = check(&Config { models, ..Config::default() });
        assert_eq!((check.findings.as_slice(), models.len()), (&[][..], 2));
        assert!(check.details[1].ends_with(&models[1].folder.as_ref().expect("one").display().to_string()));
        let (check, models) =
            super::check(&Config { models: vec!["tiny".to_owned(), "tiny".to_owned()], ..Config::default() });
        assert_eq!((check.findings[0].code, models.len()), (Code::ModelTwice, 1));
    }

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(found(Path::new("/no/such/model")).code, Code::ModelMissing);
        for (file, code) in [
            ("config.json", Code::ModelFileMissing),
            ("tokenizer.json", Code::ModelFileMissing),
            ("model.safetensors", Code::ModelFileMissing),
        ] {
            let folder = folder();
            fs::remove_file(folder.path().join(file)).expect("it is there");
            let found = found(folder.path());
            assert!(found.code == code && found.said.contains(file), "{found:?}");
        }
    }

    #[test]
    fn what_is_broken_is_named_with_the_reason() {
        let cut = |file: &str, n_bytes: u64| {
            let folder = folder();
            let path = folder.path().join(file);
            fs::OpenOptions::new()
                .write(true)
                .open(&path)
                .expect("it is there")
                .set_len(n_bytes)
                .expect("cut");
            found(folder.path())
        };
        let weights = cut("model.safetensors", 100_000);
        assert_eq!(weights.code, Code::ModelFileCutOff);
        assert!(
            weights.said.contains("model.safetensors: 100000 bytes long; its header expects"),
            "{weights:?}"
        );
        for (file, n_bytes) in [("model.safetensors", 5), ("tokenizer.json", 900), ("config.json", 20)] {
            let found = cut(file, n_bytes);
            assert!(found.said.contains(file), "{found:?}");
            assert!([Code::ModelFileBroken, Code::ModelFileCutOff].contains(&found.code), "{found:?}");
        }
    }

    #[test]
    fn a_broken_file_is_named_with_the_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("broken.gguf");
        fs::write(&path, b"GGUF\x03\0\0\0").expect("written");
        let found = found(&path);
        assert_eq!(found.code, Code::ModelFileBroken, "{found:?}");
        assert!(found.said.starts_with("model \"broken.gguf\": broken.gguf: GGUF header:"), "{found:?}");
    }

    #[test]
    fn weights_of_another_type_or_shape_are_named() {
        let edited = |edit: fn(&mut serde_json::Map<String, Value>)| {
            let folder = folder();
            edit_head(&folder.path().join("model.safetensors"), edit);
            found(folder.path())
        };
        // As many bytes of each, so that nothing else is wrong with the head.
        let of_type = edited(|head| {
            let tensor = first_matrix(head);
            tensor["dtype"] = if tensor["dtype"] == "F32" { "I32".into() } else { "I16".into() };
        });
        assert_eq!(of_type.code, Code::ModelWrongDtype, "{of_type:?}");
        let of_shape = edited(|head| {
            let tensor = first_matrix(head);
            let shape: Vec<u64> = serde_json::from_value(tensor["shape"].clone()).expect("numbers");
            tensor["shape"] = vec![shape[0] * 2, shape[1] / 2].into();
        });
        assert_eq!(of_shape.code, Code::ModelWrongShape, "{of_shape:?}");
        let renamed = edited(|head| {
            let name = head.keys().find(|name| name.contains("norm")).expect("there are norms").clone();
            let tensor = head.remove(&name).expect("it is there");
            head.insert("model.elsewhere.weight".to_owned(), tensor);
        });
        assert_eq!(renamed.code, Code::ModelWrongTensors, "{renamed:?}");
    }

    #[test]
    fn a_folder_is_named_by_its_last_part() {
        assert_eq!(name(&PathBuf::from("/srv/models/Llama").display().to_string()), "Llama");
        assert_eq!(name("shape:x"), "shape:x");
    }
}
