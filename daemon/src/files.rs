//! Files in folders that only the daemon's user can touch: written whole or not at all, and read whatever has come to lie in their
//! place.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

/// Opens a file and nothing that it links to; a pipe is opened without waiting for its other end.
pub(crate) fn open(path: &Path) -> io::Result<fs::File> {
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

/// Removes whatever has the name of a file; what a link points to stays.
pub(crate) fn discard(path: &Path) {
    if fs::remove_file(path).is_err() {
        let _ = fs::remove_dir_all(path);
    }
}

/// Moves a file to where another, or something else, may be.
pub(crate) fn replace(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
            discard(to);
            fs::rename(from, to)
        }
        renamed => renamed,
    }
}

/// Whether the disk, or what this user may have of it, is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Writes a new file that only its owner can read, and waits until it is on the disk.
pub(crate) fn write_whole(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    for part in parts {
        file.write_all(part)?;
    }
    file.sync_data()
}

/// Waits until the disk knows what is in a folder under which name.
pub(crate) fn sync_folder(dir: &Path) -> io::Result<()> {
    #[cfg(unix)]
    fs::File::open(dir)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}
