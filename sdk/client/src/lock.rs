//! The lock beside a daemon's socket, as those see it who do not want it: which process has it, and how far that says it is.
//!
//! The kernel lets go of a lock however its daemon ends. Its file stays, and may be read by the daemon's user and root alone: whoever can
//! read a lock can hold it up.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Bytes of a lock's file that are read.
const N_BYTES_MAX: u64 = 1024;

/// The line by which a daemon says that it has started.
pub const READY: &str = "ready";

/// The line by which a daemon says that it comes to its end, and that no program takes its place.
pub const ENDING: &str = "ending";

/// How the line begins by which a daemon says that it comes to its end for another program, which takes its place in its process.
pub const REPLACED: &str = "another program takes its place";

/// How the lock of a socket is found by whoever does not want it.
#[derive(Debug)]
pub enum Seen {
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

/// The daemon that owns a socket, as it says itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its process.
    pub pid: u32,
    /// How far it is.
    pub phase: Phase,
}

/// How far a daemon is that owns a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It starts. What it last said of that, if it has.
    Starting(Option<String>),
    /// It has started.
    Ready,
    /// It takes connections no more and comes to its end. Who waits at the socket waits for another daemon where a service manager keeps
    /// it, and hears then that nobody listens otherwise.
    Ending,
}

/// What the file of a lock says, whether or not the process that wrote it still has the lock.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) is_held: bool,
    pub(crate) owner: Option<Owner>,
    pub(crate) metadata: Metadata,
}

/// The file of the lock that belongs to a socket.
#[must_use]
pub fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

impl Owner {
    /// Whether it takes connections no more, though somebody may have them wait at its socket for who comes after it.
    #[must_use]
    pub fn is_on_its_way_out(&self) -> bool {
        match &self.phase {
            Phase::Ending => true,
            Phase::Starting(Some(said)) => said.starts_with(REPLACED),
            Phase::Starting(None) | Phase::Ready => false,
        }
    }
}

/// Looks at the lock that belongs to a socket, and leaves it as it is.
#[must_use]
pub fn look(socket: &Path) -> Seen {
    let file = match open(socket) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Seen::Absent,
        Err(_) => return Seen::Closed,
    };
    // Beside others that look as well.
    match file.try_lock_shared() {
        Ok(()) => Seen::Free { pid: read_pid(&file) },
        Err(TryLockError::WouldBlock) => Seen::Held { pid: read_pid(&file) },
        Err(TryLockError::Error(_)) => Seen::Closed,
    }
}

/// The daemon that owns a socket, as far as this user may know. Whether it still answers its socket says.
#[must_use]
pub fn owner_of(socket: &Path) -> Option<Owner> {
    // Where nobody has it, what it says is of a process that is gone.
    said(socket).ok().filter(|said| said.is_held)?.owner
}

/// What the file of a lock says.
///
/// # Errors
/// This user may not read it, or there is none.
pub(crate) fn said(socket: &Path) -> io::Result<Said> {
    let file = open(socket)?;
    let is_held = match file.try_lock_shared() {
        Ok(()) => false,
        Err(TryLockError::WouldBlock) => true,
        Err(TryLockError::Error(error)) => return Err(error),
    };
    Ok(Said { is_held, owner: owner(&read(&file)?), metadata: file.metadata()? })
}

fn owner(text: &str) -> Option<Owner> {
    let (pid, progress) = text.split_once('\n').unwrap_or((text, ""));
    let phase = match progress.lines().next().filter(|line| !line.is_empty()) {
        Some(READY) => Phase::Ready,
        Some(ENDING) => Phase::Ending,
        line => Phase::Starting(line.map(str::to_owned)),
    };
    Some(Owner { pid: pid.trim().parse().ok()?, phase })
}

fn open(socket: &Path) -> io::Result<File> {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).expect("open flags are ints");
    OpenOptions::new().read(true).custom_flags(flags).open(path(socket))
}

fn read(file: &File) -> io::Result<String> {
    let mut text = String::new();
    file.take(N_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// The process that has written the file of a lock last; it may not have written it yet.
#[must_use]
pub fn read_pid(file: &File) -> Option<u32> {
    read(file).ok()?.lines().next()?.trim().parse().ok()
}
