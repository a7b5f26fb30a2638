//! Guests that clients start by name: the files `NAME.wasm` of one folder.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
#[cfg(unix)]
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use trellis_wire::{ErrorBody, ErrorCode};

use crate::descriptors;
use crate::guest::{listed_names, shown_name};
use crate::tasks::blocking;

/// How old the names may be that a client is told of whose program is not there: however often that is asked, the folder is
/// read no more often.
const RECENT: Duration = Duration::from_secs(1);

pub(super) struct Registry {
    folder: Option<PathBuf>,
    /// Held by who looks for a program by its hash.
    hashed: tokio::sync::Mutex<()>,
    /// The names, and when they were read.
    listed: tokio::sync::Mutex<Option<(Instant, Arc<[String]>)>>,
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

/// Whether there is nothing of a name, or cannot be.
fn is_not_there(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidFilename, InvalidInput, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | InvalidInput | InvalidFilename | NotADirectory)
}

impl Registry {
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self {
            folder,
            hashed: tokio::sync::Mutex::default(),
            listed: tokio::sync::Mutex::default(),
            known: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, (Stamp, blake3::Hash)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program of that name. Its file is looked at, and not the folder: clients may ask often.
    pub(super) async fn find(&self, name: &str) -> Result<Named, ErrorBody> {
        let Some(path) = self.path_of(name) else { return Err(self.unknown(name).await) };
        let file = match tokio::fs::metadata(&path).await {
            Ok(file) => file,
            Err(error) if is_not_there(&error) => return Err(self.unknown(name).await),
            Err(error) => return Err(unread(&error)),
        };
        let stamp = Stamp::of(&file);
        let hash = self.known().get(name).filter(|(of, _)| *of == stamp).map(|(_, hash)| *hash);
        Ok(Named { name: name.to_owned(), path, stamp, hash })
    }

    /// The name of a program with this hash.
    pub(super) async fn name_of(&self, hash: &blake3::Hash) -> Option<String> {
        // By one at a time: what nobody has read yet is read here.
        let _turn = self.hashed.lock().await;
        for name in self.recent_names().await.ok()?.iter() {
            let Ok(named) = self.find(name).await else { continue };
            let found = match named.hash {
                Some(found) => found,
                None if self.read(&named).await.is_err() => continue,
                None => match self.known().get(name) {
                    Some((_, found)) => *found,
                    None => continue,
                },
            };
            if found == *hash {
                return Some(name.clone());
            }
        }
        None
    }

    /// Where the program of that name is, if it is there; none where the name would lead out of the folder.
    fn path_of(&self, name: &str) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?;
        let is_in_it = Path::new(name).file_name().is_some_and(|file| file == name);
        is_in_it.then(|| folder.join(format!("{name}.wasm")))
    }

    async fn unknown(&self, name: &str) -> ErrorBody {
        let names = match self.recent_names().await {
            Ok(names) => names,
            Err(error) => return unread(&error),
        };
        let name = shown_name(name);
        let message = format!("no program {name:?} is registered; registered: {}", listed_names(&names));
        ErrorBody::new(ErrorCode::UnknownProgram, message).about("program").with_value(name)
    }

    /// The names as they were a short while ago, read by one at a time.
    async fn recent_names(&self) -> io::Result<Arc<[String]>> {
        let mut listed = self.listed.lock().await;
        if let Some((read, names)) = &*listed
            && read.elapsed() < RECENT
        {
            return Ok(names.clone());
        }
        let names: Arc<[String]> = self.list().await?.into();
        *listed = Some((Instant::now(), names.clone()));
        Ok(names)
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
        self.known().retain(|name, _| names.binary_search(name).is_ok());
        Ok(names)
    }
}

/// Where the folder is, is nothing for clients.
fn unread(error: &io::Error) -> ErrorBody {
    let code = if descriptors::are_used_up(error) { ErrorCode::Overloaded } else { ErrorCode::Internal };
    ErrorBody::new(code, format!("the registered programs cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn programs_are_files_of_the_folder_and_no_name_leads_out_of_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let guests = folder.path().join("guests");
        std::fs::create_dir(&guests).expect("made");
        std::fs::write(folder.path().join("outside.wasm"), b"x").expect("written");
        let registry = Registry::new(Some(guests.clone()));
        let refused = |name: &'static str| {
            let found = registry.find(name);
            async move {
                let error = found.await.err().expect("there is none");
                assert_eq!(error.code, ErrorCode::UnknownProgram, "{name}");
                error.message
            }
        };
        for name in ["../outside", "..", "", "/", "chat/", "chat\0", "chat"] {
            assert!(refused(name).await.ends_with("registered: nothing"), "{name}");
        }
        // It is found at once, though the names that clients are told of are a moment old.
        std::fs::write(guests.join("chat.wasm"), b"chat").expect("written");
        let named = registry.find("chat").await.expect("it is there");
        assert!(named.n_bytes() == 4 && named.hash.is_none());
        assert_eq!(registry.read(&named).await.expect("it is read"), b"chat"[..]);
        let again = registry.find("chat").await.expect("it is there");
        assert_eq!(again.hash, Some(blake3::hash(b"chat")));
        assert!(refused("other").await.ends_with("registered: nothing"));
        tokio::time::sleep(RECENT).await;
        assert_eq!(registry.name_of(&blake3::hash(b"chat")).await.as_deref(), Some("chat"));
        assert_eq!(registry.name_of(&blake3::hash(b"other")).await, None);
        assert_eq!(registry.names().await, ["chat"]);
        std::fs::remove_file(guests.join("chat.wasm")).expect("removed");
        assert!(registry.names().await.is_empty() && registry.known().is_empty());
        refused("chat").await;
    }
}
