use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;
use trellis_client::lock::{self, ENDING, READY, REPLACED, read_pid};

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
            .open(lock::path(socket))
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
        // It comes, and does not go: its words begin as no other's.
        write(&file, "in the place of another program").map_err(LockError::Io)?;
        Ok(Self { file })
    }

    /// A way to say in the lock's file how far the start is, for who is told by nothing else.
    pub(crate) fn note(&self) -> io::Result<StartNote> {
        Ok(StartNote(self.file.try_clone()?))
    }

    /// Whether this lock is still the one that another daemon would ask for.
    pub(crate) fn is_in_place(&self, socket: &Path) -> bool {
        let here = self.file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        let there = fs::symlink_metadata(lock::path(socket)).map(|metadata| (metadata.dev(), metadata.ino()));
        matches!((here, there), (Ok(here), Ok(there)) if here == there)
    }

    /// The open file, by which the lock is held for as long as it is open anywhere.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The longest line, of characters of four bytes at most: who reads the first kilobyte of the file reads all of it.
const N_CHARS_MAX: usize = 128;

/// How far the start of a daemon is, said in its lock's file.
#[derive(Debug)]
pub struct StartNote(File);

impl StartNote {
    /// Says it, in a line after the process's number.
    ///
    /// # Errors
    /// The system refused.
    pub fn say(&self, progress: &str) -> io::Result<()> {
        let line: String = progress.chars().filter(|c| !c.is_control()).take(N_CHARS_MAX).collect();
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

    /// Says that this one comes to its end, and no program takes its place in this process.
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

fn write(mut file: &File, progress: &str) -> io::Result<()> {
    let end = if progress.is_empty() { "" } else { "\n" };
    let text = format!("{}\n{progress}{end}", std::process::id());
    file.rewind()?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}
