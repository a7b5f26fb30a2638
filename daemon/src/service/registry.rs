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

use crate::checkout;
use crate::descriptors;
use crate::guest::{listed_names, shown_name};
use crate::http;
use crate::tasks::blocking;

/// How old the names may be that a client is told of whose program is not there: however often that is asked, the folder is
/// read no more often.
const RECENT: Duration = Duration::from_secs(1);

pub(super) struct Registry {
    folder: Option<PathBuf>,
    component_bytes_max: u64,
    /// When files were last read for a hash that was not known. Held by who reads them.
    hashed: tokio::sync::Mutex<Option<Instant>>,
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
    pub(super) fn new(folder: Option<PathBuf>, component_bytes_max: u64) -> Self {
        Self {
            folder,
            component_bytes_max,
            hashed: tokio::sync::Mutex::default(),
            listed: tokio::sync::Mutex::default(),
            known: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, (Stamp, blake3::Hash)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program of that name; the guest of the HTTP front is found where it comes with the daemon, too.
    pub(super) async fn find(&self, name: &str) -> Result<Named, ErrorBody> {
        match self.find_in_folder(name).await {
            Err(missing) if name == http::GUEST && missing.code == ErrorCode::UnknownProgram => {
                self.find_built(name, missing).await
            }
            found => found,
        }
    }

    /// The program of that name. Its file is looked at, and not the folder: clients may ask often.
    async fn find_in_folder(&self, name: &str) -> Result<Named, ErrorBody> {
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

    /// The name of a program with this hash. Files that have come or changed are read for it by one at a time, and however often
    /// a hash is asked for that none has, no more often than once in [`RECENT`]: they may be large.
    pub(super) async fn name_of(&self, hash: &blake3::Hash) -> Option<String> {
        let names = self.recent_names().await.ok()?;
        if let Some(name) = self.known_name_of(hash, &names).await {
            return Some(name);
        }
        let mut hashed = self.hashed.lock().await;
        // Who was here before may have read it.
        let found = self.known_name_of(hash, &names).await;
        if found.is_some() || hashed.is_some_and(|read| read.elapsed() < RECENT) {
            return found;
        }
        for name in names.iter() {
            // One that is too large runs for nobody, and one that cannot be read is none of these.
            if let Ok(named) = self.find(name).await
                && named.hash.is_none()
                && named.n_bytes() <= self.component_bytes_max
            {
                let _ = self.read(&named).await;
            }
        }
        *hashed = Some(Instant::now());
        self.known_name_of(hash, &names).await
    }

    /// The one of these programs that was read before, has not changed, and has this hash.
    async fn known_name_of(&self, hash: &blake3::Hash, names: &[String]) -> Option<String> {
        let known = |name: &&String| self.known().get(*name).is_some_and(|(_, of)| of == hash);
        for name in names.iter().filter(known) {
            if self.find(name).await.is_ok_and(|named| named.hash == Some(*hash)) {
                return Some(name.clone());
            }
        }
        None
    }

    /// The component of that name that comes with the daemon.
    async fn find_built(&self, name: &str, missing: ErrorBody) -> Result<Named, ErrorBody> {
        for path in checkout::built(name) {
            if let Ok(file) = tokio::fs::metadata(&path).await {
                let (name, stamp) = (name.to_owned(), Stamp::of(&file));
                let hash = self.known().get(&name).filter(|(of, _)| *of == stamp).map(|(_, hash)| *hash);
                return Ok(Named { name, path, stamp, hash });
            }
        }
        let message = format!(
            "the component {name} is not there: `trellis build {name} -o FOLDER/{name}.wasm` puts it into the folder that guests_dir \
             names, and packages bring it"
        );
        Err(ErrorBody { message, ..missing })
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
        let registry = Registry::new(Some(guests.clone()), 5);
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
        // Files are read for that now and then, and none that is larger than a component may be.
        std::fs::write(guests.join("late.wasm"), b"late").expect("written");
        std::fs::write(guests.join("large.wasm"), b"larger").expect("written");
        tokio::time::sleep(RECENT).await;
        assert_eq!(registry.name_of(&blake3::hash(b"late")).await.as_deref(), Some("late"));
        assert_eq!(registry.name_of(&blake3::hash(b"larger")).await, None);
        assert!(registry.find("large").await.expect("it is there").hash.is_none());
        for name in ["late.wasm", "large.wasm"] {
            std::fs::remove_file(guests.join(name)).expect("removed");
        }
        assert_eq!(registry.names().await, ["chat"]);
        std::fs::remove_file(guests.join("chat.wasm")).expect("removed");
        assert!(registry.names().await.is_empty() && registry.known().is_empty());
        refused("chat").await;
    }
}
