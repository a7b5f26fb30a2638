//! What lies on disk of contexts that guests have saved.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, io};

use trellis::config::{Config, SavedContexts};

/// Time between two looks while an attack goes on.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// Settings with which a daemon keeps saved contexts in this folder.
#[must_use]
pub fn on_disk(config: Config, folder: &Path) -> Config {
    Config { saved_contexts: SavedContexts::Disk, state_dir: Some(folder.join("state")), ..config }
}

/// What a file among saved contexts is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A saved context.
    Context,
    /// One that is being written.
    Temporary,
    /// None of the daemon's.
    Other,
}

/// A file among saved contexts.
#[derive(Clone, Debug)]
pub struct SavedFile {
    /// The name of its folder: whose it is.
    pub user: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Its length.
    pub n_bytes: u64,
}

/// The files of a daemon that keeps them in this folder; one that goes meanwhile is not there.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path) -> io::Result<Vec<SavedFile>> {
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let entries = |path: &Path| match fs::read_dir(path) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>(),
        Err(error) if gone(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    let mut files = Vec::new();
    for user in entries(&folder.join("state").join("contexts"))? {
        for entry in entries(&user.path())? {
            let metadata = match entry.metadata() {
                Err(error) if gone(&error) => continue,
                metadata => metadata?,
            };
            let path = entry.path();
            let kind = match path.extension().and_then(|extension| extension.to_str()) {
                Some("context") if metadata.is_file() => Kind::Context,
                Some("tmp") if metadata.is_file() => Kind::Temporary,
                _ => Kind::Other,
            };
            let text = |name: std::ffi::OsString| name.to_string_lossy().into_owned();
            let (user, name) = (text(user.file_name()), text(entry.file_name()));
            files.push(SavedFile { user, path, name, kind, n_bytes: metadata.len() });
        }
    }
    Ok(files)
}

/// Bytes of saved contexts, by their users.
#[must_use]
pub fn bytes(files: &[SavedFile]) -> BTreeMap<String, u64> {
    let mut bytes = BTreeMap::new();
    for file in files.iter().filter(|file| file.kind == Kind::Context) {
        *bytes.entry(file.user.clone()).or_default() += file.n_bytes;
    }
    bytes
}

/// What of these files should not be there when nothing is written, in words: what is half written, and what is beyond the limit
/// of its user.
#[must_use]
pub fn beyond(files: &[SavedFile], limit_bytes: u64) -> Vec<String> {
    let strays = files.iter().filter(|file| file.kind != Kind::Context);
    let strays = strays.map(|file| format!("{} is left among saved contexts", file.name));
    let bytes = bytes(files);
    let too_many = bytes.iter().filter(|(_, n)| **n > limit_bytes);
    let too_many = too_many.map(|(user, n)| format!("user {user} has {n} bytes on disk of {limit_bytes}"));
    strays.chain(too_many).collect()
}

/// The most bytes that any user had at a look, while something else is done.
///
/// # Errors
/// The folder cannot be read, or what is done fails.
pub fn most_while<T>(folder: &Path, act: impl FnOnce() -> io::Result<T>) -> io::Result<(T, u64)> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| -> io::Result<u64> {
            let mut most = 0;
            while !is_over.load(Ordering::Relaxed) {
                most = bytes(&files(folder)?).into_values().fold(most, u64::max);
                std::thread::sleep(LOOK_PERIOD);
            }
            Ok(most)
        });
        let done = act();
        is_over.store(true, Ordering::Relaxed);
        let most = watching.join().expect("who looks does not panic")?;
        Ok((done?, most))
    })
}
