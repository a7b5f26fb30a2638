//! The file that a recording goes to.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::PathBuf;

use super::error::CliError;
use crate::recording::{Head, write_head};

/// Prompts and answers are in it: nobody but its user reads it.
const MODE: u32 = 0o600;

/// A recording that is being written.
#[derive(Debug)]
pub(crate) struct Recording {
    path: PathBuf,
    file: BufWriter<File>,
    head: Option<Head>,
}

impl Recording {
    /// Makes the file, or empties it.
    ///
    /// # Errors
    /// That cannot be done.
    pub(crate) fn create(path: PathBuf, head: Head) -> Result<Self, CliError> {
        let failed = |source| CliError::Io { doing: format!("write {}", path.display()), source };
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(MODE).open(&path);
        let file = file.map_err(failed)?;
        // It may have been there.
        file.set_permissions(Permissions::from_mode(MODE)).map_err(failed)?;
        Ok(Self { path, file: BufWriter::new(file), head: Some(head) })
    }

    /// Adds what the daemon sent of it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        let head = self.head.take().map(|head| write_head(&head)).unwrap_or_default();
        let written = self.file.write_all(&head).and_then(|()| self.file.write_all(bytes));
        written.map_err(|source| self.failed(source))
    }

    /// All of it has come.
    ///
    /// # Errors
    /// The file cannot be written, or nothing has come: the daemon is older than recordings.
    pub(crate) fn finish(mut self) -> Result<(), CliError> {
        self.file.flush().map_err(|source| self.failed(source))?;
        if self.head.is_some() { Err(CliError::NotRecorded) } else { Ok(()) }
    }

    fn failed(&self, source: std::io::Error) -> CliError {
        CliError::Io { doing: format!("write {}", self.path.display()), source }
    }
}
