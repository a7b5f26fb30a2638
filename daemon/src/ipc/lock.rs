use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// How long whoever looks at a lock has it at most, and how often that is waited for.
const LOOK: Duration = Duration::from_millis(5);
const N_LOOKERS: usize = 4;

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
        let file = match file {
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
        let mut n_left = N_LOOKERS;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                // Somebody may only be looking.
                Err(TryLockError::WouldBlock) if n_left > 0 => {
                    n_left -= 1;
                    std::thread::sleep(LOOK);
                }
                Err(TryLockError::WouldBlock) => return Err(LockError::Held { pid: read_pid(&file) }),
                Err(TryLockError::Error(error)) => return Err(LockError::Io(error)),
            }
        }
        write(&file, "").map_err(LockError::Io)?;
        Ok(Self { file })
    }

    /// The lock that the program before this one in the same process has taken: the kernel knows it by the open file, which is the
    /// same.
    pub(crate) fn inherit(file: File) -> Result<Self, LockError> {
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LockError::Held { pid: read_pid(&file) }),
            Err(TryLockError::Error(error)) => return Err(LockError::Io(error)),
        }
        write(&file, REPLACED).map_err(LockError::Io)?;
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

    /// The open file, by which the lock is held for as long as it is open anywhere.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn path(socket: &Path) -> PathBuf {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        path.into()
    }
}

/// Bytes of a lock's file that are read.
const N_BYTES_MAX: u64 = 256;

/// What a daemon says of itself once it is ready: no line about a load.
const READY: &str = "ready";

/// What it says of itself from when another program is to take its place, and that one until it loads models.
const REPLACED: &str = "another program takes its place";

/// What it says of itself once no program is to take its place any more.
const ENDING: &str = "ending";

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

    /// Says that whoever waits there waits for the next program, and how long at most this one goes on, where that is known.
    ///
    /// # Errors
    /// The system refused.
    pub(crate) fn say_replaced(&self, left: Option<Duration>) -> io::Result<()> {
        match left.map(|left| left.as_secs() + 1) {
            Some(seconds) => self.say(&format!("{REPLACED} in up to {seconds} s")),
            None => self.say(REPLACED),
        }
    }

    /// Says that this one comes to its end, and no other takes its place.
    ///
    /// # Errors
    /// The system refused.
    pub(crate) fn say_ending(&self) -> io::Result<()> {
        write(&self.0, ENDING)
    }

    /// Says that the start is over: whoever gets no answer from then on waits for no load.
    ///
    /// # Errors
    /// The system refused.
    pub fn say_ready(&self) -> io::Result<()> {
        write(&self.0, READY)
    }
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
    /// It takes connections no more and comes to its end, after which nobody listens.
    Ending,
}

/// The daemon that owns a socket, as far as this user may know. Whether it still answers its socket says.
#[must_use]
pub fn owner_of(socket: &Path) -> Option<Owner> {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).expect("open flags are ints");
    let file = OpenOptions::new().read(true).custom_flags(flags).open(Lock::path(socket)).ok()?;
    if file.try_lock_shared().is_ok() {
        // Nobody has it: what it says is of a process that is gone.
        return None;
    }
    let text = read(&file)?;
    let (pid, progress) = text.split_once('\n').unwrap_or((&text, ""));
    let phase = match progress.lines().next().filter(|line| !line.is_empty()) {
        Some(READY) => Phase::Ready,
        Some(ENDING) => Phase::Ending,
        line => Phase::Starting(line.map(str::to_owned)),
    };
    Some(Owner { pid: pid.trim().parse().ok()?, phase })
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
