//! What is kept of the artifacts that were pulled, by their digests, up to a bound: what was not asked for for the longest goes
//! first, and is fetched again when it is.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::blobs::{BEGUN, Blobs};
use super::digest::Digest;
use super::error::OciError;
use crate::files;

/// Of the daemon's cache folder.
const NAME: &str = "oci";
/// Some thousand guests.
const KEPT_BYTES_MAX: u64 = 1_000_000_000;
/// What is older and was begun is nobody's any more.
const LEFT_BEHIND: Duration = Duration::from_secs(60 * 60);

/// The cache of pulled artifacts.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    blobs: Blobs,
    limit_bytes: u64,
}

/// A file in it.
struct Kept {
    used: SystemTime,
    path: PathBuf,
    n_bytes: u64,
}

impl Cache {
    /// That in a cache folder. Nothing is made yet.
    pub(crate) fn within(folder: &Path) -> Self {
        Self { blobs: Blobs::new(folder.join(NAME)), limit_bytes: KEPT_BYTES_MAX }
    }

    /// The most that is kept.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// What is kept now; nothing where there is no such folder.
    pub(crate) fn n_bytes(&self) -> Option<u64> {
        self.blobs.refuse_links().ok()?;
        self.blobs.folder().is_dir().then(|| self.all().iter().map(|kept| kept.n_bytes).sum())
    }

    /// Where content lies, or would.
    pub(super) fn path(&self, digest: &Digest) -> PathBuf {
        self.blobs.path(digest)
    }

    /// Some content of this length, if it is kept and is still what its digest says.
    pub(super) fn read(&self, digest: &Digest, n_bytes: u64) -> Option<Vec<u8>> {
        let bytes = self.blobs.read("what is kept", digest, n_bytes).ok()?;
        self.is_used(digest);
        Some(bytes)
    }

    /// As [`Self::read`], of any length up to a limit.
    pub(super) fn read_any(&self, digest: &Digest, limit_bytes: u64) -> Option<Vec<u8>> {
        let bytes = self.blobs.read_any("what is kept", digest, limit_bytes).ok()?;
        self.is_used(digest);
        Some(bytes)
    }

    /// Keeps some content.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write(&self, digest: &Digest, content: &[u8]) -> Result<(), OciError> {
        self.blobs.write(digest, content)
    }

    /// Removes what was not asked for for the longest until no more is kept than may be; never what is in use now.
    pub(super) fn trim(&self, in_use: &[Digest]) {
        let mut all = self.all();
        all.sort_by(|one, other| (one.used, &one.path).cmp(&(other.used, &other.path)));
        let in_use: Vec<PathBuf> = in_use.iter().map(|digest| self.path(digest)).collect();
        let mut n_bytes: u64 = all.iter().map(|kept| kept.n_bytes).sum();
        let now = SystemTime::now();
        for Kept { used, path, n_bytes: of_it } in all {
            let is_begun = is_begun(&path);
            let is_left = is_begun && now.duration_since(used).is_ok_and(|age| age > LEFT_BEHIND);
            let is_over = n_bytes > self.limit_bytes && !is_begun && !in_use.contains(&path);
            // Another command may have removed it.
            if (is_left || is_over) && fs::remove_file(&path).is_ok() {
                n_bytes -= of_it;
            }
        }
    }

    /// A file's time of change is when it was asked for last.
    fn is_used(&self, digest: &Digest) {
        if let Ok(file) = files::open(&self.path(digest)) {
            // Without it, the file only goes earlier.
            let _ = file.set_modified(SystemTime::now());
        }
    }

    fn all(&self) -> Vec<Kept> {
        let names = fs::read_dir(self.blobs.folder()).into_iter().flatten().flatten();
        names
            .filter_map(|entry| {
                let found = entry.metadata().ok().filter(fs::Metadata::is_file)?;
                Some(Kept { used: found.modified().ok()?, path: entry.path(), n_bytes: found.len() })
            })
            .collect()
    }
}

/// Whether a file is one that is being written, or was when its command was killed.
fn is_begun(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(BEGUN))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(limit_bytes: u64) -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache { limit_bytes, ..Cache::within(folder.path()) };
        (folder, cache)
    }

    /// Content of ten bytes that was asked for so long ago.
    fn keep(cache: &Cache, byte: u8, seconds_ago: u64) -> Digest {
        let digest = Digest::of(&[byte; 10]);
        cache.write(&digest, &[byte; 10]).expect("written");
        age(&cache.path(&digest), seconds_ago);
        digest
    }

    fn age(path: &Path, seconds_ago: u64) {
        let file = fs::File::options().write(true).open(path).expect("there");
        let then = SystemTime::now() - Duration::from_secs(seconds_ago);
        file.set_modified(then).expect("its owner may");
    }

    #[test]
    fn what_was_not_asked_for_for_the_longest_goes_first() {
        let (_folder, cache) = cache(30);
        assert_eq!(cache.n_bytes(), None);
        let kept: Vec<Digest> = (0..5).map(|idx| keep(&cache, idx, 1000 - u64::from(idx))).collect();
        assert_eq!(cache.n_bytes(), Some(50));
        assert!(cache.read(&kept[0], 10).is_some() && cache.read_any(&kept[1], 100).is_some());
        cache.trim(&[]);
        let is_there: Vec<bool> = kept.iter().map(|digest| cache.path(digest).exists()).collect();
        assert_eq!(is_there, [true, true, false, false, true]);
        assert_eq!(cache.n_bytes(), Some(30));
    }

    #[test]
    fn what_is_in_use_stays_and_what_was_left_behind_goes() {
        let (_folder, cache) = cache(5);
        let (old, new) = (keep(&cache, 1, 1000), keep(&cache, 2, 0));
        let [left, begun] = ["left", "begun"].map(|name| cache.blobs.folder().join(format!("{BEGUN}{name}")));
        fs::write(&left, "x").expect("written");
        fs::write(&begun, "x").expect("written");
        age(&left, 7200);
        cache.trim(&[old]);
        assert!(cache.path(&old).exists() && !cache.path(&new).exists());
        assert!(!left.exists() && begun.exists());
    }
}
