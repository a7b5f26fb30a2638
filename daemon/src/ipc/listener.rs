use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use interprocess::local_socket::traits::Listener as _;
use interprocess::local_socket::{GenericFilePath, ListenerNonblockingMode, ListenerOptions, ToFsName};
use interprocess::os::unix::local_socket::ListenerOptionsExt;
use interprocess::os::unix::uds_local_socket as uds;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use trellis_client::lock;

use super::accepted::Accepted;
use super::lock::{Lock, LockError, StartNote};
use crate::session::{Actor, SessionError};

/// Bytes of a socket's path: `sun_path` of Linux, less the final zero.
const PATH_BYTES_MAX: usize = 107;
const SOCKET_MODE: u32 = 0o660;

/// Why a daemon cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another daemon owns the socket.
    #[error("a daemon is already running on {path}{}{}", with_pid(*.pid), without_file(.path), path = .path.display())]
    AlreadyRunning {
        /// The socket.
        path: PathBuf,
        /// Its process, if it has said.
        pid: Option<u32>,
    },
    /// The path is longer than the system allows for a socket.
    #[error("{path} has {n_bytes} bytes, a socket's path at most {limit}", path = .path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        n_bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// The path is relative or has no file name.
    #[error("{path} is not the absolute path of a file", path = .path.display())]
    NoPath {
        /// The path.
        path: PathBuf,
    },
    /// Other users could replace the socket.
    #[error("{path} (owner {uid}, mode {mode:o}) lets other users replace the socket", path = .path.display())]
    OpenDirectory {
        /// The socket's directory.
        path: PathBuf,
        /// Its owner.
        uid: u32,
        /// Its mode.
        mode: u32,
    },
    /// Somebody has put another file in the place of the socket of a daemon that runs.
    #[error("{path} is another file than this daemon has made", path = .path.display())]
    Displaced {
        /// The path.
        path: PathBuf,
    },
    /// Something other than a socket has the socket's name.
    #[error("{path} exists and is not a socket", path = .path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {action} {path}: {source}", path = .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

fn with_pid(pid: Option<u32>) -> String {
    pid.map(|pid| format!(", process {pid}")).unwrap_or_default()
}

/// What to know of a daemon that cannot be reached.
fn without_file(path: &Path) -> &'static str {
    match fs::symlink_metadata(path) {
        Ok(_) => "",
        Err(_) => {
            "; its socket's file was removed: it makes another within seconds, or else `kill` ends that process"
        }
    }
}

/// What a socket's file is known by.
fn id(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

/// What became of a socket's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It is where it was made.
    Kept,
    /// It was gone, and another was made.
    Restored,
}

/// A socket on which connections wait, as the runtime takes it.
#[derive(Debug)]
struct Socket(uds::Listener);

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// A daemon's socket, on which no other daemon can listen as long as this lives. The socket is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: AsyncFd<Socket>,
    path: PathBuf,
    directory_mode: u32,
    /// The socket's file as it was made.
    file: (u64, u64),
    /// None where somebody else made the socket.
    own: Option<OwnFile>,
    lock: Lock,
    /// Who is served; all where there is none.
    users: Option<[u32; 2]>,
}

/// The file of a socket that is a daemon's own. Dropping it removes the file, if it still is that one.
#[derive(Debug)]
struct OwnFile {
    path: PathBuf,
    /// None once the file stays.
    file: Option<(u64, u64)>,
}

impl OwnFile {
    fn at(path: &Path, file: (u64, u64)) -> Self {
        Self { path: path.to_owned(), file: Some(file) }
    }

    /// Leaves the file where it is.
    fn keep(mut self) {
        self.file = None;
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if self.file.is_some() && id(&self.path).ok() == self.file {
            // Where it cannot be removed, the next daemon replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A socket of a daemon that goes on in the program that takes its place.
#[derive(Debug)]
pub(crate) struct HandedSocket {
    /// Where connections wait.
    pub(crate) socket: OwnedFd,
    /// The file of its lock, which is locked.
    pub(crate) lock: OwnedFd,
    /// Device and number of the socket's file.
    pub(crate) file: (u64, u64),
}

impl Listener {
    /// Listens on `path`, with mode 0660. A socket that a dead daemon left there is replaced. The directory is made if it
    /// is missing, with `directory_mode`: 0700 for a user's own daemon, 0755 for one that serves a group.
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// Another daemon is running, the place is not safe, or the system refuses.
    pub fn bind(path: &Path, directory_mode: u32) -> Result<Self, BindError> {
        let (Some(directory), true, true) = (path.parent(), path.file_name().is_some(), path.is_absolute())
        else {
            return Err(BindError::NoPath { path: path.to_owned() });
        };
        let n_bytes = path.as_os_str().as_bytes().len();
        if n_bytes > PATH_BYTES_MAX {
            return Err(BindError::PathTooLong { path: path.to_owned(), n_bytes, limit: PATH_BYTES_MAX });
        }
        prepare_directory(directory, directory_mode)?;
        let lock = take_lock(path)?;
        remove_stale(path)?;
        let (socket, file) = listen(path)?;
        let own = Some(OwnFile::at(path, file));
        Ok(Self { socket, path: path.to_owned(), directory_mode, file, own, lock, users: None })
    }

    /// Listens on a socket that whoever started this process has made, and keeps: connections wait there while no daemon runs, and
    /// its file stays when this is dropped. Where that file is gone, nobody could come any more: the daemon makes a socket of its
    /// own in its place. Needs a tokio runtime.
    ///
    /// # Errors
    /// Another daemon is running, the socket has no path, or the system refuses.
    pub fn adopt(socket: UnixListener, directory_mode: u32) -> Result<Self, BindError> {
        let address = socket.local_addr().ok();
        let path = address.and_then(|address| address.as_pathname().map(Path::to_owned)).unwrap_or_default();
        if !path.is_absolute() {
            return Err(BindError::NoPath { path });
        }
        let io = |action, source| BindError::Io { action, path: path.clone(), source };
        let file = match id(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                tracing::warn!(
                    path = %path.display(),
                    "the file of the socket that was handed over is gone: the daemon makes its own; to have the \
                     service manager's again, restart its socket unit"
                );
                return Self::bind(&path, directory_mode);
            }
            Err(error) => return Err(io("look at", error)),
        };
        let lock = take_lock(&path)?;
        let socket = taken_over(socket.into()).map_err(|error| io("listen on", error))?;
        Ok(Self { socket, path, directory_mode, file, own: None, lock, users: None })
    }

    /// Goes on listening where the program before this one in the same process did: connections have waited there meanwhile. The
    /// socket's file and its lock are this daemon's own, as they were that one's. Needs a tokio runtime.
    ///
    /// # Errors
    /// The socket has no path, the lock is not that of this process, or the system refuses.
    pub(crate) fn inherit(
        handed: HandedSocket,
        directory_mode: impl FnOnce(&Path) -> u32,
    ) -> Result<Self, BindError> {
        let HandedSocket { socket, lock, file } = handed;
        let socket = UnixListener::from(socket);
        let address = socket.local_addr().ok();
        let path = address.and_then(|address| address.as_pathname().map(Path::to_owned)).unwrap_or_default();
        if !path.is_absolute() {
            return Err(BindError::NoPath { path });
        }
        let directory_mode = directory_mode(&path);
        let own = Some(OwnFile::at(&path, file));
        let lock = Lock::inherit(lock.into()).map_err(|error| not_locked(&path, error))?;
        let io = |source| BindError::Io { action: "listen on", path: path.clone(), source };
        let socket = taken_over(socket.into()).map_err(io)?;
        Ok(Self { socket, path, directory_mode, file, own, lock, users: None })
    }

    /// What the program that takes this one's place goes on with: the socket and the lock, and device and number of the socket's file.
    pub(crate) fn to_hand_over(&self) -> (BorrowedFd<'_>, BorrowedFd<'_>, (u64, u64)) {
        (self.socket.get_ref().as_fd(), self.lock.as_fd(), self.file)
    }

    /// Makes the socket's file anew if somebody has removed it, with its folder if need be. Connections that wait at the old
    /// one are lost. One that another daemon has made there meanwhile, because the lock was removed too, is its own.
    ///
    /// # Errors
    /// Another file or another daemon is in its place, or the system refuses.
    pub(super) fn restore(&mut self) -> Result<Place, BindError> {
        let path = self.path.clone();
        match id(&path) {
            Ok(found) if found == self.file => return Ok(Place::Kept),
            Ok(_) => return Err(BindError::Displaced { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(BindError::Io { action: "look at", path, source }),
        }
        prepare_directory(path.parent().expect("as when it was bound"), self.directory_mode)?;
        if !self.lock.is_in_place(&path) {
            self.lock = take_lock(&path)?;
            // One that is restored has started. That it is not said keeps nobody from serving.
            let _ = self.lock.note().and_then(|note| note.say_ready());
        }
        (self.socket, self.file) = listen(&path)?;
        // What is gone may have had the number that the new file has.
        if let Some(gone) = self.own.replace(OwnFile::at(&path, self.file)) {
            gone.keep();
        }
        Ok(Place::Restored)
    }

    /// From now on serves these users alone.
    pub(crate) fn serve_only(&mut self, users: [u32; 2]) {
        self.users = Some(users);
    }

    /// Whether a user is served.
    ///
    /// # Errors
    /// It is not.
    pub(super) fn check_served(&self, actor: Actor) -> Result<(), SessionError> {
        match self.users {
            Some(users) if !users.contains(&actor.uid) => Err(SessionError::NotServed { uid: actor.uid }),
            _ => Ok(()),
        }
    }

    /// Whether somebody else has made the socket, and keeps it.
    pub(super) fn is_lent(&self) -> bool {
        self.own.is_none()
    }

    /// The socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The connection is gone already, or the system is out of something.
    pub async fn accept(&self) -> io::Result<Accepted> {
        let stream = self.socket.async_io(Interest::READABLE, |socket| socket.0.accept()).await?;
        Accepted::new(stream)
    }

    /// Where to say how far the start is, until connections are accepted.
    ///
    /// # Errors
    /// The system refused.
    pub fn start_note(&self) -> io::Result<StartNote> {
        self.lock.note()
    }

    /// Stops listening and removes the socket, if it is this daemon's; the lock is held for as long as what is returned.
    pub(crate) fn close(self) -> Lock {
        self.lock
    }
}

fn take_lock(path: &Path) -> Result<Lock, BindError> {
    Lock::take(path).map_err(|error| not_locked(path, error))
}

fn not_locked(path: &Path, error: LockError) -> BindError {
    match error {
        LockError::Held { pid } => BindError::AlreadyRunning { path: path.to_owned(), pid },
        LockError::Io(source) => BindError::Io { action: "lock", path: lock::path(path), source },
    }
}

/// A socket that this daemon has not made, as it waits on it.
fn taken_over(socket: OwnedFd) -> io::Result<AsyncFd<Socket>> {
    let socket = uds::Listener::from(socket);
    socket.set_nonblocking(ListenerNonblockingMode::Both)?;
    watched(socket)
}

/// A socket at a path where there is nothing, and its file.
fn listen(path: &Path) -> Result<(AsyncFd<Socket>, (u64, u64)), BindError> {
    let io = |action| move |source| BindError::Io { action, path: path.to_owned(), source };
    let name = path.to_fs_name::<GenericFilePath>().map_err(io("name"))?;
    let options =
        ListenerOptions::new().name(name).mode(SOCKET_MODE).nonblocking(ListenerNonblockingMode::Both);
    let mut socket = options.create_sync_as::<uds::Listener>().map_err(io("listen on"))?;
    // An `OwnFile` looks first whether the file is still that one.
    socket.do_not_reclaim_name_on_drop();
    let socket = watched(socket).map_err(io("wait on"))?;
    // The process's umask has been applied to the mode above; until here that was only ever stricter.
    fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE)).map_err(io("set the mode of"))?;
    let file = id(path).map_err(io("look at"))?;
    Ok((socket, file))
}

/// A socket that the runtime waits for.
#[expect(unsafe_code, reason = "the runtime waits for a descriptor")]
fn watched(socket: uds::Listener) -> io::Result<AsyncFd<Socket>> {
    // SAFETY: the listener owns the descriptor that it shows, and shows no other as long as it lives.
    Ok(unsafe { AsyncFd::register_with_interest(Socket(socket), Interest::READABLE) }?)
}

fn prepare_directory(directory: &Path, mode: u32) -> Result<(), BindError> {
    let io = |action| move |source| BindError::Io { action, path: directory.to_owned(), source };
    match DirBuilder::new().mode(mode).create(directory) {
        // The umask may have taken bits away that the mode asks for.
        Ok(()) => {
            fs::set_permissions(directory, Permissions::from_mode(mode)).map_err(io("set the mode of"))?
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(io("create")(error)),
    }
    let metadata = fs::metadata(directory).map_err(io("look at"))?;
    let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    let is_ours = uid == rustix::process::geteuid().as_raw() || uid == 0;
    // In a sticky directory only the owner of a file can replace it.
    let is_closed = mode & 0o022 == 0 || mode & 0o1000 != 0;
    if !is_ours || !is_closed {
        return Err(BindError::OpenDirectory { path: directory.to_owned(), uid, mode });
    }
    Ok(())
}

/// Removes the socket of a daemon that is gone; the caller holds the lock.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let io = |action| move |source| BindError::Io { action, path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io("look at")(error)),
        Ok(metadata) if metadata.file_type().is_socket() => fs::remove_file(path).map_err(io("remove")),
        Ok(_) => Err(BindError::NotASocket { path: path.to_owned() }),
    }
}
