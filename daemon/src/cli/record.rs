//! The file that a recording goes to.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::error::CliError;
use crate::recording::{Head, write_head};

/// Makes sure that a file can be put at this path, and leaves what is there.
///
/// # Errors
/// It cannot.
pub(super) fn check(path: &Path) -> Result<(), CliError> {
    let failed = |source| CliError::Io { doing: format!("write {}", path.display()), source };
    match path.symlink_metadata() {
        // A device or a pipe would be replaced by a file.
        Ok(found) if !found.is_file() => {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")));
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        Ok(_) | Err(_) => {}
    }
    // One without a name, which goes with the command.
    tempfile::tempfile_in(folder_of(path)).map_err(failed)?;
    Ok(())
}

/// A new file, which its user alone may read, as files of this kind are. It is put at its path by `persist`.
pub(super) fn new_file(path: &Path) -> io::Result<NamedTempFile> {
    NamedTempFile::new_in(folder_of(path))
}

/// A recording that is being written. Prompts and answers are in it: only its user may read it.
///
/// What is there under its name stays until something has come of the recording.
#[derive(Debug)]
pub(crate) struct Recording {
    path: PathBuf,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Nothing has come, and there is no file: a command that is killed leaves none behind.
    Waiting(Head),
    /// At the path.
    Writing(BufWriter<File>),
    /// It could not be written.
    Failed,
}

impl Recording {
    /// Makes sure that it can be written.
    ///
    /// # Errors
    /// It cannot.
    pub(crate) fn create(path: PathBuf, head: Head) -> Result<Self, CliError> {
        check(&path)?;
        Ok(Self { path, stage: Stage::Waiting(head) })
    }

    /// Adds what the daemon sent of it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        self.write(bytes).map_err(|source| self.failed(source))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Stage::Waiting(_) = self.stage
            && let Stage::Waiting(head) = std::mem::replace(&mut self.stage, Stage::Failed)
        {
            let file = new_file(&self.path)?;
            let mut file = BufWriter::new(file.persist(&self.path).map_err(|error| error.error)?);
            file.write_all(&write_head(&head))?;
            self.stage = Stage::Writing(file);
        }
        match &mut self.stage {
            Stage::Writing(file) => file.write_all(bytes),
            Stage::Waiting(_) | Stage::Failed => Err(io::Error::other("an earlier write failed")),
        }
    }

    /// All of it has come.
    ///
    /// # Errors
    /// The file cannot be written, or nothing has come: the daemon is older than recordings.
    pub(crate) fn finish(mut self) -> Result<(), CliError> {
        match &mut self.stage {
            Stage::Writing(file) => file.flush().map_err(|source| self.failed(source)),
            Stage::Waiting(_) | Stage::Failed => Err(CliError::NotRecorded),
        }
    }

    fn failed(&self, source: io::Error) -> CliError {
        CliError::Io { doing: format!("write {}", self.path.display()), source }
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_is_killed_before_anything_has_come_leaves_nothing_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let names = || {
            let entries = std::fs::read_dir(folder.path()).expect("it is read");
            entries.map(|entry| entry.expect("an entry").file_name()).collect::<Vec<_>>()
        };
        let path = folder.path().join("out.rec");
        let head = || Head { guest: "chat".to_owned(), component: None };
        // What is killed drops nothing.
        std::mem::forget(Recording::create(path.clone(), head()).expect("it can be written"));
        assert!(names().is_empty(), "{:?}", names());
        std::fs::write(&path, "an earlier one").expect("written");
        let mut recording = Recording::create(path.clone(), head()).expect("it can be written");
        assert_eq!(std::fs::read(&path).expect("it is there"), b"an earlier one");
        recording.add(b"more").expect("it can be written");
        recording.finish().expect("it can be written");
        assert!(std::fs::read(&path).expect("it is there").ends_with(b"more"));
        assert_eq!(names(), ["out.rec"]);
        assert!(Recording::create(folder.path().join("none/out.rec"), head()).is_err());
    }
}
