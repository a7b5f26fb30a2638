//! A folder of content by its digest: `blobs/sha256/…` of an OCI image layout, as the cache has it too. Whoever made the folder may
//! have put anything into it: no link is followed, and what is read is what its digest says.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::digest::Digest;
use super::error::OciError;
use crate::files;

/// Where content lies in a layout.
const PLACE: [&str; 2] = ["blobs", "sha256"];

/// What files begin with that are being written.
pub(super) const BEGUN: &str = ".trellis-";

/// Content by its digest.
#[derive(Clone, Debug)]
pub(super) struct Blobs {
    root: PathBuf,
}

impl Blobs {
    pub(super) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Where all of it lies.
    pub(super) fn folder(&self) -> PathBuf {
        PLACE.iter().fold(self.root.clone(), |path, name| path.join(name))
    }

    /// Where content lies, or would.
    pub(super) fn path(&self, digest: &Digest) -> PathBuf {
        self.folder().join(digest.hex())
    }

    /// Some content of this length, whose digest is worked out anew.
    ///
    /// # Errors
    /// It is not there, is no plain file, is longer or shorter, or has another digest.
    pub(super) fn read(&self, what: &str, digest: &Digest, said_bytes: u64) -> Result<Vec<u8>, OciError> {
        let bytes = self.read_any(what, digest, said_bytes)?;
        let n_bytes = bytes.len() as u64;
        if n_bytes != said_bytes {
            return Err(OciError::Length { what: what.to_owned(), n_bytes, said_bytes });
        }
        Ok(bytes)
    }

    /// As [`Self::read`], of any length up to a limit.
    ///
    /// # Errors
    /// As there.
    pub(super) fn read_any(
        &self,
        what: &str,
        digest: &Digest,
        limit_bytes: u64,
    ) -> Result<Vec<u8>, OciError> {
        self.refuse_links()?;
        let path = self.path(digest);
        let bytes = read_plain(&path, what, limit_bytes)?;
        let actual = Digest::of(&bytes);
        if actual != *digest {
            let what = format!("{what} in {}", path.display());
            return Err(OciError::Digest { what, expected: *digest, actual });
        }
        Ok(bytes)
    }

    /// Puts content there, whole or not at all. What is there under its name is replaced, so that the folder is right afterwards,
    /// whatever was in it.
    ///
    /// # Errors
    /// It cannot be written, or a link is in the way.
    pub(super) fn write(&self, digest: &Digest, content: &[u8]) -> Result<(), OciError> {
        let path = self.path(digest);
        let folder = path.parent().expect("it has two folders above it");
        let doing = || OciError::io(format!("write {}", path.display()));
        // Before, so that no folder is made behind a link; and after, as another program may have put one there.
        self.refuse_links()?;
        fs::create_dir_all(folder).map_err(doing())?;
        self.refuse_links()?;
        write_whole(&path, content).map_err(doing())
    }

    /// A folder within that is a link would have content come from, or go, anywhere.
    ///
    /// # Errors
    /// There is one.
    pub(super) fn refuse_links(&self) -> Result<(), OciError> {
        let mut path = self.root.clone();
        for name in PLACE {
            path.push(name);
            match fs::symlink_metadata(&path) {
                Ok(found) if !found.is_dir() => return Err(OciError::NotPlain { path }),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Reads a plain file up to a limit.
///
/// # Errors
/// It is none, or larger.
pub(super) fn read_plain(path: &Path, what: &str, limit_bytes: u64) -> Result<Vec<u8>, OciError> {
    let doing = || OciError::io(format!("read {}", path.display()));
    let not_plain = || OciError::NotPlain { path: path.to_owned() };
    let file = match files::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(OciError::NotFound(format!("{what}, {},", path.display())));
        }
        Err(_) if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) => return Err(not_plain()),
        Err(error) => return Err(doing()(error)),
    };
    let found = file.metadata().map_err(doing())?;
    if !found.is_file() {
        return Err(not_plain());
    }
    if found.len() > limit_bytes {
        return Err(OciError::TooLarge { what: what.to_owned(), n_bytes: found.len(), limit_bytes });
    }
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    file.take(limit_bytes + 1).read_to_end(&mut bytes).map_err(doing())?;
    if bytes.len() as u64 > limit_bytes {
        return Err(OciError::Endless { what: what.to_owned(), limit_bytes });
    }
    Ok(bytes)
}

/// Writes a file beside its place and moves it there once it is on the disk: who is interrupted leaves nothing half written, and a
/// link in the place is replaced, not followed.
pub(in crate::cli) fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(BEGUN).tempfile_in(folder)?;
    io::Write::write_all(&mut file, content)?;
    readable(file.as_file())?;
    file.as_file().sync_data()?;
    file.persist(path).map_err(|error| error.error)?;
    files::sync_folder(folder)
}

/// For all who may come to its folder: it is there to be shared.
#[cfg(unix)]
fn readable(file: &File) -> io::Result<()> {
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
}

#[cfg(not(unix))]
fn readable(_: &File) -> io::Result<()> {
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn blobs() -> (tempfile::TempDir, Blobs, Digest) {
        let folder = tempfile::tempdir().expect("a folder");
        let blobs = Blobs::new(folder.path());
        let digest = Digest::of(b"content");
        blobs.write(&digest, b"content").expect("written");
        (folder, blobs, digest)
    }

    #[test]
    fn what_is_read_is_what_its_digest_says() {
        let (_folder, blobs, digest) = blobs();
        assert_eq!(blobs.read("it", &digest, 7).expect("it is whole"), b"content");
        assert!(matches!(blobs.read("it", &digest, 6), Err(OciError::TooLarge { .. })));
        assert!(matches!(
            blobs.read("it", &digest, 8),
            Err(OciError::Length { n_bytes: 7, said_bytes: 8, .. })
        ));
        fs::write(blobs.path(&digest), "changed").expect("written");
        let Err(OciError::Digest { expected, actual, .. }) = blobs.read("it", &digest, 7) else {
            panic!("it was changed")
        };
        assert_eq!((expected, actual), (digest, Digest::of(b"changed")));
        blobs.write(&digest, b"content").expect("written over");
        assert_eq!(blobs.read("it", &digest, 7).expect("it is whole again"), b"content");
        assert!(matches!(blobs.read("it", &Digest::of(b"x"), 7), Err(OciError::NotFound(_))));
    }

    #[test]
    fn no_link_is_followed() {
        let (folder, blobs, digest) = blobs();
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, "content").expect("written");
        let place = blobs.path(&digest);
        fs::remove_file(&place).expect("it was there");
        symlink(&elsewhere, &place).expect("made");
        assert!(matches!(blobs.read("it", &digest, 7), Err(OciError::NotPlain { .. })));
        blobs.write(&digest, b"content").expect("in the place of the link");
        assert!(!fs::symlink_metadata(&place).expect("it is there").is_symlink());

        let other = tempfile::tempdir().expect("a folder");
        symlink(folder.path().join("blobs"), other.path().join("blobs")).expect("made");
        let linked = Blobs::new(other.path());
        assert!(matches!(linked.read("it", &digest, 7), Err(OciError::NotPlain { .. })));
        assert!(matches!(linked.write(&digest, b"content"), Err(OciError::NotPlain { .. })));
        let (victim, evil) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        symlink(victim.path(), evil.path().join("blobs")).expect("made");
        assert!(matches!(Blobs::new(evil.path()).write(&digest, b"content"), Err(OciError::NotPlain { .. })));
        assert_eq!(fs::read_dir(victim.path()).expect("it can be read").count(), 0);
        fs::remove_file(&place).expect("it was there");
        fs::create_dir(&place).expect("made");
        assert!(matches!(blobs.read("it", &digest, 7), Err(OciError::NotPlain { .. })));
    }

    #[test]
    fn nothing_is_left_beside_what_was_written() {
        let (folder, blobs, digest) = blobs();
        let place = blobs.path(&digest);
        let names = fs::read_dir(place.parent().expect("a folder")).expect("it can be read");
        assert_eq!(names.count(), 1);
        fs::remove_file(&place).expect("it was there");
        fs::create_dir_all(place.join("x")).expect("made");
        assert!(blobs.write(&digest, b"content").is_err(), "{}", folder.path().display());
        let names = fs::read_dir(place.parent().expect("a folder")).expect("it can be read");
        assert_eq!(names.count(), 1);
    }
}
