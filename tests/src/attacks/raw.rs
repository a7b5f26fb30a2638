//! A client that says what it is told to, in order or not: one connection, one task, little work for each message.

use std::io;
use std::path::Path;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use trellis_wire::{
    CHUNK_BYTES_MAX, Call, ClientMessage, Event, FRAME_BYTES_MAX, FrameBuffer, FrameReader, Hello, Outcome,
    Program, ServerMessage, Start, Value, WireError,
};

use super::{Component, Ending};

/// Credit of a guest in bytes; given back when half of it is used.
pub(crate) const CREDIT_BYTES: u64 = 1 << 20;

/// A connection.
#[derive(Debug)]
pub struct Raw {
    reader: FrameReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    last_id: u64,
}

fn other(error: WireError) -> io::Error {
    match error {
        WireError::Io(error) => error,
        error => io::Error::other(error),
    }
}

/// Whether an error means that the daemon has hung up.
pub(crate) fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
    )
}

/// A start as most attacks need it.
pub(crate) fn start_of(component: &Component, arguments: &[&str]) -> Start {
    Start {
        program: Program::Component { hash: component.hash },
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
        model: None,
        seed: Some(7),
        credit_bytes: CREDIT_BYTES,
        deadline_ms: None,
        label: Some("attack".to_owned()),
        is_recorded: false,
        is_profiled: false,
    }
}

/// The bytes of a message's frame.
///
/// # Panics
/// The message is longer than a frame may be.
#[must_use]
pub(crate) fn frame(message: &ClientMessage) -> Vec<u8> {
    let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
    frames.push(message).expect("it fits");
    let mut bytes = Vec::new();
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(frames.poll_write(&mut cx, &mut bytes).is_ready(), "memory takes all");
    bytes
}

/// These bytes as a frame, whatever they are.
pub(crate) fn framed(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

impl Raw {
    /// Connects and says hello.
    ///
    /// # Errors
    /// There is nobody, or who is there does not speak the protocol.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket).await?;
        Hello::ours().write(&mut stream).await.map_err(other)?;
        Hello::read(&mut stream).await.map_err(other)?;
        Ok(Self::over(stream))
    }

    /// Over a connection on which both sides have said hello, or not.
    #[must_use]
    pub fn over(stream: UnixStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader: FrameReader::new(reader, FRAME_BYTES_MAX), writer, last_id: 0 }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn send(&mut self, message: &ClientMessage) -> io::Result<()> {
        self.send_bytes(&frame(message)).await
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.writer.write_all(bytes).await
    }

    /// Says that nothing more comes.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.writer.shutdown().await
    }

    /// The next message; none where the daemon has closed the connection.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn next(&mut self) -> io::Result<Option<ServerMessage>> {
        match self.reader.next().await.map_err(other) {
            Err(error) if is_closed(&error) => Ok(None),
            next => next,
        }
    }

    /// Sends a request; its id.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn request(&mut self, call: Call) -> io::Result<u64> {
        self.last_id += 1;
        let id = self.last_id;
        self.send(&ClientMessage::Request { id, call }).await?;
        Ok(id)
    }

    /// Waits for the end of a request, and lets everything else pass.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn end(&mut self, id: u64) -> io::Result<Ending> {
        loop {
            match self.next().await? {
                Some(ServerMessage::End { id: ended, outcome, .. }) if ended == id => {
                    return Ok(outcome.into());
                }
                Some(ServerMessage::Fault { error }) => return Ok(error.into()),
                Some(_) => {}
                None => return Ok(Ending::closed()),
            }
        }
    }

    /// Sends a request and waits for its end.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn ask(&mut self, call: Call) -> io::Result<Ending> {
        let id = self.request(call).await?;
        self.end(id).await
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// The connection failed, or the request was refused.
    pub async fn value(&mut self, call: Call) -> io::Result<Value> {
        let id = self.request(call).await?;
        loop {
            match self.next().await? {
                Some(ServerMessage::End { id: of, outcome: Outcome::Ok { value }, .. }) if of == id => {
                    return Ok(value);
                }
                Some(ServerMessage::End { id: of, outcome, .. }) if of == id => {
                    return Err(io::Error::other(Ending::from(outcome).message));
                }
                Some(ServerMessage::Fault { error }) => return Err(io::Error::other(error)),
                Some(_) => {}
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }

    /// Uploads a component, unless the daemon has it.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn upload(&mut self, component: &Component) -> io::Result<Ending> {
        let n_bytes = component.wasm.len() as u64;
        let id = self.request(Call::Upload { hash: component.hash, n_bytes }).await?;
        loop {
            match self.next().await? {
                Some(ServerMessage::Event { id: of, event: Event::Wanted }) if of == id => {
                    for chunk in component.wasm.chunks(CHUNK_BYTES_MAX) {
                        self.send(&ClientMessage::Chunk { id, bytes: chunk.to_vec() }).await?;
                    }
                }
                Some(ServerMessage::End { id: of, outcome, .. }) if of == id => return Ok(outcome.into()),
                Some(ServerMessage::Fault { error }) => return Ok(error.into()),
                Some(_) => {}
                None => return Ok(Ending::closed()),
            }
        }
    }

    /// Starts a guest; the request's id.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn start(&mut self, component: &Component, arguments: &[&str]) -> io::Result<u64> {
        self.request(Call::Start(start_of(component, arguments))).await
    }

    /// Waits until a guest runs; how it ended where it does not.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn started(&mut self, id: u64) -> io::Result<Result<u64, Ending>> {
        loop {
            match self.next().await? {
                Some(ServerMessage::Event { id: of, event: Event::Started { guest_id } }) if of == id => {
                    return Ok(Ok(guest_id));
                }
                Some(ServerMessage::End { id: of, outcome, .. }) if of == id => {
                    return Ok(Err(outcome.into()));
                }
                Some(ServerMessage::Fault { error }) => return Ok(Err(error.into())),
                Some(_) => {}
                None => return Ok(Err(Ending::closed())),
            }
        }
    }

    /// Takes what a guest sends and gives its credit back, until it ends.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn follow(&mut self, id: u64) -> io::Result<Ending> {
        let mut n_used = 0;
        loop {
            match self.next().await? {
                Some(ServerMessage::Event { id: of, event }) if of == id => {
                    n_used += event.credit_bytes() as u64;
                    if n_used > CREDIT_BYTES / 2 {
                        self.send(&ClientMessage::Credit { id, n_bytes: std::mem::take(&mut n_used) })
                            .await?;
                    }
                }
                Some(ServerMessage::End { id: of, outcome, .. }) if of == id => return Ok(outcome.into()),
                Some(ServerMessage::Fault { error }) => return Ok(error.into()),
                Some(_) => {}
                None => return Ok(Ending::closed()),
            }
        }
    }
}
