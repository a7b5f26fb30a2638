//! `trellis run --profile`: where a guest's time went, as a table and as a timeline.

mod firefox;
mod summary;

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::PathBuf;
use std::time::SystemTime;

use self::summary::Summary;
use super::error::CliError;
use super::output::{Format, note, print_line, remark, to_json};
use crate::profile::entries;

/// A profile that comes in.
#[derive(Debug)]
pub(crate) struct Profiling {
    guest: String,
    path: PathBuf,
    file: File,
    bytes: Vec<u8>,
    began: SystemTime,
}

impl Profiling {
    /// Makes sure that it can be written.
    ///
    /// # Errors
    /// It cannot.
    pub(crate) fn create(path: PathBuf, guest: &str) -> Result<Self, CliError> {
        let file = File::create(&path)
            .map_err(|source| CliError::Io { doing: format!("write {}", path.display()), source })?;
        Ok(Self { guest: guest.to_owned(), path, file, bytes: Vec::new(), began: SystemTime::now() })
    }

    /// The guest was started.
    pub(crate) fn begin(&mut self) {
        self.began = SystemTime::now();
    }

    /// Adds what the daemon sent of it.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// All of it has come: writes the timeline, and says what it comes to.
    ///
    /// # Errors
    /// The file cannot be written, or nothing has come: the daemon is older than profiles.
    pub(crate) fn finish(self, format: Format) -> Result<(), CliError> {
        let Self { guest, path, file, bytes, began } = self;
        if bytes.is_empty() {
            return Err(CliError::NotProfiled);
        }
        let entries = entries(&bytes);
        let failed = |source| CliError::Io { doing: format!("write {}", path.display()), source };
        let mut file = BufWriter::new(file);
        serde_json::to_writer(&mut file, &firefox::profile(&guest, began, &entries))
            .map_err(io::Error::from)
            .and_then(|()| file.flush())
            .map_err(failed)?;
        let summary = Summary::of(&entries);
        match format {
            Format::Json => print_line(&to_json(&summary)),
            Format::Text => {
                remark(&format!("profile of {guest}:\n{}", summary.to_text()));
                let path = path.display();
                note(format, &format!("the timeline is in {path}, for https://profiler.firefox.com"));
                Ok(())
            }
        }
    }
}
