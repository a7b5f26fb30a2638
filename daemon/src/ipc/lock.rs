use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Held for as long as a daemon owns its socket. The kernel lets go of it however the daemon ends, so that a stale
/// socket can be told from one in use; the file itself stays, because removing it would race with the next daemon.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
}

#[derive(Debug)]
pub(crate) enum LockError {
    Held { pid: Option<u32> },
    Io(io::Error),
}

/// How the lock of a socket is found by whoever does not want it.
#[derive(Debug)]
pub(crate) enum Seen {
    /// There is no such file.
    Absent,
    /// No process has it; this one had it last, if it has said.
    Free {
        /// Its process.
        pid: Option<u32>,
    },
    /// A process has it.
    Held {
        /// Which one, if it has said.
        pid: Option<u32>,
    },
    /// It cannot be looked at.
    Closed,
}

impl Lock {
    /// Looks at the lock that belongs to a socket, and leaves it as it is.
    pub(crate) fn look(socket: &Path) -> Seen {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let flags = i32::try_from(flags.bits()).expect("open flags are ints");
        let file = OpenOptions::new().read(true).custom_flags(flags).open(Self::path(socket));
        let mut file = match file {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Seen::Absent,
            Err(_) => return Seen::Closed,
        };
        // Beside others that look as well.
        match file.try_lock_shared() {
            Ok(()) => Seen::Free { pid: read_pid(&mut file) },
            Err(TryLockError::WouldBlock) => Seen::Held { pid: read_pid(&mut file) },
            Err(TryLockError::Error(_)) => Seen::Closed,
        }
    }

    /// Takes the lock that belongs to a socket and writes this process's number into it.
    pub(crate) fn take(socket: &Path) -> Result<Self, LockError> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(i32::try_from(OFlags::NOFOLLOW.bits()).expect("open flags are ints"))
            .open(Self::path(socket))
            .map_err(LockError::Io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LockError::Held { pid: read_pid(&mut file) }),
            Err(TryLockError::Error(error)) => return Err(LockError::Io(error)),
        }
        write_pid(&mut file).map_err(LockError::Io)?;
        Ok(Self { file })
    }

    /// Whether this lock is still the one that another daemon would ask for.
    pub(crate) fn is_in_place(&self, socket: &Path) -> bool {
        let here = self.file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        let there = fs::symlink_metadata(Self::path(socket)).map(|metadata| (metadata.dev(), metadata.ino()));
        matches!((here, there), (Ok(here), Ok(there)) if here == there)
    }

    pub(crate) fn path(socket: &Path) -> PathBuf {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        path.into()
    }
}

fn write_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

/// The owner may not have written it yet.
fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}
