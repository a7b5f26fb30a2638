use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use interprocess::local_socket::tokio::Stream;
use interprocess::local_socket::traits::tokio::Stream as _;
use interprocess::local_socket::{GenericFilePath, ToFsName};
use interprocess::os::unix::uds_local_socket;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use trellis_wire::{Hello, WireError, negotiate};

use crate::connection::Connection;
use crate::error::{Error, Lost, Tried};
use crate::{socket, tried};

/// How often who stands in line looks whether anybody still waits for it.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A connection to a daemon. Clones share it; it closes when the last clone and the last guest are dropped.
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) handle: Arc<Handle>,
    build: Arc<str>,
    /// Which version of the protocol is spoken.
    version: u16,
    socket: Option<Arc<Path>>,
}

/// Keeps the connection open.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) connection: Arc<Connection>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.connection.close();
    }
}

impl Client {
    /// Connects to the user's own daemon, or else to the machine's.
    ///
    /// # Errors
    /// [`Error::NotRunning`] names the places where it looked; [`Error::Connect`] names a socket that this user may
    /// not use; [`Error::Handshake`] when another version answers; [`Error::ConnectionLost`] when the daemon goes before it
    /// has answered.
    pub async fn connect() -> Result<Self, Error> {
        let mut tried = Vec::new();
        for path in socket::candidates() {
            match open(&path).await {
                Ok(stream) => return Self::on(path, stream).await,
                Err(error) if is_nobody(&error) => tried.push(Tried { path, error: Arc::new(error) }),
                Err(error) => return Err(Error::Connect { path, source: Arc::new(error) }),
            }
        }
        Err(Error::NotRunning { tried })
    }

    /// Connects to the daemon that listens on `path`.
    ///
    /// # Errors
    /// As [`Self::connect`], for this place alone.
    pub async fn connect_to(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        match open(path).await {
            Ok(stream) => Self::on(path.to_owned(), stream).await,
            Err(error) if is_nobody(&error) => Err(Error::NotRunning {
                tried: vec![Tried { path: path.to_owned(), error: Arc::new(error) }],
            }),
            Err(error) => Err(Error::Connect { path: path.to_owned(), source: Arc::new(error) }),
        }
    }

    async fn on(path: PathBuf, stream: Stream) -> Result<Self, Error> {
        Ok(Self { socket: Some(path.into()), ..Self::over(stream).await? })
    }

    /// Talks to a daemon over any stream of bytes, one in this process included.
    ///
    /// # Errors
    /// [`Error::Handshake`] when the peer is no daemon or speaks no version that this client speaks,
    /// [`Error::ConnectionLost`] when the stream ends or fails before that is known.
    pub async fn over<T>(mut stream: T) -> Result<Self, Error>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let handshake = |error| match error {
            WireError::Io(_) => Error::ConnectionLost(Lost::Wire(Arc::new(error))),
            error => Error::Handshake(Arc::new(error)),
        };
        let ours = Hello::ours();
        let written = ours.write(&mut stream).await;
        // A daemon that takes no more connections closes before it has read: what it said is still there.
        let theirs = match Hello::read(&mut stream).await {
            Ok(theirs) => theirs,
            Err(error) => return Err(handshake(written.err().unwrap_or(error))),
        };
        let version = negotiate(&ours, &theirs).map_err(handshake)?;
        let connection = Connection::new(theirs.frame_bytes_max.min(ours.frame_bytes_max));
        tokio::spawn(connection.clone().drive(stream));
        Ok(Self {
            handle: Arc::new(Handle { connection }),
            build: theirs.build.into(),
            version,
            socket: None,
        })
    }

    /// Name and version of the daemon's build.
    #[must_use]
    pub fn daemon_build(&self) -> &str {
        &self.build
    }

    /// The socket that the daemon listens on; none where it is reached otherwise.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    /// Refuses what the daemon is too old for.
    pub(crate) fn check_version(&self, what: &'static str, needed: u16) -> Result<(), Error> {
        if self.version >= needed {
            return Ok(());
        }
        Err(Error::TooOld { what, build: self.build.to_string(), spoken: self.version, needed })
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.handle.connection
    }
}

async fn open(path: &Path) -> io::Result<Stream> {
    tried::note(path);
    match Stream::connect(path.to_fs_name::<GenericFilePath>()?).await {
        Ok(stream) if is_connected(&stream) => Ok(stream),
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        // As many wait to be let in as may; who does not block is not told when there is room.
        Ok(_) | Err(_) => open_in_line(path.to_owned()).await,
    }
}

/// The runtime takes a line that is full for a connection that is made.
fn is_connected(stream: &Stream) -> bool {
    let Stream::UdSocket(stream) = stream;
    rustix::net::getpeername(stream).is_ok()
}

/// Stands in line with others, on a thread of its own, which looks now and then whether this was given up.
async fn open_in_line(path: PathBuf) -> io::Result<Stream> {
    let address = SocketAddrUnix::new(&path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(LOOK_INTERVAL))?;
    let (opened, is_open) = oneshot::channel();
    thread::Builder::new().name("connect".to_owned()).spawn(move || {
        let outcome = loop {
            match rustix::net::connect(&socket, &address) {
                Err(Errno::AGAIN | Errno::INTR) if !opened.is_closed() => {}
                outcome => break outcome.map(|()| socket),
            }
        };
        // Whoever gave up waits no more.
        let _ = opened.send(outcome);
    })?;
    let socket = is_open.await.map_err(|_| io::Error::other("nobody connects any more"))??;
    set_socket_timeout(&socket, Timeout::Send, None)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(Stream::UdSocket(uds_local_socket::tokio::Stream::try_from(socket)?))
}

/// No socket, or one that a daemon left behind.
fn is_nobody(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::NotADirectory
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::net::{bind, connect, listen};

    use super::*;

    #[tokio::test]
    async fn who_finds_the_line_full_stands_in_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sock");
        let address = SocketAddrUnix::new(&path).expect("a short path");
        let socket = |flags| {
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("there are sockets")
        };
        let listening = socket(SocketFlags::CLOEXEC);
        bind(&listening, &address).expect("the path is free");
        listen(&listening, 1).expect("it can listen");
        let listener = UnixListener::from(listening);
        let mut others = Vec::new();
        loop {
            let other = socket(SocketFlags::NONBLOCK);
            if connect(&other, &address).is_err() {
                break;
            }
            others.push(other);
        }
        let opening = tokio::spawn(async move { open(&path).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!opening.is_finished(), "behind {} others", others.len());
        listener.accept().expect("the first of them");
        let opened = tokio::time::timeout(Duration::from_secs(60), opening).await.expect("in time");
        let stream = opened.expect("no panic").expect("it is let in");
        assert!(is_connected(&stream));
    }
}
