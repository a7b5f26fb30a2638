//! Where a daemon was started from: where a newer program is looked for.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf, absolute};

/// How a daemon was started.
#[derive(Clone, Debug)]
pub(crate) struct CommandLine {
    /// The absolute path of its program.
    pub(crate) program: PathBuf,
    /// What follows that.
    pub(crate) arguments: Vec<OsString>,
}

impl CommandLine {
    /// How this process was started.
    ///
    /// # Errors
    /// The system does not say.
    pub(crate) fn own() -> io::Result<Self> {
        let running = std::env::current_exe()?;
        // It may have been replaced already, of which the system says this.
        let there = running.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(PathBuf::from);
        let running = there.filter(|_| !running.exists()).unwrap_or(running);
        let mut words = std::env::args_os();
        let called = words.next().unwrap_or_default();
        let program = place(&called, running, &std::env::var_os("PATH").unwrap_or_default());
        Ok(Self { program, arguments: words.collect() })
    }
}

/// The place by which a running program was called, where that leads to it: a link that leads to another version one day is followed
/// then. Else where it lies.
fn place(called: &OsStr, running: PathBuf, path: &OsStr) -> PathBuf {
    let called = Path::new(called);
    let leads_there = |place: &PathBuf| std::fs::canonicalize(place).is_ok_and(|found| found == running);
    // What is only a name was found in one of these folders.
    let place = if called.components().count() == 1 {
        std::env::split_paths(path).map(|folder| folder.join(called)).find(leads_there)
    } else {
        Some(called.to_owned()).filter(leads_there)
    };
    place.and_then(|place| absolute(place).ok()).unwrap_or(running)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_kept_where_it_leads_to_what_runs() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().canonicalize().expect("it is there");
        let make = |name: &str| {
            let path = folder.join(name);
            std::fs::write(&path, "").expect("written");
            path
        };
        let (old, new) = (make("trellis-1"), make("trellis-2"));
        let bin = folder.join("bin");
        std::fs::create_dir(&bin).expect("made");
        let link = bin.join("trellis");
        std::os::unix::fs::symlink(&old, &link).expect("made");
        let path = std::env::join_paths([&folder, &bin]).expect("no colons");
        let of = |called: &OsStr, running: &Path| place(called, running.to_owned(), &path);
        assert_eq!(of(link.as_os_str(), &old), link);
        assert_eq!(of("trellis".as_ref(), &old), link);
        assert_eq!(of(old.as_os_str(), &old), old);
        // It was called something else, or the link has been changed already.
        assert_eq!(of("trellis".as_ref(), &new), new);
        assert_eq!(of(link.as_os_str(), &new), new);
        assert_eq!(of("-trellis".as_ref(), &old), old);
        assert_eq!(of("".as_ref(), &old), old);
    }
}
