//! A connection, which is read and written by one and watched by another.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// How often a connection is looked at on which there is something that nobody reads.
const UNREAD_PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug)]
enum Socket {
    Unix(UnixStream),
    Loopback(TcpStream),
}

/// A connection; those that are cloned are the same.
#[derive(Clone, Debug)]
pub(super) struct Connection(Arc<Socket>);

impl From<UnixStream> for Connection {
    fn from(stream: UnixStream) -> Self {
        Self(Arc::new(Socket::Unix(stream)))
    }
}

impl From<TcpStream> for Connection {
    fn from(stream: TcpStream) -> Self {
        Self(Arc::new(Socket::Loopback(stream)))
    }
}

/// Asks the socket, of whichever kind it is.
macro_rules! socket {
    ($connection:expr, $stream:ident => $asked:expr) => {
        match &*$connection.0 {
            Socket::Unix($stream) => $asked,
            Socket::Loopback($stream) => $asked,
        }
    };
}

impl Connection {
    /// Waits until the client says no more: it has gone, or has closed its side, which cannot be told apart. Also where it has sent
    /// something that nobody reads, behind which whoever reads would not see the end.
    pub(super) async fn ends(&self) {
        loop {
            let ready = socket!(self, stream => stream.ready(Interest::READABLE).await);
            // A socket that fails has no client.
            if ready.map_or(true, |ready| ready.is_read_closed()) {
                return;
            }
            // It stays ready until somebody reads.
            tokio::time::sleep(UNREAD_PAUSE).await;
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let read = socket!(self, stream => {
                ready!(stream.poll_read_ready(context))?;
                stream.try_read_buf(buffer)
            });
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|_| ())),
            }
        }
    }
}

impl Connection {
    fn poll_written(
        &self,
        context: &mut Context<'_>,
        write: impl Fn() -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            socket!(self, stream => ready!(stream.poll_write_ready(context))?);
            match write() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_written(context, || socket!(self, stream => stream.try_write(bytes)))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_written(context, || socket!(self, stream => stream.try_write_vectored(pieces)))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Nothing is held back here.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = socket!(self, stream => rustix::net::shutdown(stream, Shutdown::Write));
        Poll::Ready(match shut {
            // The client has gone before.
            Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Both ends of a connection of each kind.
    async fn pairs() -> [(Connection, Connection); 2] {
        let (near, far) = UnixStream::pair().expect("a pair");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it has one");
        let client = TcpStream::connect(address).await.expect("it listens");
        let (served, _) = listener.accept().await.expect("it has come");
        [(near.into(), far.into()), (served.into(), client.into())]
    }

    #[tokio::test]
    async fn a_client_that_goes_is_noticed_behind_what_nobody_reads() {
        for (served, mut client) in pairs().await {
            client.write_all(b"more").await.expect("sent");
            let early = timeout(UNREAD_PAUSE * 2, served.ends()).await;
            assert!(early.is_err(), "{served:?}: the client is there");
            drop(client);
            timeout(SOON, served.ends()).await.expect("it has gone");
        }
    }

    #[tokio::test]
    async fn bytes_go_both_ways_also_more_than_the_system_takes_at_once() {
        let sent: Vec<u8> = (0..4 << 20).map(|n: u32| (n % 251) as u8).collect();
        for (mut served, mut client) in pairs().await {
            let begun = Instant::now();
            let write = async {
                client.write_all(&sent).await.expect("sent");
                client.shutdown().await.expect("its side is closed");
            };
            let mut read = Vec::new();
            let (n, ()) = tokio::join!(served.read_to_end(&mut read), write);
            assert_eq!(n.expect("read"), sent.len());
            assert!(read == sent, "they are the same");
            timeout(SOON, served.ends()).await.expect("it says no more");
            served.write_all(b"well").await.expect("the other side is open");
            drop(served);
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.expect("read");
            assert_eq!(answer, "well");
            assert!(begun.elapsed() < SOON);
        }
    }
}
