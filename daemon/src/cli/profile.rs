//! `trellis run --profile`: where a guest's time went, as a table and as a timeline.

mod firefox;
mod summary;

use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::time::SystemTime;

use self::summary::Summary;
use super::error::CliError;
use super::output::{Format, note, print_line, remark, to_json};
use super::record;
use crate::profile::entries;

/// A profile that comes in.
#[derive(Debug)]
pub(crate) struct Profiling {
    guest: String,
    path: PathBuf,
    bytes: Vec<u8>,
    began: SystemTime,
}

impl Profiling {
    /// Makes sure that it can be written. Until it is whole there is no file, and what is at the path stays.
    ///
    /// # Errors
    /// It cannot.
    pub(crate) fn create(path: PathBuf, guest: &str) -> Result<Self, CliError> {
        record::check(&path)?;
        Ok(Self { guest: guest.to_owned(), path, bytes: Vec::new(), began: SystemTime::now() })
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
        let Self { guest, path, bytes, began } = self;
        if bytes.is_empty() {
            return Err(CliError::NotProfiled);
        }
        let entries = entries(&bytes);
        let failed = |source| CliError::Io { doing: format!("write {}", path.display()), source };
        let write = || {
            let mut file = BufWriter::new(record::new_file(&path)?);
            serde_json::to_writer(&mut file, &firefox::profile(&guest, began, &entries))?;
            file.into_inner()?.persist(&path)?;
            io::Result::Ok(())
        };
        write().map_err(failed)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_that_does_not_come_leaves_nothing_behind_and_what_was_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.json");
        let profiling = Profiling::create(path.clone(), "chat").expect("it can be written");
        assert!(matches!(profiling.finish(Format::Text), Err(CliError::NotProfiled)));
        assert!(!path.exists());
        std::fs::write(&path, "an earlier one").expect("written");
        drop(Profiling::create(path.clone(), "chat").expect("it can be written"));
        assert_eq!(std::fs::read(&path).expect("it is there"), b"an earlier one");
        assert!(Profiling::create(folder.path().join("none/out.json"), "chat").is_err());
    }
}
