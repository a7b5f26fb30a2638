//! Where requests come in: a Unix socket or a loopback address.

use std::fs::{self, Permissions};
use std::future::Future;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::front::{Ends, Front};
use crate::config::HttpListen;
use crate::session::{Actor, Quota};

/// Those who are in the group of the socket may come, as to the daemon's own.
const SOCKET_MODE: u32 = 0o660;

/// The places of a loopback address, in those of a user: nobody is known there before its first request.
const USERS_OF_ALL: usize = 4;

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

/// The file of a Unix socket, unless another has its place by now.
#[derive(Debug)]
struct OwnFile {
    path: PathBuf,
    id: (u64, u64),
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

/// A connection.
enum Stream {
    Unix(UnixStream, Actor),
    Loopback(TcpStream),
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
                remove_left(path)?;
                let socket = UnixListener::bind(path)?;
                let file = Some(OwnFile { path: path.clone(), id: id(path)? });
                fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))?;
                Ok(Self { socket: Socket::Unix(socket), file })
            }
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

    async fn accept(&self) -> io::Result<Stream> {
        match &self.socket {
            Socket::Loopback(listener) => {
                let (stream, _) = listener.accept().await?;
                // An event is sent as it comes.
                stream.set_nodelay(true)?;
                Ok(Stream::Loopback(stream))
            }
            Socket::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = stream.peer_cred()?;
                Ok(Stream::Unix(stream, Actor { uid: peer.uid(), gid: peer.gid() }))
            }
        }
    }

    /// Serves whoever comes until the token is cancelled, and then until the answers that are under way have ended with their
    /// guests.
    pub(crate) async fn serve(self, front: Arc<Front>, shutdown: CancellationToken) {
        let places = Places::new(front.n_connections());
        let tasks = TaskTracker::new();
        let router = front.router();
        let ends = Ends { begin: shutdown, ..Ends::default() };
        let mut last_told = None::<Instant>;
        loop {
            let accepted = tokio::select! {
                biased;
                () = ends.begin.cancelled() => break,
                accepted = self.accept() => accepted,
            };
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) => {
                    if last_told.is_none_or(|told| told.elapsed() >= COMPLAINT_PAUSE) {
                        last_told = Some(Instant::now());
                        tracing::warn!(%error, "cannot accept a connection for HTTP");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            // Whoever has as many as it may have is closed on.
            let Some(place) = places.take(&stream) else { continue };
            let (front, router, ends) = (front.clone(), router.clone(), ends.clone());
            tasks.spawn(async move {
                let _place = place;
                match stream {
                    Stream::Unix(stream, actor) => front.talk(stream, Some(actor), router, ends).await,
                    Stream::Loopback(stream) => front.talk(stream, None, router, ends).await,
                }
            });
        }
        drop(self);
        tasks.close();
        // A client that does not read its answer holds up no daemon.
        let _ = tokio::time::timeout_at(front.ends_by(), tasks.wait()).await;
        ends.are_over.cancel();
        tasks.wait().await;
    }
}

/// Room for connections.
struct Places {
    of_users: Arc<Quota>,
    of_all: Arc<Semaphore>,
}

/// Held for as long as a connection lasts.
type Place = Box<dyn Send>;

impl Places {
    fn new(n: usize) -> Self {
        Self {
            of_users: Quota::new(n),
            of_all: Arc::new(Semaphore::new(n.saturating_mul(USERS_OF_ALL).min(Semaphore::MAX_PERMITS))),
        }
    }

    fn take(&self, stream: &Stream) -> Option<Place> {
        match stream {
            Stream::Unix(_, actor) => self.of_users.take(*actor).map(|permit| Box::new(permit) as Place),
            Stream::Loopback(_) => {
                let permit = self.of_all.clone().try_acquire_owned().ok()?;
                Some(Box::new(permit) as Place)
            }
        }
    }
}

/// Refuses a folder in which others could put a socket of their own in the place of this one: they would be told what is asked.
fn check_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    let metadata = fs::metadata(folder)?;
    let own = rustix::process::geteuid().as_raw();
    let (is_sticky, is_open) = (metadata.mode() & 0o1000 != 0, metadata.mode() & 0o022 != 0);
    if [0, own].contains(&metadata.uid()) && (is_sticky || !is_open) {
        return Ok(());
    }
    let message = format!("{} lets other users replace the socket", folder.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

/// Removes the socket of a daemon that is gone.
fn remove_left(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(file) if !file.file_type().is_socket() => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is not a socket"))
        }
        Ok(_) => match StdUnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
            Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "somebody listens there")),
            Err(error) => Err(error),
        },
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
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).expect("it is ours");
        let error = HttpSocket::bind(&HttpListen::Unix(folder.path().join("s"))).await.expect_err("open");
        assert!(error.to_string().contains("lets other users"), "{error}");
    }
}
