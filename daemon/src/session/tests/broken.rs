//! Peers that break the protocol: each is told why, and nothing of it is left.

use tokio::io::AsyncWriteExt;
use trellis_wire::{Call, ClientMessage, ErrorCode, FRAME_BYTES_MAX, Hello, ServerMessage, Value, WireError};

use super::World;
use crate::session::{SessionError, SessionLimits};

#[tokio::test]
async fn who_speaks_something_else_is_told() {
    let world = World::new();
    let mut raw = world.raw_before_hello();
    raw.writer.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert_eq!(Hello::read(raw.stream_reader()).await.unwrap(), Hello::ours());
    assert_eq!(raw.fault().await.code, ErrorCode::Protocol);
    let error = raw.session.await.unwrap().unwrap_err();
    assert!(matches!(error, SessionError::Wire(WireError::Magic { .. })) && !error.is_departure());
}

#[tokio::test]
async fn another_version_is_told_ours() {
    let world = World::new();
    let mut raw = world.raw_before_hello();
    let hello = Hello { version_min: 900, version_max: 901, ..Hello::ours() };
    hello.write(&mut raw.writer).await.unwrap();
    assert_eq!(Hello::read(raw.stream_reader()).await.unwrap(), Hello::ours());
    let fault = raw.fault().await;
    assert!(fault.message.contains("900..=901"), "{fault:?}");
}

#[tokio::test]
async fn who_says_nothing_is_not_waited_for() {
    let world = World::with(SessionLimits { hello_ms: 20, ..SessionLimits::default() });
    let mut raw = world.raw_before_hello();
    raw.writer.write_all(b"\x89TRE").await.unwrap();
    Hello::read(raw.stream_reader()).await.unwrap();
    assert_eq!(raw.fault().await.code, ErrorCode::Protocol);
    assert!(matches!(raw.session.await.unwrap(), Err(SessionError::HelloTimeout { .. })));
}

#[tokio::test]
async fn a_broken_frame_ends_the_connection_and_its_guests() {
    let deep = [[0x91; 40].as_slice(), &[0xc0]].concat();
    let not_a_message = [0x81, 0xa1, b'x', 0xc0];
    let wrong_field = *b"\x82\xa4type\xa6cancel\xa2id\xa1x";
    let wrong_text = *b"\x82\xa4type\xa6cancel\xa2id\xa1\xff";
    let frames: [&[u8]; 6] = [&[0xc1, 1, 2], &deep, &not_a_message, &wrong_field, &wrong_text, &[]];
    for frame in frames {
        let world = World::new();
        let mut raw = world.raw().await;
        raw.start(1, "forever", "", 1000).await;
        raw.event().await;
        raw.send_frame(frame).await;
        let fault = raw.fault().await;
        assert_eq!(fault.code, ErrorCode::Protocol, "{frame:02x?}");
        assert!(matches!(raw.session.await.unwrap(), Err(SessionError::Wire(_))));
        assert_eq!(world.fake.n_alive(), 0, "a session waits for its guests");
    }
}

#[tokio::test]
async fn an_oversize_frame_is_refused_by_its_length() {
    let world = World::new();
    let mut raw = world.raw().await;
    raw.writer.write_u32_le(FRAME_BYTES_MAX + 1).await.unwrap();
    let fault = raw.fault().await;
    assert_eq!((fault.value.as_deref(), fault.limit), (Some("1048577"), Some(1_048_576)));
}

#[tokio::test]
async fn a_frame_cut_by_the_end_ends_the_guests() {
    let world = World::new();
    let mut raw = world.raw().await;
    raw.start(1, "flood", "", 100_000).await;
    raw.event().await;
    raw.writer.write_all(&[9, 0, 0, 0, 0x82]).await.unwrap();
    raw.writer.shutdown().await.unwrap();
    drop(raw.frames);
    drop(raw.writer);
    assert!(raw.session.await.unwrap().unwrap_err().is_departure());
    assert_eq!(world.fake.n_alive(), 0);
}

#[tokio::test]
async fn who_leaves_before_any_word_has_only_left() {
    let world = World::new();
    let raw = world.raw_before_hello();
    drop((raw.reader, raw.writer));
    assert!(raw.session.await.unwrap().unwrap_err().is_departure());
}

#[tokio::test]
async fn ids_are_fresh() {
    for id in [5, 4, 0] {
        let world = World::new();
        let mut raw = world.raw().await;
        raw.start(5, "forever", "", 1000).await;
        raw.send(ClientMessage::Request { id, call: Call::Models }).await;
        assert_eq!(raw.fault().await.value, Some(id.to_string()));
        assert!(matches!(raw.session.await.unwrap(), Err(SessionError::StaleId { last_id: 5, .. })));
        assert_eq!(world.fake.n_alive(), 0);
    }
}

#[tokio::test]
async fn unknown_kinds_are_skipped_or_answered() {
    let world = World::new();
    let mut raw = world.raw().await;
    raw.send_frame(b"\x82\xa4type\xa8teleport\xa2id\x05").await;
    raw.send_frame(b"\x83\xa4type\xa7request\xa2id\x05\xa4call\x81\xa4type\xa8teleport").await;
    let (id, result) = raw.end().await;
    assert_eq!((id, result.unwrap_err().code), (5, ErrorCode::Unsupported));
    raw.send(ClientMessage::Cancel { id: 77 }).await;
    raw.send(ClientMessage::Credit { id: 77, n_bytes: u64::MAX }).await;
    raw.send(ClientMessage::Chunk { id: 77, bytes: vec![1] }).await;
    raw.send(ClientMessage::EndMessages { id: 77 }).await;
    raw.send(ClientMessage::Request { id: 6, call: Call::Models }).await;
    assert!(matches!(raw.end().await, (6, Ok(Value::Models { .. }))));
}

#[tokio::test]
async fn a_client_that_leaves_after_its_last_words_is_no_error() {
    let world = World::new();
    let mut raw = world.raw().await;
    raw.send(ClientMessage::Request { id: 1, call: Call::Models }).await;
    raw.end().await.1.unwrap();
    raw.writer.shutdown().await.unwrap();
    raw.session.await.unwrap().unwrap();
    assert_eq!(raw.frames.unwrap().next::<ServerMessage>().await.unwrap(), None);
}
