//! What the bytes of messages promise: nothing is lost on the way, and what a reader does not know it skips.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use trellis_wire::{
    Attach, CHUNK_BYTES_MAX, Call, Causes, ClientMessage, ComponentHash, ErrorBody, ErrorCode, Event,
    FRAME_BYTES_MAX, FrameBuffer, FrameReader, GuestUsage, LogLevel, LogsAsked, Outcome, Program,
    ServerMessage, Stage, Start, Value, WireError, decode,
};

fn client_message() -> impl Strategy<Value = ClientMessage> {
    let program = prop_oneof![
        any::<[u8; 32]>().prop_map(|hash| Program::Component { hash: ComponentHash(hash) }),
        any::<String>().prop_map(|name| Program::Named { name }),
    ];
    let options =
        any::<(Vec<String>, Option<String>, Option<u64>, u64, Option<u64>, (Option<String>, bool, bool))>();
    let start = (program, options, any::<bool>()).prop_map(
        |(
            program,
            (arguments, model, seed, credit_bytes, deadline_ms, (label, is_recorded, is_profiled)),
            is_detached,
        )| {
            let start = Start {
                program,
                arguments,
                model,
                seed,
                credit_bytes,
                deadline_ms,
                label,
                is_recorded,
                is_profiled,
            };
            if is_detached { Call::StartDetached(start) } else { Call::Start(start) }
        },
    );
    let call = prop_oneof![
        start,
        any::<([u8; 32], u64)>()
            .prop_map(|(hash, n_bytes)| Call::Upload { hash: ComponentHash(hash), n_bytes }),
        any::<(u64, String)>().prop_map(|(to, text)| Call::Message { to, text }),
        any::<(String, Option<String>)>().prop_map(|(model, device)| Call::Load { model, device }),
        any::<(String, Option<u64>)>().prop_map(|(model, drain_ms)| Call::Unload { model, drain_ms }),
        any::<u64>().prop_map(|guest_id| Call::Stop { guest_id }),
        any::<(u64, Option<u64>, Option<u64>, u64)>().prop_map(|(guest_id, from, daemon, credit_bytes)| {
            Call::Attach(Attach { guest_id, from, daemon, credit_bytes })
        }),
        any::<(String, Option<String>)>().prop_map(|(model, device)| Call::Fit { model, device }),
        Just(Call::Models),
        Just(Call::Guests),
        Just(Call::Info),
        Just(Call::Limits),
        Just(Call::Metrics),
        any::<(Option<u64>, Option<u64>, bool)>()
            .prop_map(|(number, n_newest, waits)| Call::Logs(LogsAsked { number, n_newest, waits })),
        Just(Call::Reload),
        any::<Option<String>>().prop_map(|program| Call::Upgrade { program }),
        Just(Call::Shutdown),
    ];
    prop_oneof![
        (any::<u64>(), call).prop_map(|(id, call)| ClientMessage::Request { id, call }),
        any::<u64>().prop_map(|id| ClientMessage::Cancel { id }),
        any::<(u64, u64)>().prop_map(|(id, n_bytes)| ClientMessage::Credit { id, n_bytes }),
        any::<(u64, Vec<u8>)>().prop_map(|(id, bytes)| ClientMessage::Chunk { id, bytes }),
        any::<u64>().prop_map(|id| ClientMessage::EndMessages { id }),
        any::<(u64, u64)>().prop_map(|(guest_id, until)| ClientMessage::Acknowledge { guest_id, until }),
    ]
}

fn server_message() -> impl Strategy<Value = ServerMessage> {
    let error = any::<(String, String, Option<String>, Option<String>, Option<u64>)>().prop_map(
        |(code, message, name, value, limit)| ErrorBody {
            code: ErrorCode::from(&*code),
            message,
            name,
            value,
            limit,
        },
    );
    let event = prop_oneof![
        any::<(String, Option<String>, u64, u64)>().prop_map(|(stage, name, done, total)| {
            Event::Progress { stage: Stage::from(&*stage), name, done, total }
        }),
        any::<u64>().prop_map(|guest_id| Event::Started { guest_id }),
        any::<(u64, u64, u64)>().prop_map(|(guest_id, from, daemon)| Event::Attached {
            guest_id,
            from,
            daemon
        }),
        Just(Event::Wanted),
        any::<String>().prop_map(|text| Event::Text { text }),
        any::<Vec<u32>>().prop_map(|tokens| Event::Tokens { tokens }),
        any::<String>().prop_map(|json| Event::Json { json }),
        any::<String>().prop_map(|line| Event::Log { level: LogLevel::Warn, line }),
        any::<Vec<u8>>().prop_map(|bytes| Event::Recorded { bytes }),
        any::<Vec<u8>>().prop_map(|bytes| Event::Profiled { bytes }),
    ];
    let outcome = prop_oneof![
        Just(Outcome::Ok { value: Value::Done }),
        error.clone().prop_map(|error| Outcome::Error { error }),
    ];
    prop_oneof![
        (any::<u64>(), event).prop_map(|(id, event)| ServerMessage::Event { id, event }),
        (any::<u64>(), outcome, any::<Option<u64>>()).prop_map(|(id, outcome, n_tokens)| {
            let causes = |n_rows_sat_out| Causes { n_rows_sat_out, ..Causes::default() };
            let usage = n_tokens.map(|n_tokens| GuestUsage {
                n_tokens,
                causes: causes(n_tokens / 2),
                ..GuestUsage::default()
            });
            ServerMessage::End { id, outcome, usage }
        }),
        error.prop_map(|error| ServerMessage::Fault { error }),
    ]
}

fn frame<T: Serialize>(message: &T) -> Vec<u8> {
    let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
    frames.push(message).unwrap();
    let mut bytes = Vec::new();
    run(frames.write(&mut bytes)).unwrap();
    bytes
}

fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// A stream that gives its bytes in pieces.
fn in_pieces(bytes: Vec<u8>, n_piece_bytes: usize) -> impl tokio::io::AsyncRead + Unpin {
    let (ours, mut theirs) = tokio::io::duplex(n_piece_bytes);
    tokio::spawn(async move {
        let _ = tokio::io::AsyncWriteExt::write_all(&mut theirs, &bytes).await;
    });
    ours
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn messages_survive(
        sent in prop::collection::vec(client_message(), 0..6),
        answers in prop::collection::vec(server_message(), 0..6),
        n_piece_bytes in 1_usize..200,
    ) {
        run(async {
            let mut reader = FrameReader::new(in_pieces(sent.iter().flat_map(frame_now).collect(), n_piece_bytes), FRAME_BYTES_MAX);
            for message in &sent {
                assert_eq!(reader.next::<ClientMessage>().await.unwrap().as_ref(), Some(message));
            }
            assert_eq!(reader.next::<ClientMessage>().await.unwrap(), None);
            let mut reader = FrameReader::new(in_pieces(answers.iter().flat_map(frame_now).collect(), n_piece_bytes), FRAME_BYTES_MAX);
            for message in &answers {
                assert_eq!(reader.next::<ServerMessage>().await.unwrap().as_ref(), Some(message));
            }
        });
    }

    #[test]
    fn a_cut_frame_is_an_error(message in client_message(), cut in any::<prop::sample::Index>()) {
        let bytes = frame(&message);
        let n_bytes = cut.index(bytes.len());
        let mut reader = FrameReader::new(&bytes[..n_bytes], FRAME_BYTES_MAX);
        let result = run(reader.next::<ClientMessage>());
        match n_bytes {
            0 => assert!(matches!(result, Ok(None))),
            _ => assert!(matches!(result, Err(WireError::Truncated { n_bytes: n, .. }) if n == n_bytes)),
        }
        if n_bytes >= 4 && n_bytes < bytes.len() {
            assert!(decode::<ClientMessage>(&bytes[4..n_bytes]).is_err());
        }
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode::<ClientMessage>(&bytes);
        let _ = decode::<ServerMessage>(&bytes);
    }

    #[test]
    fn flipped_bytes_never_panic(message in client_message(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = frame(&message);
        let n_bytes = bytes.len() - 4;
        bytes[4 + at.index(n_bytes)] = byte;
        let _ = decode::<ClientMessage>(&bytes[4..]);
    }

    #[test]
    fn what_is_written_is_valid(message in server_message()) {
        assert!(trellis_wire::validate(&frame(&message)[4..]).is_ok());
    }
}

fn frame_now<T: Serialize>(message: &T) -> Vec<u8> {
    let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
    frames.push(message).unwrap();
    let mut bytes = Vec::new();
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(frames.poll_write(&mut cx, &mut bytes).is_ready());
    bytes
}

#[derive(Serialize)]
struct Later<'a> {
    r#type: &'a str,
    id: u64,
    n_bytes: u64,
    since: Vec<BTreeMap<&'a str, Option<f64>>>,
}

#[test]
fn unknown_fields_are_skipped() {
    let later =
        Later { r#type: "credit", id: 7, n_bytes: 9, since: vec![BTreeMap::from([("x", Some(1.5))])] };
    let bytes = rmp_serde::to_vec_named(&later).unwrap();
    assert_eq!(decode::<ClientMessage>(&bytes).unwrap(), ClientMessage::Credit { id: 7, n_bytes: 9 });
}

#[test]
fn unknown_variants_survive() {
    let later = Later { r#type: "teleport", id: 7, n_bytes: 9, since: Vec::new() };
    let bytes = rmp_serde::to_vec_named(&later).unwrap();
    assert_eq!(decode::<ClientMessage>(&bytes).unwrap(), ClientMessage::Unknown);
    assert_eq!(decode::<ServerMessage>(&bytes).unwrap(), ServerMessage::Unknown);
    assert_eq!(decode::<Event>(&bytes).unwrap(), Event::Unknown);
    assert_eq!(decode::<Value>(&bytes).unwrap(), Value::Unknown);

    #[derive(Serialize)]
    struct Request<'a> {
        r#type: &'a str,
        id: u64,
        call: Later<'a>,
    }
    let bytes = rmp_serde::to_vec_named(&Request { r#type: "request", id: 3, call: later }).unwrap();
    let request = decode::<ClientMessage>(&bytes).unwrap();
    assert_eq!(request, ClientMessage::Request { id: 3, call: Call::Unknown });
}

#[test]
fn unknown_codes_keep_their_name() {
    let body = ErrorBody::new(ErrorCode::Other("too_funny".into()), "no");
    let bytes = rmp_serde::to_vec_named(&body).unwrap();
    assert_eq!(decode::<ErrorBody>(&bytes).unwrap(), body);
    assert_eq!(ErrorCode::from("guest_trapped"), ErrorCode::GuestTrapped);
}

/// The names are the protocol; a change here breaks every client.
#[test]
fn messages_are_maps_of_names() {
    #[derive(Debug, PartialEq, Deserialize)]
    struct Raw {
        r#type: String,
        id: u64,
        event: BTreeMap<String, String>,
    }
    let message = ServerMessage::Event { id: 1, event: Event::Text { text: "hi".into() } };
    let raw: Raw = rmp_serde::from_slice(&frame(&message)[4..]).unwrap();
    let event = BTreeMap::from([("type".into(), "text".into()), ("text".into(), "hi".into())]);
    assert_eq!(raw, Raw { r#type: "event".into(), id: 1, event });
    let expected = b"\x11\0\0\0\x82\xa4type\xa6cancel\xa2id\x05";
    assert_eq!(frame(&ClientMessage::Cancel { id: 5 }), expected);
}

#[test]
fn a_frame_over_the_limit_is_refused_on_both_sides() {
    let mut frames = FrameBuffer::new(1000);
    frames.push(&ClientMessage::Cancel { id: 1 }).unwrap();
    let n_bytes = frames.n_bytes();
    let error = frames.push(&ClientMessage::Chunk { id: 1, bytes: vec![0; 1000] }).unwrap_err();
    assert!(matches!(error, WireError::FrameTooLarge { n_bytes, limit: 1000 } if n_bytes > 1000));
    assert_eq!(frames.n_bytes(), n_bytes, "a refused message leaves nothing behind");

    let bytes = 1001_u32.to_le_bytes();
    let error = run(FrameReader::new(&bytes[..], 1000).next::<ClientMessage>()).unwrap_err();
    assert!(matches!(error, WireError::FrameTooLarge { n_bytes: 1001, limit: 1000 }));
}

#[test]
fn the_largest_messages_fit_in_the_smallest_frame() {
    let mut frames = FrameBuffer::new(trellis_wire::FRAME_BYTES_MIN);
    frames.push(&ClientMessage::Chunk { id: u64::MAX, bytes: vec![0; CHUNK_BYTES_MAX] }).unwrap();
    let tokens = vec![u32::MAX; trellis_wire::OUTPUT_BYTES_MAX / 4];
    let event = Event::Tokens { tokens };
    assert_eq!(event.output_bytes(), Some(trellis_wire::OUTPUT_BYTES_MAX));
    assert_eq!(event.credit_bytes(), trellis_wire::OUTPUT_CREDIT_BYTES_MAX);
    let message = ServerMessage::Event { id: 1, event };
    frames.push(&message).unwrap();
    assert_eq!(decode::<ServerMessage>(&frame(&message)[4..]).unwrap(), message);
}

#[test]
fn a_reader_that_is_always_behind_costs_no_more_than_what_it_is_behind() {
    // Outside tokio's budget: a write that is put off for it would be taken for one that the reader holds up.
    run(tokio::task::unconstrained(async {
        let (ours, mut theirs) = tokio::io::duplex(1024);
        let mut ours = ours;
        let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
        let event = Event::Text { text: "x".repeat(1000) };
        let mut taken = [0; 1024];
        let mut n_taken = 0;
        while n_taken < 20 << 20 {
            while frames.n_bytes() < 64 << 10 {
                frames.push(&ServerMessage::Event { id: 1, event: event.clone() }).unwrap();
            }
            assert!(poll::poll_once(frames.write(&mut ours)).is_none(), "the reader is behind");
            n_taken += tokio::io::AsyncReadExt::read(&mut theirs, &mut taken).await.unwrap();
            assert!(frames.n_bytes_held() < 1 << 20, "{} bytes held", frames.n_bytes_held());
        }
    }));
}

#[test]
fn an_empty_frame_is_no_message() {
    let error = run(FrameReader::new(&[0; 4][..], 1000).next::<ClientMessage>()).unwrap_err();
    assert!(matches!(error, WireError::Length { .. }));
}

#[test]
fn a_frame_that_has_arrived_stays_until_it_is_consumed() {
    run(async {
        let messages = [ClientMessage::Cancel { id: 1 }, ClientMessage::Chunk { id: 2, bytes: vec![3; 100] }];
        let bytes: Vec<u8> = messages.iter().flat_map(frame_now).collect();
        let mut reader = FrameReader::new(in_pieces(bytes, 10), FRAME_BYTES_MAX);
        assert_eq!(reader.peek::<ClientMessage>().unwrap(), None, "nothing has come");
        for message in messages {
            let length = frame_now(&message).len() - 4;
            for _ in 0..2 {
                assert_eq!(reader.arrive().await.unwrap(), Some(length));
                assert_eq!(reader.peek::<ClientMessage>().unwrap().as_ref(), Some(&message));
            }
            reader.consume().unwrap();
            // There is none in front any more.
            reader.consume().unwrap();
        }
        assert_eq!(reader.arrive().await.unwrap(), None);
    });
}

#[test]
fn reading_can_be_given_up_at_any_byte() {
    use poll::poll_once;
    run(async {
        let messages = [ClientMessage::Cancel { id: 1 }, ClientMessage::EndMessages { id: 2 }];
        let bytes: Vec<u8> = messages.iter().flat_map(frame_now).collect();
        let (ours, mut theirs) = tokio::io::duplex(1);
        let mut reader = FrameReader::new(ours, FRAME_BYTES_MAX);
        let mut read = Vec::new();
        for byte in bytes {
            tokio::io::AsyncWriteExt::write_all(&mut theirs, &[byte]).await.unwrap();
            if let Some(message) = poll_once(reader.next::<ClientMessage>()) {
                read.push(message.unwrap().unwrap());
            }
        }
        assert_eq!(read, messages);
    });
}

mod poll {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    /// Polls a future once and drops it.
    pub(crate) fn poll_once<F: Future>(future: F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }
}
