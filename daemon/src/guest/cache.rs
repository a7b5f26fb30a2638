//! Compiled components on disk, in a folder that only the daemon's user can touch.

use std::fs;
use std::hash::{Hash as _, Hasher};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use super::error::GuestError;
use crate::files::{discard, is_full, open, replace, write_whole};

const EXTENSION: &str = "cwasm";
const TEMPORARY: &str = "tmp";

/// The cache: one file for each component and engine, `HASH-ENGINE.cwasm`. The hash is that of the component where the operator brings
/// it, and one of the component and the user where a user does. A file is the code followed by its BLAKE3 hash with the one of its
/// name as the key, so that a file cut short, rotten or under another component's or user's name is not run.
#[derive(Debug)]
pub(crate) struct CodeCache {
    dir: PathBuf,
    engine: String,
    limits: CacheLimits,
    n_temporary: AtomicU64,
}

/// How much a cache holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheLimits {
    /// All files.
    pub(crate) n_bytes: u64,
    /// The code of one component.
    pub(crate) n_code_bytes: u64,
}

impl CodeCache {
    /// Opens the folder, which is made if need be.
    pub(crate) fn open(
        dir: &Path,
        engine: &wasmtime::Engine,
        limits: CacheLimits,
    ) -> Result<Self, GuestError> {
        make_private(dir)?;
        let mut fingerprint = Fingerprint(blake3::Hasher::new());
        engine.precompile_compatibility_hash().hash(&mut fingerprint);
        let engine = fingerprint.0.finalize().to_hex()[..16].to_owned();
        let cache = Self { dir: dir.to_owned(), engine, limits, n_temporary: AtomicU64::new(0) };
        for (path, ..) in cache.files(TEMPORARY) {
            // Left behind by a daemon that was killed; one that is being written now is written again.
            let _ = fs::remove_file(path);
        }
        Ok(cache)
    }

    fn path(&self, hash: &blake3::Hash) -> PathBuf {
        self.dir.join(format!("{hash}-{}.{EXTENSION}", self.engine))
    }

    /// The code of a component, if it is there and whole. What has its name and is something else is removed.
    pub(crate) fn load(&self, hash: &blake3::Hash) -> Option<Vec<u8>> {
        let path = self.path(hash);
        // What cannot be opened, such as a link, is replaced by the next file that is stored.
        let file = open(&path).ok()?;
        let code = self.read(&file, hash);
        match code {
            // The time of use orders the eviction; without it the time of writing does.
            Some(_) => drop(file.set_modified(SystemTime::now())),
            None => discard(&path),
        }
        code
    }

    fn read(&self, file: &fs::File, hash: &blake3::Hash) -> Option<Vec<u8>> {
        let n_bytes_max = self.limits.n_code_bytes + blake3::OUT_LEN as u64;
        let metadata = file.metadata().ok()?;
        if !metadata.is_file() || metadata.len() > n_bytes_max {
            return None;
        }
        let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).ok()?);
        file.take(n_bytes_max).read_to_end(&mut bytes).ok()?;
        let n_code = bytes.len().checked_sub(blake3::OUT_LEN)?;
        let is_whole = seal(hash, &bytes[..n_code]).as_bytes() == &bytes[n_code..];
        bytes.truncate(n_code);
        is_whole.then_some(bytes)
    }

    /// Keeps the code of a component, and makes room for it.
    pub(crate) fn store(&self, hash: &blake3::Hash, code: &[u8]) -> Result<(), GuestError> {
        self.store_by(hash, code, write_whole)
    }

    fn store_by(
        &self,
        hash: &blake3::Hash,
        code: &[u8],
        write: impl Fn(&Path, &[&[u8]]) -> io::Result<()>,
    ) -> Result<(), GuestError> {
        let n_temporary = self.n_temporary.fetch_add(1, Ordering::Relaxed);
        let temporary = self.dir.join(format!("{hash}-{}-{n_temporary}.{TEMPORARY}", std::process::id()));
        let seal = seal(hash, code);
        let put = || {
            let written = write(&temporary, &[code, seal.as_bytes()]);
            written.and_then(|()| replace(&temporary, &self.path(hash))).inspect_err(|_| {
                let _ = fs::remove_file(&temporary);
            })
        };
        let mut stored = put();
        if stored.as_ref().is_err_and(is_full) {
            self.give_up(code.len() as u64 + blake3::OUT_LEN as u64);
            stored = put();
        }
        stored.map_err(|error| GuestError::Cache { path: temporary, reason: error.to_string() })?;
        let n_bytes: u64 = self.files(EXTENSION).map(|(_, n_bytes, _)| n_bytes).sum();
        self.give_up(n_bytes.saturating_sub(self.limits.n_bytes));
        Ok(())
    }

    /// Removes the files that were used least recently, so many that these bytes come free.
    fn give_up(&self, n_bytes: u64) {
        let mut files: Vec<_> = self.files(EXTENSION).collect();
        files.sort_by_key(|&(_, _, used)| used);
        let mut n_freed = 0;
        for (path, n, _) in files {
            if n_freed >= n_bytes {
                return;
            }
            if fs::remove_file(path).is_ok() {
                n_freed += n;
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

/// What shows that this is the code of that component, and all of it.
fn seal(component: &blake3::Hash, code: &[u8]) -> blake3::Hash {
    blake3::keyed_hash(component.as_bytes(), code)
}

/// Makes the folder and checks that it is this user's alone: what lies in it is run without further checks.
pub(crate) fn make_private(dir: &Path) -> Result<(), GuestError> {
    let own = rustix::process::geteuid().as_raw();
    check_private(dir, own)?;
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir).map_err(|error| refused(dir, error.to_string()))?;
    is_private(dir, own)
}

/// As [`make_private`] for a daemon of this user, and makes nothing: of a folder that is not there it says whether it could be made, as
/// far as that is known of a user who is another than this process's.
pub(crate) fn check_private(dir: &Path, uid: u32) -> Result<(), GuestError> {
    match fs::symlink_metadata(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        _ => return is_private(dir, uid),
    }
    let refuse = |error: io::Error| refused(dir, error.to_string());
    let above = dir.ancestors().skip(1);
    let above = above.map(|path| if path.as_os_str().is_empty() { Path::new(".") } else { path });
    // The first that is there is where the others would be made.
    for path in above {
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refuse(error)),
            Ok(metadata) if !metadata.is_dir() => return Err(refuse(rustix::io::Errno::NOTDIR.into())),
            Ok(_) if uid != rustix::process::geteuid().as_raw() => return Ok(()),
            Ok(_) => {
                let wanted = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
                return rustix::fs::access(path, wanted).map_err(|error| refuse(error.into()));
            }
        }
    }
    Ok(())
}

fn refused(dir: &Path, reason: String) -> GuestError {
    GuestError::Cache { path: dir.to_owned(), reason }
}

/// Says whether a folder that is there is this user's alone.
fn is_private(dir: &Path, user: u32) -> Result<(), GuestError> {
    let metadata = fs::symlink_metadata(dir).map_err(|error| refused(dir, error.to_string()))?;
    if !metadata.is_dir() {
        return Err(refused(dir, "not a folder".to_owned()));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let owner = metadata.uid();
        if owner != user {
            let reason = format!("belongs to user {owner}, not to user {user} who runs the daemon");
            return Err(refused(dir, reason));
        }
        let mode = metadata.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(refused(dir, format!("has mode {mode:03o}: others can reach it; make it 700")));
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
    use std::time::Duration;

    use super::super::runtime::compiling_engine;
    use super::*;

    /// What makes a file useless.
    type Spoil = fn(&mut Vec<u8>);

    /// Puts something strange where a file should be.
    type Put<'a> = dyn Fn(&Path) + 'a;

    /// The cache and its folder, which goes with what is returned.
    fn cache(n_bytes: u64) -> (CodeCache, tempfile::TempDir) {
        let dir = tempfile::tempdir().expect("a folder");
        let engine = compiling_engine().expect("an engine");
        let limits = CacheLimits { n_bytes, n_code_bytes: 1 << 10 };
        let cache = CodeCache::open(&dir.path().join("code"), &engine, limits).expect("a cache");
        (cache, dir)
    }

    fn hash(name: &str) -> blake3::Hash {
        blake3::hash(name.as_bytes())
    }

    /// Says when a component was used last.
    fn date(cache: &CodeCache, hash: &blake3::Hash, used_s: u64) {
        let file = fs::File::options().append(true).open(cache.path(hash)).expect("a file");
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(used_s)).expect("dated");
    }

    #[test]
    fn what_is_stored_is_loaded_unless_it_is_broken() {
        let (cache, _dir) = cache(1 << 20);
        let hash = hash("component");
        let path = cache.path(&hash);
        assert!(cache.load(&hash).is_none());
        let spoil: [(&str, Spoil); 6] = [
            ("a flipped bit of the code", |bytes| bytes[0] ^= 1),
            ("a flipped bit of the seal", |bytes| *bytes.last_mut().expect("some") ^= 128),
            ("cut short", |bytes| bytes.truncate(bytes.len() - 1)),
            ("shorter than a seal", |bytes| bytes.truncate(7)),
            ("empty", Vec::clear),
            ("larger than any code", |bytes| bytes.resize(2 << 10, 0)),
        ];
        for (what, spoil) in spoil {
            cache.store(&hash, b"code").expect("stored");
            assert_eq!(cache.load(&hash).expect("there"), b"code");
            let mut bytes = fs::read(&path).expect("a file");
            spoil(&mut bytes);
            fs::write(&path, &bytes).expect("written");
            assert!(cache.load(&hash).is_none(), "{what}");
            assert!(!path.exists(), "{what}: a broken file is removed");
        }
    }

    #[test]
    fn the_code_of_another_component_is_not_loaded() {
        let (cache, _dir) = cache(1 << 20);
        let [ours, other] = ["ours", "another"].map(hash);
        cache.store(&other, b"what another component does").expect("stored");
        fs::copy(cache.path(&other), cache.path(&ours)).expect("copied");
        assert!(cache.load(&ours).is_none());
        assert!(cache.load(&other).is_some());
        cache.store(&ours, b"what ours does").expect("stored");
        assert_eq!(cache.load(&ours).expect("there"), b"what ours does");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_no_file_holds_nobody_up_and_is_replaced() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};

        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let (cache, dir) = cache(1 << 20);
        let hash = hash("component");
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir(&elsewhere).expect("made");
        fs::write(elsewhere.join("precious"), "precious").expect("written");
        let put: [(&str, &Put<'_>); 9] = [
            ("a pipe", &|path| mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).expect("made")),
            ("a socket", &|path| mknodat(CWD, path, FileType::Socket, Mode::RWXU, 0).expect("made")),
            ("a folder", &|path| fs::create_dir(path).expect("made")),
            ("a folder that holds something", &|path| {
                fs::create_dir_all(path.join("a/b")).expect("made");
                symlink(&elsewhere, path.join("a/link")).expect("made");
            }),
            ("a link to a file", &|path| symlink(elsewhere.join("precious"), path).expect("made")),
            ("a link to a folder", &|path| symlink(&elsewhere, path).expect("made")),
            ("a link to nothing", &|path| symlink("nowhere", path).expect("made")),
            ("a link to a file without end", &|path| symlink("/dev/zero", path).expect("made")),
            ("a file of mode 0", &|path| {
                fs::write(path, "something").expect("written");
                fs::set_permissions(path, fs::Permissions::from_mode(0o0)).expect("set");
            }),
        ];
        for (what, put) in put {
            let path = cache.path(&hash);
            put(&path);
            assert!(cache.load(&hash).is_none(), "{what}");
            // Also where nobody asked for the component before it was compiled.
            discard(&path);
            put(&path);
            cache.store(&hash, b"code").unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(cache.load(&hash).as_deref(), Some(&b"code"[..]), "{what}");
            fs::remove_file(&path).expect("a file");
        }
        assert_eq!(fs::read(elsewhere.join("precious")).expect("there"), b"precious");
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let (cache, _dir) = cache(300);
        let hashes = ["a", "b", "c"].map(hash);
        for (hash, used_s) in hashes[..2].iter().zip([2_000, 1_000]) {
            cache.store(hash, &[0; 100]).expect("stored");
            date(&cache, hash, used_s);
        }
        cache.store(&hashes[2], &[0; 100]).expect("stored");
        let there: Vec<_> = hashes.iter().map(|hash| cache.path(hash).exists()).collect();
        assert_eq!(there, [true, false, true]);
    }

    /// Writes as to a disk with room for three files of 100 bytes and their seals.
    fn write_to_a_small_disk(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        write_whole(path, parts)?;
        let files = fs::read_dir(path.parent().expect("a folder")).expect("a folder");
        let n_bytes: u64 = files.map(|file| file.expect("a file").metadata().expect("a file").len()).sum();
        match n_bytes > 3 * (100 + 32) {
            true => Err(io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error())),
            false => Ok(()),
        }
    }

    #[test]
    fn on_a_full_disk_the_least_recently_used_make_room() {
        let (cache, _dir) = cache(1 << 20);
        let hashes = ["a", "b", "c", "d", "e"].map(hash);
        let store = |hash, n_bytes: usize| cache.store_by(hash, &vec![7; n_bytes], write_to_a_small_disk);
        for (hash, used_s) in hashes[..3].iter().zip([2_000, 1_000, 3_000]) {
            store(hash, 100).expect("there is room");
            date(&cache, hash, used_s);
        }
        let there = || hashes.each_ref().map(|hash| cache.path(hash).exists());
        store(&hashes[3], 100).expect("room was made");
        assert_eq!(there(), [true, false, true, true, false]);
        store(&hashes[4], 200).expect("of two");
        assert_eq!(there(), [false, false, false, true, true]);
        assert_eq!(cache.load(&hashes[4]).expect("there"), [7; 200]);
        // What does not fit on it at all is an error, and leaves nothing half written.
        let error = store(&hashes[0], 1_000).expect_err("too large");
        assert!(error.to_string().contains("No space left"), "{error}");
        assert_eq!(cache.files(TEMPORARY).count(), 0);
        store(&hashes[0], 100).expect("it goes on");
        assert!(is_full(&io::Error::from_raw_os_error(rustix::io::Errno::DQUOT.raw_os_error())));
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_is_looked_at_in_the_same_words_as_it_is_made_and_is_not_made() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        let own = rustix::process::geteuid().as_raw();
        check_private(&at("far/away"), own).expect("it could be made");
        assert!(!at("far").exists());
        fs::write(at("file"), "").expect("written");
        fs::create_dir(at("open")).expect("made");
        fs::set_permissions(at("open"), fs::Permissions::from_mode(0o755)).expect("it is ours");
        for (path, reason) in
            [("file", "not a folder"), ("file/cache", "Not a directory"), ("open", "has mode 755")]
        {
            let said = check_private(&at(path), own).expect_err(path).to_string();
            assert!(said.contains(reason), "{said}");
            assert_eq!(make_private(&at(path)).expect_err(path).to_string(), said);
        }
        make_private(&at("own")).expect("it can be made");
        check_private(&at("own"), own).expect("it is this user's alone");
        let other = check_private(&at("own"), own + 1).expect_err("it is not the other's").to_string();
        assert!(other.contains(&format!("not to user {} who runs the daemon", own + 1)), "{other}");
    }

    #[test]
    fn a_folder_that_others_can_reach_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("code");
        fs::create_dir(&path).expect("made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).expect("set");
        let engine = compiling_engine().expect("an engine");
        let limits = CacheLimits { n_bytes: 1 << 20, n_code_bytes: 1 << 10 };
        let error = CodeCache::open(&path, &engine, limits).expect_err("refused");
        assert!(error.to_string().contains("mode 750"), "{error}");
    }
}
