//! What the store of saved contexts asks of a disk, and the disk of the machine.

use std::fmt;
use std::fs;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use crate::files::{discard, open, replace, sync_folder, write_whole};
use crate::guest::make_private;

/// Folders and files, below one folder that is the store's.
pub(crate) trait Disk: fmt::Debug + Send + Sync {
    /// Does this if a folder is there that no daemon uses; none comes to use it meanwhile.
    fn if_unused(&self, dir: &Path, then: &mut dyn FnMut());

    /// Has other daemons see that a folder is in use, if it is there, for as long as this is.
    fn note_in_use(&self, dir: &Path);

    /// Makes a folder that only the daemon's user can touch, if it is not there.
    ///
    /// # Errors
    /// It cannot be made, or others can touch it.
    fn make_folder(&self, dir: &Path) -> io::Result<()>;

    /// Folders in a folder.
    fn folders(&self, dir: &Path) -> Vec<PathBuf>;

    /// Files in a folder with this extension.
    fn files(&self, dir: &Path, extension: &str) -> Vec<Found>;

    /// Writes a new file, and waits until what is in it is on the disk.
    ///
    /// # Errors
    /// The disk is full or fails. Some of it may be written.
    fn write_whole(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()>;

    /// Moves a file to where another, or something else, may be.
    ///
    /// # Errors
    /// The disk fails.
    fn replace(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Waits until the disk knows what is in a folder under which name.
    ///
    /// # Errors
    /// The disk fails.
    fn sync_folder(&self, dir: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// It is not there, or the disk fails.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Removes whatever has the name of a file, as far as that can be.
    fn discard(&self, path: &Path);

    /// Opens a file to read it.
    ///
    /// # Errors
    /// It is not there, or the disk fails.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Opened>>;
}

/// A file that is there.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) n_bytes: u64,
    pub(crate) used: SystemTime,
}

/// A file that is read.
pub(crate) trait Opened: Read + Seek {
    /// Why it is none that the daemon can have written, if it is not.
    ///
    /// # Errors
    /// The disk fails.
    fn is_strange(&self) -> io::Result<Option<&'static str>>;

    /// It was used now: the time of use orders what goes first. Without it the time of writing does.
    fn note_used(&self);
}

/// The disk of this machine.
#[derive(Debug, Default)]
pub(crate) struct MachineDisk {
    /// The folder, locked as one that is in use: daemons of a user may share it.
    in_use: OnceLock<fs::File>,
}

impl Disk for MachineDisk {
    fn if_unused(&self, dir: &Path, then: &mut dyn FnMut()) {
        if let Ok(folder) = fs::File::open(dir)
            && folder.try_lock().is_ok()
        {
            then();
        }
    }

    fn note_in_use(&self, dir: &Path) {
        if self.in_use.get().is_none()
            && let Ok(folder) = fs::File::open(dir)
            && folder.try_lock_shared().is_ok()
        {
            let _ = self.in_use.set(folder);
        }
    }

    fn make_folder(&self, dir: &Path) -> io::Result<()> {
        make_private(dir).map_err(io::Error::other)
    }

    fn folders(&self, dir: &Path) -> Vec<PathBuf> {
        let paths = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        paths.filter(|path| fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())).collect()
    }

    fn files(&self, dir: &Path, extension: &str) -> Vec<Found> {
        let found = fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| {
            let (path, metadata) = (entry.path(), entry.metadata().ok()?);
            let is_ours = metadata.is_file() && path.extension().is_some_and(|found| found == extension);
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            is_ours.then_some(Found { path, n_bytes: metadata.len(), used })
        });
        found.collect()
    }

    fn write_whole(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        write_whole(path, parts)
    }

    fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
        replace(from, to)
    }

    fn sync_folder(&self, dir: &Path) -> io::Result<()> {
        sync_folder(dir)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn discard(&self, path: &Path) {
        discard(path);
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Opened>> {
        Ok(Box::new(open(path)?))
    }
}

impl Opened for fs::File {
    fn is_strange(&self) -> io::Result<Option<&'static str>> {
        let metadata = self.metadata()?;
        if !metadata.is_file() {
            return Ok(Some("no file"));
        }
        #[cfg(unix)]
        if std::os::unix::fs::MetadataExt::uid(&metadata) != rustix::process::geteuid().as_raw() {
            return Ok(Some("another user's"));
        }
        Ok(None)
    }

    fn note_used(&self) {
        let _ = self.set_modified(SystemTime::now());
    }
}
