//! What one program leaves to the next in the same process: a message in a socket that the next one finds as it finds the sockets of a
//! service manager (`sd_listen_fds(3)`), by its name.
//!
//! A message carries descriptors as such: the socket and its lock are held by it as long as it lies there.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

use crate::http::{HandedHttp, LeftHttp};
use crate::ipc::{HandedSocket, Listener};

/// The name of the socket with the message.
pub(crate) const NAME: &str = "trellis-handover";

/// In which format the message is. Fields that are added leave it as it is, and are passed over by programs that do not know them; what
/// an older program could not take is another.
const FORMAT: u32 = 1;

/// Where a program that is asked whether it would start is told in which format the daemon would leave its socket to it.
pub(super) const FORMAT_VARIABLE: &str = "TRELLIS_HANDOVER_FORMAT";

/// That of this program.
pub(super) fn own_format() -> u32 {
    crate::cli::test_build().hand_over_format.unwrap_or(FORMAT)
}

/// Whether this program can take what a daemon leaves that asks it, if one does.
///
/// # Errors
/// That is of another format.
pub(crate) fn check_asked() -> io::Result<()> {
    let Some(asked) = std::env::var_os(FORMAT_VARIABLE) else { return Ok(()) };
    match asked.to_str().and_then(|asked| asked.parse().ok()) {
        Some(format) => check_format(format),
        None => Err(unknown(asked.to_string_lossy())),
    }
}

fn check_format(format: u32) -> io::Result<()> {
    if format == own_format() { Ok(()) } else { Err(unknown(format)) }
}

fn unknown(format: impl std::fmt::Display) -> io::Error {
    invalid(format!(
        "the daemon leaves its socket in format {format}, of which this program knows {}: stop the daemon and start this program",
        own_format()
    ))
}

fn format_of_the_first() -> u32 {
    1
}

const MESSAGE_BYTES_MAX: usize = 4 << 10;
/// The socket, its lock, the one for metrics, the one for HTTP requests and the lock of that. Programs that know of fewer pass over those
/// that come after.
const N_FDS_MAX: usize = 5;
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(N_FDS_MAX));

/// What is said of the descriptors.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Message {
    /// Programs before there was more than one did not say it.
    #[serde(default = "format_of_the_first")]
    format: u32,
    /// Device and number of the socket's file.
    file: (u64, u64),
    /// Whether a service manager has made the socket for metrics, if there is one.
    #[serde(default)]
    metrics_are_lent: Option<bool>,
    /// Of the socket for HTTP requests, if there is one.
    #[serde(default)]
    http: Option<LeftFile>,
}

/// What is said of a socket for HTTP requests.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LeftFile {
    /// Device and number of its file, where it has one and so a lock.
    file: Option<(u64, u64)>,
}

/// What the program before has left.
#[derive(Debug)]
pub(crate) struct Inherited {
    /// Where clients come.
    pub(crate) clients: HandedSocket,
    /// Where metrics are asked for.
    pub(crate) metrics: Option<InheritedMetrics>,
    /// Where HTTP requests come.
    pub(crate) http: Option<HandedHttp>,
}

/// A socket for metrics.
#[derive(Debug)]
pub(crate) struct InheritedMetrics {
    pub(crate) socket: TcpListener,
    /// A service manager has made it, whatever the configuration says.
    pub(crate) is_lent: bool,
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The socket with the message in it. What is for metrics comes with whether a service manager has made it.
pub(super) fn leave(
    listener: &Listener,
    metrics: Option<(BorrowedFd<'_>, bool)>,
    http: Option<LeftHttp<'_>>,
) -> io::Result<OwnedFd> {
    let (socket, lock, file) = listener.to_hand_over();
    let message = Message {
        format: own_format(),
        file,
        metrics_are_lent: metrics.map(|(_, is_lent)| is_lent),
        http: http.map(|http| LeftFile { file: http.file.map(|(_, file)| file) }),
    };
    let mut fds = vec![socket, lock];
    fds.extend(metrics.map(|(socket, _)| socket));
    if let Some(LeftHttp { socket, file }) = http {
        fds.push(socket);
        fds.extend(file.map(|(lock, _)| lock));
    }
    let message = rmp_serde::to_vec_named(&message).map_err(invalid)?;
    // A stream, as all sockets are that are found by names.
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "there is room for all descriptors");
    sendmsg(&ours, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(theirs)
}

/// Takes the message out of its socket.
pub(super) fn take(socket: impl AsFd) -> io::Result<Inherited> {
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, flags)?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut fds = fds.flatten();
    let mut next =
        || fds.next().ok_or_else(|| invalid("a descriptor is missing in what the daemon before left"));
    let Message { format, file, metrics_are_lent, http } =
        rmp_serde::from_slice(&message[..received.bytes]).map_err(invalid)?;
    check_format(format)?;
    let clients = HandedSocket { socket: next()?, lock: next()?, file };
    let metrics = metrics_are_lent
        .map(|is_lent| Ok::<_, io::Error>(InheritedMetrics { socket: next()?.into(), is_lent }))
        .transpose()?;
    let http = match http {
        None => None,
        Some(LeftFile { file: None }) => Some(HandedHttp::Loopback(next()?)),
        Some(LeftFile { file: Some(file) }) => {
            Some(HandedHttp::Unix(HandedSocket { socket: next()?, lock: next()?, file }))
        }
    };
    Ok(Inherited { clients, metrics, http })
}

impl Inherited {
    /// Takes what the program before has left in this socket.
    ///
    /// # Errors
    /// There is no such message in it.
    pub(crate) fn take(socket: impl AsFd) -> io::Result<Self> {
        take(socket)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::config::HttpListen;
    use crate::http::HttpSocket;
    use crate::ipc::BindError;

    #[test]
    fn a_message_of_another_format_is_not_taken() {
        #[derive(Serialize)]
        struct Later {
            file: (u64, u64),
            metrics_are_lent: Option<bool>,
            since: &'static str,
        }
        let later = Later { file: (1, 2), metrics_are_lent: None, since: "a later version" };
        let read = |bytes: Vec<u8>| rmp_serde::from_slice::<Message>(&bytes).expect("it has what it needs");
        let known = read(rmp_serde::to_vec_named(&later).expect("it can be written"));
        assert_eq!(known, Message { format: FORMAT, file: (1, 2), metrics_are_lent: None, http: None });
        check_format(known.format).expect("what is added is passed over");
        let refused = check_format(FORMAT + 1).expect_err("it is not known").to_string();
        assert!(refused.contains("in format 2, of which this program knows 1"), "{refused}");
    }

    #[tokio::test]
    async fn what_is_left_is_found_and_is_nobody_elses_meanwhile() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trellis.sock");
        let inode = || std::fs::symlink_metadata(&path).expect("it is there").ino();
        let listener = Listener::bind(&path, 0o700).expect("a free place");
        let made = inode();
        let metrics = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = metrics.local_addr().expect("it has one");
        let at = HttpListen::Unix(folder.path().join("http.sock"));
        let http = HttpSocket::bind(&at).await.expect("a free place");
        let left = leave(&listener, Some((metrics.as_fd(), true)), Some(http.to_hand_over())).expect("left");
        // As at the end of a program, which drops nothing.
        std::mem::forget(http);
        // Closed as at the end of a program; its file stays.
        let elsewhere = folder.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).expect("renamed");
        drop((listener, metrics));
        std::fs::rename(&elsewhere, &path).expect("renamed");
        assert!(matches!(Listener::bind(&path, 0o700), Err(BindError::AlreadyRunning { .. })));
        // Who comes meanwhile waits.
        let early = std::os::unix::net::UnixStream::connect(&path).expect("somebody listens");

        let Inherited { clients, metrics, http } = Inherited::take(&left).expect("it is there");
        assert!(HttpSocket::bind(&at).await.is_err(), "its lock is held");
        let http = HttpSocket::inherit(http.expect("it was left")).expect("it is this process's");
        assert!(http.is_at(&at));
        let metrics = metrics.expect("it was left");
        assert!(metrics.is_lent);
        assert_eq!(metrics.socket.local_addr().expect("it has one"), address);
        let next = Listener::inherit(clients, |_| 0o700).expect("it is this process's");
        assert_eq!((next.path(), inode()), (path.as_path(), made));
        next.accept().await.expect("it has waited");
        drop(early);
        assert!(matches!(Listener::bind(&path, 0o700), Err(BindError::AlreadyRunning { .. })));
        drop(next);
        assert!(!path.exists(), "it was its own");
        assert!(Inherited::take(&left).is_err(), "there was one message");
    }
}
