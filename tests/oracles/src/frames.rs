//! Hellos, frames and messages: no bytes of a peer end anything but the connection, and what is written is read.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use arbitrary::{Arbitrary, Result, Unstructured};
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::io::{AsyncRead, ReadBuf};
use trellis_wire::{
    Attach, Call, Causes, ClientMessage, ComponentHash, Computed, DEPTH_MAX, ErrorBody, Event,
    FRAME_BYTES_MAX, FrameBuffer, FrameReader, GuestInfo, GuestUsage, Hello, ModelInfo, Outcome, Program,
    ServerMessage, Start, Value, decode, negotiate, validate,
};

/// Reads the bytes as a hello, as a connection of either side, and as one message; then makes messages of them.
///
/// # Panics
/// Bytes are read in another way in pieces than in one, a message changes when it is written and read, or bytes that are no
/// message pass for valid.
pub fn check(input: &[u8]) {
    let Some((&first, bytes)) = input.split_first() else { return };
    let n_piece_bytes = 1 + usize::from(first);
    hello(bytes);
    connection::<ClientMessage>(bytes, n_piece_bytes);
    connection::<ServerMessage>(bytes, n_piece_bytes);
    message(bytes);
    // Input that is used up gives zeros, so that there is always a message.
    let mut bytes = Unstructured::new(bytes);
    let sent = client_message(&mut bytes).expect("zeros make a message");
    written(&sent, n_piece_bytes);
    let answer = server_message(&mut bytes).expect("zeros make a message");
    written(&answer, n_piece_bytes);
}

fn hello(bytes: &[u8]) {
    let mut rest = bytes;
    let Ok(hello) = now(Hello::read(&mut rest)) else { return };
    let n_read = bytes.len() - rest.len();
    let again = hello.encode();
    // A build that is no UTF-8 is written as it was understood.
    assert_eq!(again[..16], bytes[..16], "the fixed part is kept");
    let theirs = now(Hello::read(&mut &again[..])).expect("what was written is read");
    assert!(std::str::from_utf8(&bytes[17..n_read]).is_err() || theirs == hello, "{hello:?}");
    if let Ok(version) = negotiate(&Hello::ours(), &hello) {
        assert!((hello.version_min..=hello.version_max).contains(&version), "{hello:?}");
    }
}

/// What a connection makes of the bytes: each message, as it is written again, and how it ended.
fn connection<T: Serialize + DeserializeOwned>(bytes: &[u8], n_piece_bytes: usize) {
    let in_pieces = read_all::<T>(bytes, n_piece_bytes);
    assert_eq!(in_pieces, read_all::<T>(bytes, usize::MAX), "in pieces of {n_piece_bytes} bytes and in one");
}

fn read_all<T: Serialize + DeserializeOwned>(bytes: &[u8], n_piece_bytes: usize) -> (Vec<Vec<u8>>, String) {
    let mut reader = FrameReader::new(Pieces { bytes, n_piece_bytes }, FRAME_BYTES_MAX);
    let mut messages = Vec::new();
    loop {
        match now(reader.next::<T>()) {
            Ok(Some(message)) => messages.push(frame(&message)),
            Ok(None) => return (messages, "the end".to_owned()),
            Err(error) => return (messages, error.to_string()),
        }
    }
}

/// Reads bytes as one message, and holds what is valid against another reader.
fn message(bytes: &[u8]) {
    let is_valid = validate(bytes).is_ok();
    if is_valid {
        let mut others = rmp_serde::Deserializer::from_read_ref(bytes);
        others.set_max_depth(2 * DEPTH_MAX);
        let read = serde::Deserialize::deserialize(&mut others).map(|IgnoredAny| ());
        assert!(read.is_ok(), "valid, and yet: {read:?}");
    }
    is_kept::<ClientMessage>(bytes, is_valid);
    is_kept::<ServerMessage>(bytes, is_valid);
}

/// That a message which can be read is the same after it was written.
fn is_kept<T: Serialize + DeserializeOwned>(bytes: &[u8], is_valid: bool) {
    let Ok(message) = decode::<T>(bytes) else { return };
    assert!(is_valid, "a message of bytes that are not valid");
    let written = frame(&message);
    let again = decode::<T>(&written[4..]).expect("what was written is read");
    assert_eq!(frame(&again), written);
}

/// That a message comes out as it went in, and that the frame is valid.
fn written<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: &T, n_piece_bytes: usize) {
    let bytes = frame(message);
    validate(&bytes[4..]).expect("what is written is valid");
    let mut reader = FrameReader::new(Pieces { bytes: &bytes, n_piece_bytes }, FRAME_BYTES_MAX);
    let read: Option<T> = now(reader.next()).expect("what was written is read");
    assert_eq!(read.as_ref(), Some(message));
}

fn frame<T: Serialize>(message: &T) -> Vec<u8> {
    let mut frames = FrameBuffer::new(u32::MAX);
    frames.push(message).expect("it is a message");
    let mut bytes = Vec::new();
    now(frames.write(&mut bytes)).expect("memory takes all");
    bytes
}

/// The result of a future that waits for nothing.
fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => unreachable!("memory is always ready"),
    }
}

/// Bytes that come in pieces.
struct Pieces<'a> {
    bytes: &'a [u8],
    n_piece_bytes: usize,
}

impl AsyncRead for Pieces<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let n_bytes = self.n_piece_bytes.min(self.bytes.len()).min(to.remaining());
        let (piece, rest) = self.bytes.split_at(n_bytes);
        to.put_slice(piece);
        self.bytes = rest;
        Poll::Ready(Ok(()))
    }
}

fn client_message(bytes: &mut Unstructured<'_>) -> Result<ClientMessage> {
    let id = bytes.arbitrary()?;
    Ok(match bytes.int_in_range(0..=6)? {
        0 => ClientMessage::Request { id, call: call(bytes)? },
        1 => ClientMessage::Cancel { id },
        2 => ClientMessage::Credit { id, n_bytes: bytes.arbitrary()? },
        3 => ClientMessage::Chunk { id, bytes: bytes.arbitrary()? },
        4 => ClientMessage::EndMessages { id },
        5 => ClientMessage::Acknowledge { guest_id: id, until: bytes.arbitrary()? },
        _ => ClientMessage::Unknown,
    })
}

fn call(bytes: &mut Unstructured<'_>) -> Result<Call> {
    Ok(match bytes.int_in_range(0..=12)? {
        0 => Call::Start(start(bytes)?),
        1 => Call::Upload { hash: hash(bytes)?, n_bytes: bytes.arbitrary()? },
        2 => Call::Message { to: bytes.arbitrary()?, text: bytes.arbitrary()? },
        3 => Call::Models,
        4 => Call::Guests,
        5 => Call::Info,
        6 => Call::Stop { guest_id: bytes.arbitrary()? },
        7 => Call::Load { model: bytes.arbitrary()?, device: bytes.arbitrary()? },
        8 => Call::Unload { model: bytes.arbitrary()?, drain_ms: bytes.arbitrary()? },
        9 => Call::Shutdown,
        10 => Call::StartDetached(start(bytes)?),
        11 => Call::Attach(Attach {
            guest_id: bytes.arbitrary()?,
            from: bytes.arbitrary()?,
            daemon: bytes.arbitrary()?,
            credit_bytes: bytes.arbitrary()?,
        }),
        _ => Call::Unknown,
    })
}

fn start(bytes: &mut Unstructured<'_>) -> Result<Start> {
    let program = match bytes.int_in_range(0..=2)? {
        0 => Program::Component { hash: hash(bytes)? },
        1 => Program::Named { name: bytes.arbitrary()? },
        _ => Program::Unknown,
    };
    Ok(Start {
        program,
        arguments: bytes.arbitrary()?,
        model: bytes.arbitrary()?,
        seed: bytes.arbitrary()?,
        credit_bytes: bytes.arbitrary()?,
        deadline_ms: bytes.arbitrary()?,
        label: bytes.arbitrary()?,
        is_recorded: bytes.arbitrary()?,
        is_profiled: bytes.arbitrary()?,
    })
}

fn hash(bytes: &mut Unstructured<'_>) -> Result<ComponentHash> {
    Ok(ComponentHash(<[u8; 32]>::arbitrary(bytes)?))
}

fn server_message(bytes: &mut Unstructured<'_>) -> Result<ServerMessage> {
    let id = bytes.arbitrary()?;
    Ok(match bytes.int_in_range(0..=3)? {
        0 => ServerMessage::Event { id, event: event(bytes)? },
        1 => {
            let outcome = match bytes.int_in_range(0..=2)? {
                0 => Outcome::Ok { value: value(bytes)? },
                1 => Outcome::Error { error: error(bytes)? },
                _ => Outcome::Unknown,
            };
            let usage = bytes.arbitrary::<bool>()?.then(|| usage(bytes)).transpose()?;
            ServerMessage::End { id, outcome, usage }
        }
        2 => ServerMessage::Fault { error: error(bytes)? },
        _ => ServerMessage::Unknown,
    })
}

fn event(bytes: &mut Unstructured<'_>) -> Result<Event> {
    Ok(match bytes.int_in_range(0..=10)? {
        0 => {
            let stage = String::arbitrary(bytes)?.as_str().into();
            Event::Progress { stage, name: None, done: bytes.arbitrary()?, total: bytes.arbitrary()? }
        }
        1 => Event::Started { guest_id: bytes.arbitrary()? },
        2 => Event::Wanted,
        3 => Event::Text { text: bytes.arbitrary()? },
        4 => Event::Tokens { tokens: bytes.arbitrary()? },
        5 => Event::Json { json: bytes.arbitrary()? },
        6 => {
            let level = String::arbitrary(bytes)?.as_str().into();
            Event::Log { level, line: bytes.arbitrary()? }
        }
        7 => Event::Recorded { bytes: bytes.arbitrary()? },
        8 => Event::Profiled { bytes: bytes.arbitrary()? },
        9 => Event::Attached {
            guest_id: bytes.arbitrary()?,
            from: bytes.arbitrary()?,
            daemon: bytes.arbitrary()?,
        },
        _ => Event::Unknown,
    })
}

fn value(bytes: &mut Unstructured<'_>) -> Result<Value> {
    Ok(match bytes.int_in_range(0..=5)? {
        0 => Value::Done,
        1 => Value::Loaded { model: bytes.arbitrary()? },
        2 => Value::Unloaded { default_model: bytes.arbitrary()? },
        3 => {
            let model = ModelInfo {
                name: bytes.arbitrary()?,
                n_vocab: bytes.arbitrary()?,
                folder: bytes.arbitrary()?,
                is_default: bytes.arbitrary()?,
                computed: Computed { n_steps: bytes.arbitrary()?, ..Computed::default() },
                failure: bytes.arbitrary()?,
                ..ModelInfo::default()
            };
            Value::Models { models: vec![model; bytes.int_in_range(0..=3)?] }
        }
        4 => {
            let guest = GuestInfo {
                guest_id: bytes.arbitrary()?,
                program: bytes.arbitrary()?,
                models: bytes.arbitrary()?,
                usage: usage(bytes)?,
                ..GuestInfo::default()
            };
            Value::Guests { guests: vec![guest; bytes.int_in_range(0..=3)?] }
        }
        _ => Value::Unknown,
    })
}

fn usage(bytes: &mut Unstructured<'_>) -> Result<GuestUsage> {
    let causes = Causes { n_rows_sat_out: bytes.arbitrary()?, ..Causes::default() };
    Ok(GuestUsage { n_tokens: bytes.arbitrary()?, causes, ..GuestUsage::default() })
}

fn error(bytes: &mut Unstructured<'_>) -> Result<ErrorBody> {
    Ok(ErrorBody {
        code: String::arbitrary(bytes)?.as_str().into(),
        message: bytes.arbitrary()?,
        name: bytes.arbitrary()?,
        value: bytes.arbitrary()?,
        limit: bytes.arbitrary()?,
    })
}
