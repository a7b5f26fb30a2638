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

impl Lock {
    /// Takes the lock that belongs to a socket and writes this process's number into it.
    pub(crate) fn take(socket: &Path) -> Result<Self, LockError> {
        let file = OpenOptions::new()
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
            Err(TryLockError::WouldBlock) => return Err(LockError::Held { pid: read_pid(&file) }),
            Err(TryLockError::Error(error)) => return Err(LockError::Io(error)),
        }
        write(&file, "").map_err(LockError::Io)?;
        Ok(Self { file })
    }

    /// A way to say in the lock's file how far the start is, for who is told by nothing else.
    pub(crate) fn note(&self) -> io::Result<StartNote> {
        Ok(StartNote(self.file.try_clone()?))
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

/// Bytes of a lock's file that are read.
const N_BYTES_MAX: u64 = 256;

/// How far the start of a daemon is, said in its lock's file.
#[derive(Debug)]
pub struct StartNote(File);

impl StartNote {
    /// Says it, in a line after the process's number.
    ///
    /// # Errors
    /// The system refused.
    pub fn say(&self, progress: &str) -> io::Result<()> {
        let line: String =
            progress.chars().filter(|c| !c.is_control()).take(N_BYTES_MAX as usize / 8).collect();
        write(&self.0, &line)
    }
}

/// The process that owns a socket and what it last said of its start, as far as this user may know. Whether it is still there its
/// socket says.
#[must_use]
pub fn start_of(socket: &Path) -> Option<(u32, Option<String>)> {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).expect("open flags are ints");
    let file = OpenOptions::new().read(true).custom_flags(flags).open(Lock::path(socket)).ok()?;
    let text = read(&file)?;
    let (pid, progress) = text.split_once('\n').unwrap_or((&text, ""));
    let progress = progress.lines().next().filter(|line| !line.is_empty());
    Some((pid.trim().parse().ok()?, progress.map(str::to_owned)))
}

fn write(mut file: &File, progress: &str) -> io::Result<()> {
    let end = if progress.is_empty() { "" } else { "\n" };
    let text = format!("{}\n{progress}{end}", std::process::id());
    file.rewind()?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

fn read(file: &File) -> Option<String> {
    let mut text = String::new();
    file.take(N_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The owner may not have written it yet.
fn read_pid(file: &File) -> Option<u32> {
    read(file)?.lines().next()?.trim().parse().ok()
}
