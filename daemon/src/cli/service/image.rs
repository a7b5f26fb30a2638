//! Where the files of a service go: on this machine, or below a folder that is the root of an image.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

/// Links that are followed on the way to one file, as Linux has it.
const N_LINKS_MAX: usize = 40;

/// The machine itself, or an image.
#[derive(Debug)]
pub(super) struct Image {
    root: Option<PathBuf>,
}

impl Image {
    pub(super) fn new(root: Option<PathBuf>) -> Self {
        Self { root }
    }

    /// Whether it is the machine itself.
    pub(super) fn is_machine(&self) -> bool {
        self.root.is_none()
    }

    /// Where this path of the machine lies. In an image links on the way are followed as the machine of the image would: those
    /// that name a path from the root on stay in the image. What the path names may be a link.
    ///
    /// # Errors
    /// Links go round in a circle.
    pub(super) fn at(&self, path: &str) -> io::Result<PathBuf> {
        let Some(root) = &self.root else { return Ok(PathBuf::from(path)) };
        let mut rest: VecDeque<OsString> = parts(Path::new(path)).collect();
        let mut here = PathBuf::new();
        let mut n_links = 0;
        while let Some(part) = rest.pop_front() {
            if part == ".." {
                here.pop();
                continue;
            }
            here.push(part);
            let Some(target) = fs::read_link(root.join(&here)).ok().filter(|_| !rest.is_empty()) else {
                continue;
            };
            n_links += 1;
            if n_links > N_LINKS_MAX {
                return Err(io::Error::other(format!("{path}: links go round in a circle")));
            }
            here.pop();
            if target.is_absolute() {
                here.clear();
            }
            parts(&target).collect::<Vec<_>>().into_iter().rev().for_each(|part| rest.push_front(part));
        }
        Ok(root.join(here))
    }

    /// Whether something has this name.
    ///
    /// # Errors
    /// As of [`Self::at`].
    pub(super) fn has(&self, path: &str) -> io::Result<bool> {
        Ok(fs::symlink_metadata(self.at(path)?).is_ok())
    }

    /// The bytes of a file; none where there is no such file, or a link out of an image.
    ///
    /// # Errors
    /// As of [`Self::at`].
    pub(super) fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        let path = self.at(path)?;
        let is_link = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_symlink());
        Ok(if is_link && !self.is_machine() { None } else { fs::read(path).ok() })
    }

    /// Writes a file as a whole or not at all: a program that runs cannot be written over.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn write(&self, path: &str, bytes: &[u8], mode: u32) -> io::Result<PathBuf> {
        let path = self.at(path)?;
        let folder = path.parent().expect("it is in a folder");
        make_folder(folder)?;
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        let part = folder.join(format!(".{name}.new"));
        // Another's file or link of that name is not to be written through.
        match fs::remove_file(&part) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = fs::File::create_new(&part)?;
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&part, &path).inspect_err(|_| drop(fs::remove_file(&part)))?;
        Ok(path)
    }

    /// Removes a file, or a folder with all that is in it; not what a link names. Nothing where there is none.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn remove(&self, path: &str) -> io::Result<Option<PathBuf>> {
        let path = self.at(path)?;
        let is_folder = match fs::symlink_metadata(&path) {
            Ok(metadata) => metadata.is_dir(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }?;
        Ok(Some(path))
    }
}

fn parts(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_owned()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

/// Makes a folder that everybody may look into, whatever the umask.
fn make_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    folder.parent().map_or(Ok(()), make_folder)?;
    fs::create_dir(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o755))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_of_an_image_lead_nowhere_but_into_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let (root, outside) = (folder.path().join("image"), folder.path().join("outside"));
        fs::create_dir_all(root.join("usr/lib/systemd")).expect("made");
        fs::create_dir_all(root.join("data/etc")).expect("made");
        fs::create_dir(&outside).expect("made");
        fs::write(outside.join("precious"), "kept").expect("written");
        symlink("/usr/lib", root.join("lib")).expect("made");
        symlink(&outside, root.join("opt")).expect("made");
        symlink("data/../../../../data/etc", root.join("etc")).expect("made");
        symlink("b", root.join("a")).expect("made");
        symlink("a", root.join("b")).expect("made");
        let image = Image::new(Some(root.clone()));
        let at = |path: &str| image.at(path).expect("no circle");
        assert_eq!(at("/lib/systemd/x"), root.join("usr/lib/systemd/x"));
        assert_eq!(at("/etc/trellis/trellis.toml"), root.join("data/etc/trellis/trellis.toml"));
        assert_eq!(at("/usr/local/bin/trellis"), root.join("usr/local/bin/trellis"));
        assert!(image.at("/a/x").is_err());

        let inside = at("/opt/precious");
        assert!(inside.starts_with(&root) && !inside.starts_with(&outside), "{inside:?}");
        image.write("/opt/precious", b"new", 0o644).expect("written inside");
        assert_eq!(fs::read(outside.join("precious")).expect("kept"), b"kept");
        assert_eq!(image.read("/opt/precious").expect("no circle").as_deref(), Some(&b"new"[..]));

        // The last part may be a link, which is taken for itself.
        symlink(outside.join("precious"), root.join("data/etc/link")).expect("made");
        assert!(image.has("/etc/link").expect("no circle"));
        assert_eq!(image.read("/etc/link").expect("no circle"), None);
        image.write("/etc/link", b"new", 0o644).expect("in its place");
        assert_eq!(fs::read(outside.join("precious")).expect("kept"), b"kept");
        symlink(&outside, root.join("data/cache")).expect("made");
        assert!(image.remove("/data/cache").expect("removed").is_some());
        assert!(outside.join("precious").exists() && image.remove("/data/cache").expect("gone").is_none());
    }
}
