//! Sessions against a service whose guests follow a script, over streams in memory.

mod bounds;
mod broken;
mod classes;
mod clients;
mod detached;
pub(crate) mod fake;
mod schedules;

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use trellis_client::Client;
use trellis_wire::{
    Call, ClientMessage, ErrorBody, Event, FRAME_BYTES_MAX, FrameBuffer, FrameReader, Hello, Outcome,
    Program, ServerMessage, Start, Value,
};

use self::fake::Fake;
use super::{Actor, SessionError, SessionLimits, Sessions};
use crate::guest::GuestLimits;

const ALICE: Actor = Actor { uid: 1000, gid: 1000 };
/// Long enough for anything that comes at all, on a slow machine too.
const PATIENCE: Duration = Duration::from_secs(120);

struct World {
    fake: Arc<Fake>,
    sessions: Arc<Sessions<Fake>>,
    shutdown: CancellationToken,
}

impl World {
    /// A guest that does not stop is waited for so long that one that does is in time on a slow machine.
    fn new() -> Self {
        Self::with(SessionLimits { stop_ms: 3_000, ..SessionLimits::default() })
    }

    fn with(limits: SessionLimits) -> Self {
        Self::with_guests(limits, GuestLimits::default())
    }

    fn with_guests(limits: SessionLimits, guest_limits: GuestLimits) -> Self {
        let fake = Arc::new(Fake::default());
        let sessions = Sessions::new(fake.clone(), limits, guest_limits);
        Self { fake, sessions, shutdown: CancellationToken::new() }
    }

    fn serve(&self, stream: DuplexStream) -> JoinHandle<Result<(), SessionError>> {
        self.serve_as(ALICE, stream)
    }

    fn serve_as(&self, actor: Actor, stream: DuplexStream) -> JoinHandle<Result<(), SessionError>> {
        let (sessions, shutdown) = (self.sessions.clone(), self.shutdown.clone());
        tokio::spawn(async move { sessions.serve(stream, actor, shutdown).await })
    }

    async fn client(&self) -> Client {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        self.serve(theirs);
        Client::over(ours).await.expect("the daemon answers")
    }

    /// A peer that speaks frames by hand, after the hello.
    async fn raw(&self) -> Raw {
        let mut raw = self.raw_before_hello();
        raw.writer.write_all(&Hello::ours().encode()).await.unwrap();
        Hello::read(&mut raw.stream_reader()).await.unwrap();
        raw
    }

    fn raw_before_hello(&self) -> Raw {
        self.raw_of(ALICE)
    }

    /// The same of this user.
    fn raw_of(&self, actor: Actor) -> Raw {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let session = self.serve_as(actor, theirs);
        let (reader, writer) = tokio::io::split(ours);
        Raw { reader: Some(reader), frames: None, writer, session }
    }

    /// Waits until every guest has been torn down.
    async fn all_gone(&self) {
        let wait = async {
            while self.fake.n_alive() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("every guest ends");
    }
}

struct Raw {
    reader: Option<ReadHalf<DuplexStream>>,
    frames: Option<FrameReader<ReadHalf<DuplexStream>>>,
    writer: WriteHalf<DuplexStream>,
    session: JoinHandle<Result<(), SessionError>>,
}

impl Raw {
    fn stream_reader(&mut self) -> &mut ReadHalf<DuplexStream> {
        self.reader.as_mut().expect("only before the first frame")
    }

    async fn send(&mut self, message: ClientMessage) {
        let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
        frames.push(&message).unwrap();
        frames.write(&mut self.writer).await.unwrap();
    }

    async fn send_frame(&mut self, bytes: &[u8]) {
        self.writer.write_u32_le(u32::try_from(bytes.len()).unwrap()).await.unwrap();
        self.writer.write_all(bytes).await.unwrap();
    }

    async fn start(&mut self, id: u64, name: &str, argument: &str, credit_bytes: u64) {
        let start = Start {
            program: Program::Named { name: name.into() },
            arguments: vec![argument.into()],
            model: None,
            seed: None,
            credit_bytes,
            deadline_ms: None,
            label: None,
            is_recorded: false,
            is_profiled: false,
        };
        self.send(ClientMessage::Request { id, call: Call::Start(start) }).await;
    }

    async fn next(&mut self) -> Option<ServerMessage> {
        let reader = &mut self.reader;
        let frames = self
            .frames
            .get_or_insert_with(|| FrameReader::new(reader.take().expect("taken once"), FRAME_BYTES_MAX));
        tokio::time::timeout(PATIENCE, frames.next())
            .await
            .expect("an answer in time")
            .expect("a whole frame")
    }

    /// Passes over events until a request ends.
    async fn end(&mut self) -> (u64, Result<Value, ErrorBody>) {
        loop {
            match self.next().await.expect("still connected") {
                ServerMessage::End { id, outcome: Outcome::Ok { value }, .. } => return (id, Ok(value)),
                ServerMessage::End { id, outcome: Outcome::Error { error }, .. } => return (id, Err(error)),
                ServerMessage::Event { .. } => {}
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    async fn event(&mut self) -> Event {
        match self.next().await.expect("still connected") {
            ServerMessage::Event { event, .. } => event,
            other => panic!("unexpected {other:?}"),
        }
    }

    async fn fault(&mut self) -> ErrorBody {
        let fault = loop {
            match self.next().await.expect("a reason before the end") {
                ServerMessage::Fault { error } => break error,
                ServerMessage::Event { .. } | ServerMessage::End { .. } => {}
                other => panic!("unexpected {other:?}"),
            }
        };
        assert_eq!(self.next().await, None, "the connection closes after a fault");
        fault
    }

    /// Whether nothing comes for a while.
    async fn is_silent(&mut self) -> bool {
        let reader = &mut self.reader;
        let frames = self
            .frames
            .get_or_insert_with(|| FrameReader::new(reader.take().expect("taken once"), FRAME_BYTES_MAX));
        tokio::time::timeout(Duration::from_millis(50), frames.next::<ServerMessage>()).await.is_err()
    }
}
