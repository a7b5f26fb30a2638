//! Where requests come in: a Unix socket or a loopback address.

use std::fs::{self, File, Permissions};
use std::future::Future;
use std::io;
use std::net::TcpListener as StdTcpListener;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::{TcpListener, UnixListener};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::Connection;
use super::front::{Ends, Front};
use crate::config::HttpListen;
use crate::ipc::{HandedSocket, Lock, LockError};
use crate::session::Actor;

/// Those who are in the group of the socket may come, as to the daemon's own.
const SOCKET_MODE: u32 = 0o660;

/// How long to wait where the process has no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Between two complaints of that.
const COMPLAINT_PAUSE: Duration = Duration::from_secs(60);

/// A socket on which requests wait until it is served.
#[derive(Debug)]
pub(crate) struct HttpSocket {
    socket: Socket,
    /// Removed when it is dropped.
    file: Option<OwnFile>,
}

#[derive(Debug)]
enum Socket {
    Unix(UnixListener),
    Loopback(TcpListener),
}

/// What the program that takes this one's place goes on with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeftHttp<'a> {
    pub(crate) socket: BorrowedFd<'a>,
    /// Of a Unix socket, its lock, and device and number of its file.
    pub(crate) file: Option<(BorrowedFd<'a>, (u64, u64))>,
}

/// A socket that the program before this one has left.
#[derive(Debug)]
pub(crate) enum HandedHttp {
    Unix(HandedSocket),
    Loopback(OwnedFd),
}

/// The file of a Unix socket, unless another has its place by now. Its lock keeps other daemons away, as that of the daemon's own
/// socket does.
#[derive(Debug)]
struct OwnFile {
    path: PathBuf,
    id: (u64, u64),
    lock: Lock,
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if id(&self.path).ok() == Some(self.id) {
            // The next daemon replaces one that is left.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

impl HttpSocket {
    /// Listens there. A socket that a daemon left is replaced.
    ///
    /// # Errors
    /// The place is taken, or not to be had; other users could put their own socket there.
    pub(crate) async fn bind(listen: &HttpListen) -> io::Result<Self> {
        match listen {
            HttpListen::Loopback(address) => {
                Ok(Self { socket: Socket::Loopback(TcpListener::bind(address).await?), file: None })
            }
            HttpListen::Unix(path) => {
                check_folder(path)?;
                let lock = Lock::take(path).map_err(not_locked)?;
                remove_left(path)?;
                let socket = UnixListener::bind(path)?;
                let file = Some(OwnFile { path: path.clone(), id: id(path)?, lock });
                fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))?;
                Ok(Self { socket: Socket::Unix(socket), file })
            }
        }
    }

    /// Goes on listening where the program before this one did: connections have waited there meanwhile.
    ///
    /// # Errors
    /// The socket has no path, its lock is not that of this process, or the system refuses.
    pub(crate) fn inherit(handed: HandedHttp) -> io::Result<Self> {
        match handed {
            HandedHttp::Loopback(socket) => {
                let socket = StdTcpListener::from(socket);
                socket.set_nonblocking(true)?;
                Ok(Self { socket: Socket::Loopback(TcpListener::from_std(socket)?), file: None })
            }
            HandedHttp::Unix(HandedSocket { socket, lock, file: id }) => {
                let socket = StdUnixListener::from(socket);
                let address = socket.local_addr()?;
                let path = address.as_pathname().ok_or(io::ErrorKind::InvalidData)?.to_owned();
                let lock = Lock::inherit(File::from(lock)).map_err(not_locked)?;
                let file = Some(OwnFile { path, id, lock });
                socket.set_nonblocking(true)?;
                Ok(Self { socket: Socket::Unix(UnixListener::from_std(socket)?), file })
            }
        }
    }

    /// What the program that takes this one's place goes on with.
    pub(crate) fn to_hand_over(&self) -> LeftHttp<'_> {
        let socket = match &self.socket {
            Socket::Unix(listener) => listener.as_fd(),
            Socket::Loopback(listener) => listener.as_fd(),
        };
        LeftHttp { socket, file: self.file.as_ref().map(|file| (file.lock.as_fd(), file.id)) }
    }

    /// Whether it is where the settings want one, and clients find it there. Port 0 is any.
    pub(crate) fn is_at(&self, told: &HttpListen) -> bool {
        match (&self.socket, &self.file, told) {
            (Socket::Loopback(listener), _, HttpListen::Loopback(told)) => listener
                .local_addr()
                .is_ok_and(|address| *told == address || told.port() == 0 && told.ip() == address.ip()),
            (Socket::Unix(_), Some(file), HttpListen::Unix(told)) => {
                file.path == *told && id(told).is_ok_and(|found| found == file.id)
            }
            _ => false,
        }
    }

    /// Whether whoever asks has to say by a token who it is.
    pub(crate) fn needs_token(&self) -> bool {
        matches!(self.socket, Socket::Loopback(_))
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system does not say.
    pub(crate) fn place(&self) -> io::Result<String> {
        match (&self.socket, &self.file) {
            (Socket::Loopback(listener), _) => Ok(format!("http://{}", listener.local_addr()?)),
            (Socket::Unix(_), file) => {
                Ok(file.as_ref().map(|file| file.path.display().to_string()).unwrap_or_default())
            }
        }
    }

    /// The next connection, and who is there, where the kernel says it.
    async fn accept(&self) -> io::Result<(Connection, Option<Actor>)> {
        match &self.socket {
            Socket::Loopback(listener) => {
                let (stream, _) = listener.accept().await?;
                // An event is sent as it comes.
                stream.set_nodelay(true)?;
                Ok((stream.into(), None))
            }
            Socket::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = stream.peer_cred()?;
                Ok((stream.into(), Some(Actor { uid: peer.uid(), gid: peer.gid() })))
            }
        }
    }

    /// Serves whoever comes until the token is cancelled, and then until the answers that are under way have ended with their
    /// guests. Where another program takes the daemon's place, whoever comes waits for that one, and the socket is what is left.
    pub(crate) async fn serve(self, front: Arc<Front>, shutdown: CancellationToken) -> Option<Self> {
        let places = front.places();
        let tasks = TaskTracker::new();
        let router = front.router();
        let ends = Ends { begin: shutdown, ..Ends::default() };
        let mut last_told = None::<Instant>;
        loop {
            let accepted = tokio::select! {
                biased;
                () = ends.begin.cancelled() => break,
                () = front.hand_over().begins() => break,
                accepted = self.accept() => accepted,
            };
            let (client, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if last_told.is_none_or(|told| told.elapsed() >= COMPLAINT_PAUSE) {
                        last_told = Some(Instant::now());
                        tracing::warn!(%error, "cannot accept a connection for HTTP");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            // Of whoever has as many as it may have, this one is closed.
            let Some(place) = places.take(peer) else { continue };
            let (front, router, ends) = (front.clone(), router.clone(), ends.clone());
            tasks.spawn(async move {
                let _place = place;
                front.talk(client, peer, router, ends).await;
            });
        }
        // Not for a moment may another process listen there: it would be sent what is meant for the next program, tokens included.
        let left = front.hand_over().has_begun().then_some(self);
        if left.is_some() {
            ends.begin.cancelled().await;
        }
        tasks.close();
        // A client that does not read its answer holds up no daemon.
        let _ = tokio::time::timeout_at(front.ends_by(), tasks.wait()).await;
        ends.are_over.cancel();
        tasks.wait().await;
        left
    }
}

/// Refuses a folder in which others could put a socket of their own in the place of this one, if only while no daemon runs, as in a
/// sticky one: they would be told what is asked.
fn check_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    let metadata = fs::metadata(folder)?;
    let own = rustix::process::geteuid().as_raw();
    if [0, own].contains(&metadata.uid()) && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    let message = format!(
        "{} (owner {}, mode {:o}) lets other users put a socket of their own in this one's place",
        folder.display(),
        metadata.uid(),
        metadata.mode() & 0o7777
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

fn not_locked(error: LockError) -> io::Error {
    match error {
        LockError::Held { pid } => {
            let pid = pid.map(|pid| format!(", process {pid}")).unwrap_or_default();
            io::Error::new(io::ErrorKind::AddrInUse, format!("a daemon listens there{pid}"))
        }
        LockError::Io(error) => error,
    }
}

/// Removes the socket of a daemon that is gone; the caller holds the lock.
fn remove_left(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(file) if !file.file_type().is_socket() => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is not a socket"))
        }
        Ok(_) => match is_listened_on(path)? {
            true => Err(io::Error::new(io::ErrorKind::AddrInUse, "somebody listens there")),
            false => fs::remove_file(path),
        },
    }
}

/// Whether somebody listens on a socket, who need not be a daemon that knows of the lock. Nobody is waited for.
fn is_listened_on(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&client, &SocketAddrUnix::new(path)?) {
        // As many wait there as there is room for.
        Ok(()) | Err(Errno::AGAIN | Errno::INPROGRESS) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// That futures of connections may go to tasks.
const _: fn() = || {
    fn is_send<T: Future + Send>(_: T) {}
    let _ = |socket: HttpSocket, front, shutdown| is_send(socket.serve(front, shutdown));
};

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_that_was_left_is_replaced_and_one_that_is_served_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("http.sock");
        let listen = HttpListen::Unix(path.clone());
        drop(std::os::unix::net::UnixListener::bind(&path).expect("the path is free"));
        let socket = HttpSocket::bind(&listen).await.expect("nobody listens there any more");
        assert_eq!(fs::metadata(&path).expect("it is there").mode() & 0o777, SOCKET_MODE);
        assert!(!socket.needs_token());
        let error = HttpSocket::bind(&listen).await.expect_err("this one does");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(socket);
        assert!(!path.exists());

        fs::write(&path, "").expect("written");
        assert!(HttpSocket::bind(&listen).await.is_err(), "it is a file");
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_folder_that_others_write_to_is_no_place() {
        let folder = tempfile::tempdir().expect("a folder");
        for mode in [0o777, 0o1777, 0o770] {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).expect("it is ours");
            let error = HttpSocket::bind(&HttpListen::Unix(folder.path().join("s"))).await.expect_err("open");
            assert!(error.to_string().contains("lets other users"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_strangers_socket_that_nobody_serves_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("http.sock");
        let stranger = StdUnixListener::bind(&path).expect("the path is free");
        rustix::net::listen(&stranger, 0).expect("it listens");
        let waiting = std::os::unix::net::UnixStream::connect(&path).expect("there is room for one");
        let bound = tokio::task::spawn_blocking(move || remove_left(&path));
        let error = tokio::time::timeout(Duration::from_secs(20), bound).await.expect("it waits for nobody");
        let error = error.expect("no panic").expect_err("somebody listens there");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop((waiting, stranger));
    }

    #[tokio::test]
    async fn a_socket_that_is_left_goes_on_and_is_nobody_elses_meanwhile() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("http.sock");
        let owned = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("a descriptor");

        let listen = HttpListen::Unix(path.clone());
        let socket = HttpSocket::bind(&listen).await.expect("a free place");
        let LeftHttp { socket: left, file } = socket.to_hand_over();
        let (lock, id) = file.expect("it has a file");
        let handed = HandedHttp::Unix(HandedSocket { socket: owned(left), lock: owned(lock), file: id });
        // As at the end of a program, which drops nothing.
        std::mem::forget(socket);
        assert!(HttpSocket::bind(&listen).await.is_err(), "it is not free");
        let client = std::os::unix::net::UnixStream::connect(&path).expect("it is listened on");
        let next = HttpSocket::inherit(handed).expect("it is this process's");
        assert!(next.is_at(&listen) && !next.is_at(&HttpListen::Unix(folder.path().join("other"))));
        next.accept().await.expect("it has waited");
        drop((client, next));
        assert!(!path.exists(), "it was its own");

        let any = HttpListen::Loopback("127.0.0.1:0".parse().expect("an address"));
        let socket = HttpSocket::bind(&any).await.expect("a free port");
        let place = socket.place().expect("it has one");
        let LeftHttp { socket: left, file } = socket.to_hand_over();
        assert!(file.is_none());
        let handed = HandedHttp::Loopback(owned(left));
        drop(socket);
        let next = HttpSocket::inherit(handed).expect("it listens");
        assert!(next.is_at(&any) && !next.is_at(&listen));
        assert_eq!(next.place().expect("it has one"), place);
    }
}
