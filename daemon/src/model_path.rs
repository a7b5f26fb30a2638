//! Where the files of a model are that somebody asks for, and what the model is called by them.

use std::path::{Path, PathBuf};

use trellis_engine::model::ModelSource;

use crate::daemon::DaemonError;
use crate::{bundled, hub};

/// Where the files of a bundled model, a folder or a GGUF file are, and the name that the model has by them.
///
/// # Errors
/// There is none.
pub(crate) fn source_of(choice: &str) -> Result<(String, ModelSource), DaemonError> {
    if let Some(source) = bundled::source(choice) {
        return Ok((choice.to_owned(), source));
    }
    let path = PathBuf::from(choice);
    let (hub_name, path) = match hub::snapshot(&path)? {
        Some(hub::Snapshot { name, folder }) => (Some(name), folder),
        None => (None, path),
    };
    let source = ModelSource::at(path.clone());
    if matches!(source, ModelSource::Folder(_)) && !path.join("config.json").is_file() {
        return Err(DaemonError::UnknownModel { name: choice.to_owned() });
    }
    let name = hub_name.or_else(|| path_name(&path)).unwrap_or_else(|| choice.to_owned());
    Ok((name, source))
}

/// The name of a folder, or of a file without its ending. A link to a file names the model: what it leads to may be named by a hash.
pub(crate) fn path_name(path: &Path) -> Option<String> {
    let name = match path.is_file() {
        true => path.file_stem()?.to_owned(),
        false => path.canonicalize().ok()?.file_name()?.to_owned(),
    };
    Some(name.to_str()?.to_owned())
}

/// Whether a choice names files, rather than a bundled model or one of the catalog.
pub(crate) fn is_path(choice: &str) -> bool {
    let path = Path::new(choice);
    !bundled::NAMES.contains(&choice) && (path.is_dir() || path.is_file())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_is_a_gguf_file_and_names_the_model_without_its_ending() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |path: &Path| source_of(path.to_str().expect("UTF-8"));
        let file = folder.path().join("Llama-3.2-1B.Q4_K_M.gguf");
        fs::write(&file, "GGUF").expect("written");
        assert!(
            matches!(of(&file), Ok((name, ModelSource::Gguf(path))) if name == "Llama-3.2-1B.Q4_K_M" && path == file)
        );
        let model = folder.path().join("model.v1");
        fs::create_dir(&model).expect("made");
        assert!(matches!(of(&model), Err(DaemonError::UnknownModel { .. })));
        fs::write(model.join("config.json"), "{}").expect("written");
        assert!(
            matches!(of(&model), Ok((name, ModelSource::Folder(path))) if name == "model.v1" && path == model)
        );
        assert!(matches!(of(&folder.path().join("none")), Err(DaemonError::UnknownModel { .. })));
        assert!(matches!(source_of("tiny"), Ok((_, ModelSource::Embedded(_)))));
        assert!(is_path(file.to_str().expect("UTF-8")) && !is_path("tiny") && !is_path("/no/such/path"));
    }
}
