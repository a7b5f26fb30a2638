//! The file that a recording goes to.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::error::CliError;
use crate::recording::{Head, write_head};

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
    /// Nothing has come. A file beside the path, which its user alone may read, as files of this kind are.
    Waiting(NamedTempFile, Head),
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
        let failed = |source| CliError::Io { doing: format!("write {}", path.display()), source };
        match path.symlink_metadata() {
            // A device or a pipe would be replaced by a file.
            Ok(found) if !found.is_file() => {
                return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            Ok(_) | Err(_) => {}
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = NamedTempFile::new_in(folder).map_err(failed)?;
        Ok(Self { path, stage: Stage::Waiting(file, head) })
    }

    /// Adds what the daemon sent of it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        self.write(bytes).map_err(|source| self.failed(source))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Stage::Waiting(..) = self.stage
            && let Stage::Waiting(file, head) = std::mem::replace(&mut self.stage, Stage::Failed)
        {
            let mut file = BufWriter::new(file.persist(&self.path).map_err(|error| error.error)?);
            file.write_all(&write_head(&head))?;
            self.stage = Stage::Writing(file);
        }
        match &mut self.stage {
            Stage::Writing(file) => file.write_all(bytes),
            Stage::Waiting(..) | Stage::Failed => Err(io::Error::other("an earlier write failed")),
        }
    }

    /// All of it has come.
    ///
    /// # Errors
    /// The file cannot be written, or nothing has come: the daemon is older than recordings.
    pub(crate) fn finish(mut self) -> Result<(), CliError> {
        match &mut self.stage {
            Stage::Writing(file) => file.flush().map_err(|source| self.failed(source)),
            Stage::Waiting(..) | Stage::Failed => Err(CliError::NotRecorded),
        }
    }

    fn failed(&self, source: io::Error) -> CliError {
        CliError::Io { doing: format!("write {}", self.path.display()), source }
    }
}
