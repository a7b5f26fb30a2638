//! Guests that clients start by name: the files `NAME.wasm` of one folder.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
#[cfg(unix)]
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use trellis_wire::{ErrorBody, ErrorCode};

use crate::descriptors;
use crate::guest::{listed_names, shown_name};
use crate::tasks::blocking;

pub(super) struct Registry {
    folder: Option<PathBuf>,
    /// The hashes of those that were read, as they were then.
    known: Mutex<HashMap<String, (Stamp, blake3::Hash)>>,
}

/// What tells that a file has not changed. One that was put in another's place, or written to and given its old time, has changed
/// its inode, or the time of that.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    n_bytes: u64,
    modified: Option<SystemTime>,
    #[cfg(unix)]
    inode: (u64, i64, i64),
}

impl Stamp {
    fn of(file: &Metadata) -> Self {
        Self {
            n_bytes: file.len(),
            modified: file.modified().ok(),
            #[cfg(unix)]
            inode: (file.ino(), file.ctime(), file.ctime_nsec()),
        }
    }
}

/// A program of the folder.
pub(super) struct Named {
    name: String,
    path: PathBuf,
    stamp: Stamp,
    /// The hash of its component, where it was read before and has not changed.
    pub(super) hash: Option<blake3::Hash>,
}

impl Named {
    /// Length of its file.
    pub(super) fn n_bytes(&self) -> u64 {
        self.stamp.n_bytes
    }
}

impl Registry {
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, (Stamp, blake3::Hash)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program of that name.
    pub(super) async fn find(&self, name: &str) -> Result<Named, ErrorBody> {
        let names = self.list().await.map_err(|error| unread(&error))?;
        if !names.iter().any(|other| other == name) {
            let name = shown_name(name);
            let message = format!("no program {name:?} is registered; registered: {}", listed_names(&names));
            return Err(ErrorBody::new(ErrorCode::UnknownProgram, message).about("program").with_value(name));
        }
        let folder = self.folder.as_ref().expect("a name is known only where there is a folder");
        let path = folder.join(format!("{name}.wasm"));
        let file = tokio::fs::metadata(&path).await.map_err(|error| unread(&error))?;
        let stamp = Stamp::of(&file);
        let mut known = self.known();
        known.retain(|name, _| names.contains(name));
        let hash = known.get(name).filter(|(of, _)| *of == stamp).map(|(_, hash)| *hash);
        drop(known);
        Ok(Named { name: name.to_owned(), path, stamp, hash })
    }

    /// The bytes of its component.
    pub(super) async fn read(&self, named: &Named) -> Result<Bytes, ErrorBody> {
        let bytes = tokio::fs::read(&named.path).await.map(Bytes::from).map_err(|error| unread(&error))?;
        let of_file = bytes.clone();
        let hash = blocking(move || blake3::hash(&of_file)).await;
        self.known().insert(named.name.clone(), (named.stamp, hash));
        Ok(bytes)
    }

    /// The names, sorted. A folder that cannot be read holds none.
    pub(super) async fn names(&self) -> Vec<String> {
        self.list().await.unwrap_or_default()
    }

    async fn list(&self) -> io::Result<Vec<String>> {
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let mut entries = match tokio::fs::read_dir(folder).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            opened => opened?,
        };
        let mut names = Vec::new();
        while let Some(entry) = entries.next_entry().await? {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "wasm")
                && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
            {
                names.push(stem.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

/// Where the folder is, is nothing for clients.
fn unread(error: &io::Error) -> ErrorBody {
    let code = if descriptors::are_used_up(error) { ErrorCode::Overloaded } else { ErrorCode::Internal };
    ErrorBody::new(code, format!("the registered programs cannot be read: {error}"))
}
