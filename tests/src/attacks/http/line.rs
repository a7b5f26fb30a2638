//! A connection to where a daemon answers HTTP requests, and what comes back on it.

use std::io;

use bytes::{Buf, BytesMut};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::super::ends::Ending;
use super::super::front::Front;
use super::super::raw::is_closed;

/// Bytes that are read at a time.
const BUFFER_BYTES: usize = 64 << 10;

/// The type of an error in a stream of events, which has no status.
const IN_EVENTS: &str = "in events";

/// A connection.
pub(super) struct Line {
    pub(super) reader: Reader,
    pub(super) writer: Writer,
}

/// What is sent.
pub(super) struct Writer(Box<dyn AsyncWrite + Send + Unpin>);

/// What comes.
pub(super) struct Reader {
    stream: Box<dyn AsyncRead + Send + Unpin>,
    /// What came and is of the next answer.
    bytes: BytesMut,
}

/// One answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Vec<u8>,
}

impl Front {
    /// A connection on which nothing is asked yet.
    pub(super) async fn line(&self) -> io::Result<Line> {
        let (reader, writer): (Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncWrite + Send + Unpin>) =
            match (self.socket(), self.address()) {
                (Some(path), _) => {
                    let (reader, writer) = UnixStream::connect(path).await?.into_split();
                    (Box::new(reader), Box::new(writer))
                }
                (None, Some(address)) => {
                    let (reader, writer) = TcpStream::connect(address).await?.into_split();
                    (Box::new(reader), Box::new(writer))
                }
                (None, None) => return Err(io::ErrorKind::AddrNotAvailable.into()),
            };
        Ok(Line { reader: Reader { stream: reader, bytes: BytesMut::new() }, writer: Writer(writer) })
    }

    /// The head of a request with these headers beside those that it needs.
    pub(super) fn head(&self, method: &str, path: &str, headers: &str) -> Vec<u8> {
        let user = self.user_header();
        format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n{user}{headers}\r\n").into_bytes()
    }

    /// A request without a body.
    pub(super) fn get(&self, path: &str) -> Vec<u8> {
        self.head("GET", path, "")
    }

    /// A request with this body.
    pub(super) fn post(&self, path: &str, body: &[u8]) -> Vec<u8> {
        let length = format!("Content-Length: {}\r\n", body.len());
        [&self.head("POST", path, &length)[..], body].concat()
    }

    /// Sends these bytes on a connection of their own; how the first answer ends.
    pub(super) async fn ask(&self, bytes: &[u8]) -> io::Result<Ending> {
        self.line().await?.ask(bytes).await
    }
}

impl Writer {
    pub(super) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes).await
    }

    /// Says that nothing more comes.
    pub(super) async fn finish(&mut self) -> io::Result<()> {
        self.0.shutdown().await
    }
}

impl Line {
    /// Sends these bytes; how the next answer ends. The daemon may answer, or hang up, before it has read all.
    pub(super) async fn ask(&mut self, bytes: &[u8]) -> io::Result<Ending> {
        let Self { reader, writer } = self;
        let send = async {
            let _ = writer.send(bytes).await;
            std::future::pending().await
        };
        tokio::select! {
            biased;
            ending = reader.ending() => ending,
            never = send => never,
        }
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

impl Reader {
    /// Reads more; false where nothing more comes.
    async fn more(&mut self) -> io::Result<bool> {
        self.bytes.reserve(BUFFER_BYTES);
        match self.stream.read_buf(&mut self.bytes).await {
            Ok(n) => Ok(n > 0),
            Err(error) if is_closed(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// So many bytes at least; false where they do not come.
    pub(super) async fn has(&mut self, n: usize) -> io::Result<bool> {
        while self.bytes.len() < n {
            if !self.more().await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Up to this, which is left out; `None` where it does not come.
    async fn up_to(&mut self, what: &[u8]) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = find(&self.bytes, what) {
                let found = self.bytes.split_to(at).to_vec();
                self.bytes.advance(what.len());
                return Ok(Some(found));
            }
            if !self.more().await? {
                return Ok(None);
            }
        }
    }

    async fn exactly(&mut self, n: usize) -> io::Result<Option<Vec<u8>>> {
        if !self.has(n).await? {
            return Ok(None);
        }
        Ok(Some(self.bytes.split_to(n).to_vec()))
    }

    /// The next answer; none where the daemon hangs up before all of it has come.
    pub(super) async fn answer(&mut self) -> io::Result<Option<Answer>> {
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        loop {
            let Some(head) = self.up_to(b"\r\n\r\n").await? else { return Ok(None) };
            let head = String::from_utf8(head).map_err(io::Error::other)?.to_ascii_lowercase();
            let status = head.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
            let status = status.ok_or_else(|| wrong(format!("no status: {head:?}")))?;
            // Who waits to be told to go on is told.
            if status == 100 {
                continue;
            }
            let header = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            let body = if header("transfer-encoding:") == Some("chunked") {
                self.chunks().await?
            } else if let Some(length) = header("content-length:") {
                self.exactly(length.parse().map_err(io::Error::other)?).await?
            } else {
                // It goes on to the end of the connection.
                while self.more().await? {}
                Some(std::mem::take(&mut self.bytes).to_vec())
            };
            return Ok(body.map(|body| Answer { status, body }));
        }
    }

    async fn chunks(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut body = Vec::new();
        loop {
            let Some(length) = self.up_to(b"\r\n").await? else { return Ok(None) };
            let length = std::str::from_utf8(&length).map_err(io::Error::other)?;
            let n = usize::from_str_radix(length, 16).map_err(io::Error::other)?;
            let Some(chunk) = self.exactly(n + 2).await? else { return Ok(None) };
            if n == 0 {
                return Ok(Some(body));
            }
            body.extend_from_slice(&chunk[..n]);
        }
    }

    /// How the next answer ends.
    pub(super) async fn ending(&mut self) -> io::Result<Ending> {
        Ok(self.answer().await?.map_or_else(Ending::closed, |answer| answer.ending()))
    }
}

impl Answer {
    /// Its body as JSON.
    pub(super) fn json(&self) -> io::Result<Value> {
        serde_json::from_slice(&self.body).map_err(io::Error::other)
    }

    /// Well where it answers what was asked; otherwise its status, with the error's code as what that is about. An error that
    /// has not the form that clients of the API read, or another type than its status, is wrong.
    pub(super) fn ending(&self) -> Ending {
        let text = String::from_utf8_lossy(&self.body);
        let told = match self.status {
            // One that came when the first events were sent.
            200 => match text.lines().find_map(|line| line.strip_prefix("data: {\"error\":")) {
                None => return Ending::well(),
                Some(rest) => format!("{{\"error\":{rest}"),
            },
            // What the library finds not to be HTTP has no body.
            _ if self.body.is_empty() => {
                return Ending { code: self.status.to_string(), name: None, message: String::new() };
            }
            _ => text.clone().into_owned(),
        };
        let told: Value = serde_json::from_str(&told).unwrap_or_default();
        let error = &told["error"];
        let word = |name: &str| error[name].as_str().map(str::to_owned);
        let (Some(kind), Some(code), Some(message)) = (word("type"), word("code"), word("message")) else {
            return Ending::wrong(format!("{} with {:.200}", self.status, text));
        };
        let expected = match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            400..500 => "invalid_request_error",
            200 => kind.as_str(),
            _ => "server_error",
        };
        if kind != expected {
            return Ending::wrong(format!(
                "{} is a {kind}, and should be a {expected}: {message}",
                self.status
            ));
        }
        let code_of_end = if self.status == 200 { IN_EVENTS.to_owned() } else { self.status.to_string() };
        Ending { code: code_of_end, name: Some(code), message }
    }
}
