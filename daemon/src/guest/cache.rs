//! Compiled components on disk, in a folder that only the daemon's user can touch.

use std::fs;
use std::hash::{Hash as _, Hasher};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use super::error::GuestError;

const EXTENSION: &str = "cwasm";
const TEMPORARY: &str = "tmp";

/// The cache: one file for each component and engine, `HASH-ENGINE.cwasm`. A file is the code followed by its
/// BLAKE3 hash, so that a file cut short or rotten is not run.
#[derive(Debug)]
pub(crate) struct CodeCache {
    dir: PathBuf,
    engine: String,
    n_bytes_max: u64,
    n_temporary: AtomicU64,
}

impl CodeCache {
    /// Opens the folder, which is made if need be.
    pub(crate) fn open(dir: &Path, engine: &wasmtime::Engine, n_bytes_max: u64) -> Result<Self, GuestError> {
        make_private(dir)?;
        let mut fingerprint = Fingerprint(blake3::Hasher::new());
        engine.precompile_compatibility_hash().hash(&mut fingerprint);
        let engine = fingerprint.0.finalize().to_hex()[..16].to_owned();
        let cache = Self { dir: dir.to_owned(), engine, n_bytes_max, n_temporary: AtomicU64::new(0) };
        for (path, ..) in cache.files(TEMPORARY) {
            // Left behind by a daemon that was killed; one that is being written now is written again.
            let _ = fs::remove_file(path);
        }
        Ok(cache)
    }

    fn path(&self, hash: &blake3::Hash) -> PathBuf {
        self.dir.join(format!("{hash}-{}.{EXTENSION}", self.engine))
    }

    /// The code of a component, if it is there and whole.
    pub(crate) fn load(&self, hash: &blake3::Hash) -> Option<Vec<u8>> {
        let path = self.path(hash);
        let mut file = fs::File::open(&path).ok()?;
        let mut bytes = Vec::new();
        (&mut file).take(self.n_bytes_max).read_to_end(&mut bytes).ok()?;
        let n_code = bytes.len().checked_sub(blake3::OUT_LEN)?;
        if blake3::hash(&bytes[..n_code]).as_bytes() != &bytes[n_code..] {
            let _ = fs::remove_file(&path);
            return None;
        }
        bytes.truncate(n_code);
        // The time of use orders the eviction; without it the time of writing does.
        let _ = file.set_modified(SystemTime::now());
        Some(bytes)
    }

    /// Keeps the code of a component, and makes room for it.
    pub(crate) fn store(&self, hash: &blake3::Hash, code: &[u8]) -> Result<(), GuestError> {
        let n_temporary = self.n_temporary.fetch_add(1, Ordering::Relaxed);
        let temporary = self.dir.join(format!("{hash}-{}-{n_temporary}.{TEMPORARY}", std::process::id()));
        let written = write_whole(&temporary, code).and_then(|()| fs::rename(&temporary, self.path(hash)));
        if let Err(error) = written {
            let _ = fs::remove_file(&temporary);
            return Err(GuestError::Cache { path: temporary, reason: error.to_string() });
        }
        self.evict();
        Ok(())
    }

    fn evict(&self) {
        let mut files: Vec<_> = self.files(EXTENSION).collect();
        files.sort_by_key(|&(_, _, used)| used);
        let mut n_bytes: u64 = files.iter().map(|(_, n_bytes, _)| n_bytes).sum();
        for (path, n, _) in files {
            if n_bytes <= self.n_bytes_max {
                return;
            }
            if fs::remove_file(path).is_ok() {
                n_bytes -= n;
            }
        }
    }

    fn files(&self, extension: &str) -> impl Iterator<Item = (PathBuf, u64, SystemTime)> {
        fs::read_dir(&self.dir).into_iter().flatten().flatten().filter_map(move |entry| {
            let path = entry.path();
            let metadata = entry.metadata().ok()?;
            let ours = metadata.is_file() && path.extension().is_some_and(|e| e == extension);
            ours.then(|| (path, metadata.len(), metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH)))
        })
    }
}

fn write_whole(path: &Path, code: &[u8]) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    file.write_all(code)?;
    file.write_all(blake3::hash(code).as_bytes())?;
    file.sync_data()
}

/// Makes the folder and checks that it is this user's alone: what lies in it is run without further checks.
pub(crate) fn make_private(dir: &Path) -> Result<(), GuestError> {
    let refuse = |reason: String| GuestError::Cache { path: dir.to_owned(), reason };
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir).map_err(|error| refuse(error.to_string()))?;
    let metadata = fs::symlink_metadata(dir).map_err(|error| refuse(error.to_string()))?;
    if !metadata.is_dir() {
        return Err(refuse("not a folder".to_owned()));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
        if owner != user {
            return Err(refuse(format!("belongs to user {owner}, not to user {user} who runs the daemon")));
        }
        let mode = metadata.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(refuse(format!("has mode {mode:03o}: others can reach it; make it 700")));
        }
    }
    Ok(())
}

/// A hasher whose result is the same in every process.
struct Fingerprint(blake3::Hasher);

impl Hasher for Fingerprint {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        let hash = self.0.finalize();
        u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 of 32 bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::runtime::compiling_engine;
    use super::*;

    fn open(dir: &Path, n_bytes_max: u64) -> CodeCache {
        let engine = compiling_engine().expect("an engine");
        CodeCache::open(dir, &engine, n_bytes_max).expect("a cache")
    }

    #[test]
    fn what_is_stored_is_loaded_unless_it_is_broken() {
        let dir = tempfile::tempdir().expect("a folder");
        let cache = open(&dir.path().join("code"), 1 << 20);
        let hash = blake3::hash(b"component");
        assert!(cache.load(&hash).is_none());
        cache.store(&hash, b"code").expect("stored");
        assert_eq!(cache.load(&hash).expect("there"), b"code");
        let path = cache.path(&hash);
        let mut bytes = fs::read(&path).expect("a file");
        bytes[0] ^= 1;
        fs::write(&path, &bytes).expect("written");
        assert!(cache.load(&hash).is_none());
        assert!(!path.exists(), "a broken file is removed");
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let dir = tempfile::tempdir().expect("a folder");
        let cache = open(&dir.path().join("code"), 300);
        let hashes = [b"a", b"b", b"c"].map(|name| blake3::hash(name));
        let at = |s| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(s);
        for (hash, used_s) in hashes[..2].iter().zip([2_000, 1_000]) {
            cache.store(hash, &[0; 100]).expect("stored");
            let file = fs::File::options().append(true).open(cache.path(hash)).expect("a file");
            file.set_modified(at(used_s)).expect("dated");
        }
        cache.store(&hashes[2], &[0; 100]).expect("stored");
        let there: Vec<_> = hashes.iter().map(|hash| cache.path(hash).exists()).collect();
        assert_eq!(there, [true, false, true]);
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_others_can_reach_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("code");
        fs::create_dir(&path).expect("made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).expect("set");
        let engine = compiling_engine().expect("an engine");
        let error = CodeCache::open(&path, &engine, 1 << 20).expect_err("refused");
        assert!(error.to_string().contains("mode 750"), "{error}");
    }
}
