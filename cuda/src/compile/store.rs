//! Cubins on disk: a file `HASH.cubin` each, with the hash of what it was made from as its name.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const EXTENSION: &str = "cubin";

/// The extension of a file that is being written.
const PARTIAL: &str = "partial";

/// A file that was begun so long ago is written no more: its process was killed.
const WRITING_TIME_MAX: Duration = Duration::from_secs(600);

/// Bytes of a file that is looked into; a cubin has a few hundred thousand.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// A folder of cubins. It can only save time: what cannot be read or kept is compiled again.
#[derive(Clone, Debug)]
pub(crate) struct Store(PathBuf);

impl Store {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    fn path(&self, key: &blake3::Hash) -> PathBuf {
        self.0.join(format!("{key}.{EXTENSION}"))
    }

    /// What was kept under this key, if all of it is there: the driver takes an image without a length and believes its
    /// header.
    pub(crate) fn read(&self, key: &blake3::Hash) -> Option<Vec<u8>> {
        let mut file = open(&self.path(key)).ok()?;
        let metadata = file.metadata().ok()?;
        if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
            return None;
        }
        let mut cubin = Vec::new();
        file.read_to_end(&mut cubin).ok()?;
        let seal = cubin.split_off(cubin.len().checked_sub(blake3::OUT_LEN)?);
        let is_whole = blake3::keyed_hash(key.as_bytes(), &cubin).as_bytes()[..] == seal[..];
        if is_whole {
            // The time of use says what may be given up first.
            let _ = file.set_modified(SystemTime::now());
        }
        is_whole.then_some(cubin)
    }

    /// Whether something is kept under this key, as far as its name tells.
    pub(crate) fn has(&self, key: &blake3::Hash) -> bool {
        self.path(key).is_file()
    }

    /// Keeps a cubin, written whole or not at all.
    pub(crate) fn keep(&self, key: &blake3::Hash, cubin: &[u8]) {
        if let Err(error) = self.keep_by(key, cubin, write_whole) {
            tracing::warn!(path = %self.path(key).display(), %error, "cannot keep a compiled kernel");
        }
    }

    fn keep_by(
        &self,
        key: &blake3::Hash,
        cubin: &[u8],
        write: impl Fn(&Path, [&[u8]; 2]) -> io::Result<()>,
    ) -> io::Result<()> {
        fs::create_dir_all(&self.0)?;
        self.forget_partial();
        let path = self.path(key);
        let partial = path.with_extension(format!("{}.{PARTIAL}", std::process::id()));
        let seal = blake3::keyed_hash(key.as_bytes(), cubin);
        let put = || {
            let written =
                write(&partial, [cubin, seal.as_bytes()]).and_then(|()| fs::rename(&partial, &path));
            written.inspect_err(|_| {
                let _ = fs::remove_file(&partial);
            })
        };
        match put() {
            Err(error) if is_full(&error) => {
                self.give_up(cubin.len() as u64 + blake3::OUT_LEN as u64);
                put()
            }
            kept => kept,
        }
    }

    /// Files with this extension: when each was used last, its path, and its bytes.
    fn files(&self, extension: &str) -> impl Iterator<Item = (SystemTime, PathBuf, u64)> {
        fs::read_dir(&self.0).into_iter().flatten().flatten().filter_map(move |entry| {
            let (path, metadata) = (entry.path(), entry.metadata().ok()?);
            let is_ours = metadata.is_file() && path.extension().is_some_and(|e| e == extension);
            is_ours.then(|| (metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), path, metadata.len()))
        })
    }

    /// Removes what processes that were killed had begun to write. Others may write there at the same time.
    fn forget_partial(&self) {
        let now = SystemTime::now();
        for (written, path, _) in self.files(PARTIAL) {
            if now.duration_since(written).is_ok_and(|age| age > WRITING_TIME_MAX) {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Removes the cubins that were used least recently, so many that these bytes come free.
    fn give_up(&self, n_bytes: u64) {
        let mut files: Vec<_> = self.files(EXTENSION).collect();
        files.sort();
        let mut n_freed = 0;
        for (_, path, n) in files {
            if n_freed >= n_bytes {
                return;
            }
            if fs::remove_file(path).is_ok() {
                n_freed += n;
            }
        }
    }
}

/// Opens a file and nothing that it links to; a pipe is opened without waiting for its other end.
fn open(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        let flags = i32::try_from((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits()).expect("open flags are ints");
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags);
    }
    options.open(path)
}

/// Whether the disk, or what this user may have of it, is full.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn write_whole(path: &Path, parts: [&[u8]; 2]) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    parts.into_iter().try_for_each(|part| file.write_all(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (Store, tempfile::TempDir) {
        let dir = tempfile::tempdir().expect("a folder");
        (Store::new(dir.path().join("kernels")), dir)
    }

    fn key(name: &str) -> blake3::Hash {
        blake3::hash(name.as_bytes())
    }

    #[test]
    fn what_is_kept_is_read_unless_it_is_broken_or_another_kernels() {
        let (store, _dir) = store();
        let [ours, other] = ["ours", "another"].map(key);
        assert!(store.read(&ours).is_none());
        for name in [&ours, &other] {
            assert!(!store.has(name));
            store.keep(name, b"cubin");
            assert!(store.has(name));
            assert_eq!(store.read(name).as_deref(), Some(&b"cubin"[..]));
        }
        fs::copy(store.path(&other), store.path(&ours)).expect("copied");
        assert!(store.read(&ours).is_none(), "another kernel's");
        let whole = fs::read(store.path(&other)).expect("a file");
        for n_bytes in 0..whole.len() {
            fs::write(store.path(&other), &whole[..n_bytes]).expect("written");
            assert!(store.read(&other).is_none(), "{n_bytes} bytes of it");
        }
        store.keep(&other, b"cubin");
        assert!(store.read(&other).is_some());
        let file = fs::File::create(store.path(&other)).expect("opened");
        file.set_len(1 << 40).expect("a file with a hole");
        assert!(store.read(&other).is_none(), "a huge one");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_pipe_or_a_link_holds_nobody_up() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let (store, dir) = store();
        let key = key("kernel");
        store.keep(&key, b"cubin");
        let elsewhere = dir.path().join("elsewhere");
        fs::rename(store.path(&key), &elsewhere).expect("moved");
        std::os::unix::fs::symlink(&elsewhere, store.path(&key)).expect("made");
        assert!(store.read(&key).is_none(), "a link");
        fs::remove_file(store.path(&key)).expect("removed");
        mknodat(CWD, store.path(&key), FileType::Fifo, Mode::RWXU, 0).expect("made");
        assert!(store.read(&key).is_none(), "a pipe");
        store.keep(&key, b"cubin");
        assert!(store.read(&key).is_some());
    }

    #[test]
    fn what_a_killed_process_had_begun_does_not_stay() {
        let (store, _dir) = store();
        store.keep(&key("a"), b"cubin");
        let now = SystemTime::now();
        let [old, new] = [2 * WRITING_TIME_MAX, Duration::ZERO].map(|age| {
            let path = store.path(&key("b")).with_extension(format!("{}.{PARTIAL}", age.as_secs()));
            let file = fs::File::create(&path).expect("made");
            file.set_modified(now - age).expect("dated");
            path
        });
        store.keep(&key("c"), b"cubin");
        assert!(!old.exists() && new.exists());
        assert!(store.read(&key("a")).is_some() && store.read(&key("c")).is_some());
    }

    #[test]
    fn on_a_full_disk_the_least_recently_used_make_room() {
        let (store, _dir) = store();
        // A disk with room for two of them.
        let write = |path: &Path, parts: [&[u8]; 2]| {
            write_whole(path, parts)?;
            let n_files = fs::read_dir(path.parent().expect("a folder")).expect("a folder").count();
            if n_files > 2 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        };
        let keys = ["a", "b", "c"].map(key);
        for (key, used_s) in keys[..2].iter().zip([2_000, 1_000]) {
            store.keep_by(key, b"cubin", write).expect("there is room");
            let file = fs::File::options().append(true).open(store.path(key)).expect("a file");
            let used = SystemTime::UNIX_EPOCH + Duration::from_secs(used_s);
            file.set_modified(used).expect("dated");
        }
        store.keep_by(&keys[2], b"cubin", write).expect("room was made");
        let there: Vec<_> = keys.iter().map(|key| store.read(key).is_some()).collect();
        assert_eq!(there, [true, false, true]);
        let full = |_: &Path, _: [&[u8]; 2]| Err(io::ErrorKind::StorageFull.into());
        store.keep_by(&keys[1], b"cubin", full).expect_err("full of other things");
    }
}
