//! Folders of the Hugging Face cache, as they lie there: `models--ORG--NAME`, with the files of each revision under `snapshots` and
//! the revision of each branch under `refs`.
//!
//! The layout is that of `huggingface_hub` (<https://huggingface.co/docs/huggingface_hub/guides/manage-cache>).

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

const PREFIX: &str = "models--";
const SEPARATOR: &str = "--";
const SNAPSHOTS: &str = "snapshots";
/// Of what was downloaded without a revision.
const MAIN: &str = "refs/main";
/// A revision is a hash of 40 digits.
const REVISION_BYTES_MAX: u64 = 256;

/// The files of one revision.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// The part of the repository's name behind its owner.
    pub(crate) name: String,
    /// Where the files are.
    pub(crate) folder: PathBuf,
}

/// A folder of the cache in which there is no model to be found.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HubError {
    /// Nothing was downloaded, or not to its end.
    #[error("{folder} has no snapshot")]
    Empty {
        /// The folder.
        folder: String,
    },
    /// It is not said which is meant.
    #[error("{folder} has no refs/main, and several snapshots: name one of {}", .revisions.join(", "))]
    Several {
        /// The folder of the snapshots.
        folder: String,
        /// What is there.
        revisions: Vec<String>,
    },
    /// The branch is at a revision that is not there.
    #[error("{folder} has refs/main, and not the snapshot {revision:?} that it names")]
    Missing {
        /// The folder.
        folder: String,
        /// What it names.
        revision: String,
    },
}

/// The files that a folder of the cache stands for; `None` if it is no such folder.
///
/// # Errors
/// It is one, and there is no telling which revision is meant.
pub(crate) fn snapshot(folder: &Path) -> Result<Option<Snapshot>, HubError> {
    let Some(folder) = folder.canonicalize().ok().filter(|folder| folder.is_dir()) else { return Ok(None) };
    if let Some(name) = repository(&folder) {
        let folder = main_of(&folder)?;
        return Ok(Some(Snapshot { name, folder }));
    }
    // One of its snapshots, by itself.
    let parent = folder.parent().filter(|parent| parent.ends_with(SNAPSHOTS));
    let name = parent.and_then(Path::parent).and_then(repository);
    Ok(name.map(|name| Snapshot { name, folder }))
}

/// The name of the model whose folder in the cache this is.
fn repository(folder: &Path) -> Option<String> {
    let name = folder.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    let name = name.rsplit(SEPARATOR).next()?;
    (!name.is_empty()).then(|| name.to_owned())
}

fn main_of(folder: &Path) -> Result<PathBuf, HubError> {
    let (shown, snapshots) = (folder.display().to_string(), folder.join(SNAPSHOTS));
    let mut revisions: Vec<String> = fs::read_dir(&snapshots)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    revisions.sort();
    let mut revision = String::new();
    let main = fs::File::open(folder.join(MAIN)).ok();
    let main = main.and_then(|file| file.take(REVISION_BYTES_MAX).read_to_string(&mut revision).ok());
    let revision = revision.trim();
    match (main, revisions.as_slice()) {
        (_, []) => Err(HubError::Empty { folder: shown }),
        // Of what is there: the file may say anything.
        (Some(_), all) if all.iter().any(|known| known == revision) => Ok(snapshots.join(revision)),
        (Some(_), _) => Err(HubError::Missing { folder: shown, revision: revision.to_owned() }),
        (None, [only]) => Ok(snapshots.join(only)),
        (None, _) => Err(HubError::Several { folder: snapshots.display().to_string(), revisions }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_branch_names_the_snapshot_and_the_repository_the_model() {
        let cache = tempfile::tempdir().expect("a folder");
        let root = cache.path().canonicalize().expect("it is there");
        let folder = root.join("models--meta-llama--Llama-3.2-1B");
        let snapshots = folder.join("snapshots");
        fs::create_dir_all(snapshots.join("aaa")).expect("made");
        fs::create_dir_all(folder.join("refs")).expect("made");
        let of = |folder: &Path| snapshot(folder).map(|found| found.map(|found| (found.name, found.folder)));
        let llama = |revision: &str| Ok(Some(("Llama-3.2-1B".to_owned(), snapshots.join(revision))));
        assert_eq!(of(&folder), llama("aaa"), "there is one");
        fs::create_dir_all(snapshots.join("bbb")).expect("made");
        assert!(
            matches!(of(&folder), Err(HubError::Several { revisions, .. }) if revisions == ["aaa", "bbb"])
        );
        fs::write(folder.join("refs/main"), "bbb\n").expect("written");
        assert_eq!(of(&folder), llama("bbb"));
        assert_eq!(of(&snapshots.join("aaa")), llama("aaa"), "it is meant by itself");
        for elsewhere in ["ccc", "../../..", ""] {
            fs::write(folder.join("refs/main"), elsewhere).expect("written");
            assert!(matches!(of(&folder), Err(HubError::Missing { .. })), "{elsewhere}");
        }
        let empty = root.join("models--org--name");
        fs::create_dir(&empty).expect("made");
        assert!(matches!(of(&empty), Err(HubError::Empty { .. })));
        assert_eq!(of(&root), Ok(None));
        assert_eq!(of(&root.join("models--not--there")), Ok(None));
    }
}
