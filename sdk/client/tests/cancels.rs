//! A client that gives a guest up, at every moment between its start and the guest's: the daemon, played by hand, is left
//! with no request of it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use tokio::io::DuplexStream;
use trellis_client::{Client, ErrorCode, Event, Program, StartOptions};
use trellis_wire::{
    Call, ClientMessage, ErrorBody, FRAME_BYTES_MAX, FrameBuffer, FrameReader, Hello, Outcome, ServerMessage,
    Value,
};

/// What the daemon has been asked for and has not ended.
type Open = Arc<Mutex<BTreeSet<u64>>>;

const N_BYTES: usize = 600_000;

/// A daemon that knows no component before it was uploaded, and whose guests run until they are cancelled.
async fn play(mut stream: DuplexStream, open: Open) {
    Hello::read(&mut stream).await.expect("a hello");
    Hello::ours().write(&mut stream).await.expect("sent");
    let (reader, mut writer) = tokio::io::split(stream);
    let mut frames = FrameReader::new(reader, FRAME_BYTES_MAX);
    let (mut n_bytes, mut uploading) = (0, None);
    while let Ok(Some(message)) = frames.next::<ClientMessage>().await {
        let mut answers = Vec::new();
        let end = |id, outcome| {
            open.lock().expect("no panic").remove(&id);
            ServerMessage::End { id, outcome, usage: None }
        };
        let failed = |code| Outcome::Error { error: ErrorBody::new(code, "no") };
        match message {
            ClientMessage::Request { id, call } => {
                open.lock().expect("no panic").insert(id);
                match call {
                    Call::Start(_) if n_bytes < N_BYTES => {
                        answers.push(end(id, failed(ErrorCode::UnknownComponent)));
                    }
                    Call::Start(_) => {
                        answers.push(ServerMessage::Event { id, event: Event::Started { guest_id: id } });
                    }
                    Call::Upload { .. } => {
                        uploading = Some(id);
                        answers.push(ServerMessage::Event { id, event: Event::Wanted });
                    }
                    other => panic!("{other:?}"),
                }
            }
            ClientMessage::Chunk { id, bytes } if uploading == Some(id) => {
                n_bytes += bytes.len();
                if n_bytes == N_BYTES {
                    uploading = None;
                    answers.push(end(id, Outcome::Ok { value: Value::Done }));
                }
            }
            ClientMessage::Cancel { id } if open.lock().expect("no panic").contains(&id) => {
                if uploading == Some(id) {
                    (n_bytes, uploading) = (0, None);
                }
                answers.push(end(id, failed(ErrorCode::Cancelled)));
            }
            _ => {}
        }
        for answer in answers {
            let mut buffer = FrameBuffer::new(FRAME_BYTES_MAX);
            buffer.push(&answer).expect("small");
            if buffer.write(&mut writer).await.is_err() {
                return;
            }
        }
    }
}

async fn open() -> (Client, Open) {
    let (ours, theirs) = tokio::io::duplex(4 << 10);
    let open = Open::default();
    tokio::spawn(play(theirs, open.clone()));
    (Client::over(ours).await.expect("greeted"), open)
}

async fn nothing_is_open(open: &Open, what: &str) {
    for _ in 0..10_000 {
        if open.lock().expect("no panic").is_empty() {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("{what}: {:?} are still open", open.lock());
}

/// One thread, in which every turn of a task is a moment.
fn run(test: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.event_interval(1).enable_all().build().expect("a runtime").block_on(test);
}

/// All moments are tried until the guest has started before.
#[test]
fn a_cancel_is_heard_at_every_moment() {
    run(cancel_at_every_moment());
}

async fn cancel_at_every_moment() {
    let mut n_turns = 0;
    let mut n_before_start = 0;
    loop {
        let (client, open) = open().await;
        let mut guest =
            client.start(Program::wasm(vec![7; N_BYTES]), StartOptions::default()).await.expect("connected");
        for _ in 0..n_turns {
            tokio::task::yield_now().await;
        }
        guest.cancel();
        let mut has_started = false;
        let error = loop {
            match tokio::time::timeout(std::time::Duration::from_secs(120), guest.next()).await {
                Ok(Some(Ok(event))) => has_started |= matches!(event, Event::Started { .. }),
                Ok(Some(Err(error))) => break error,
                Ok(None) => panic!("after {n_turns} turns: a guest that runs for ever ended well"),
                Err(_) => panic!("after {n_turns} turns: the cancel is lost"),
            }
        };
        assert_eq!(error.code(), Some(&ErrorCode::Cancelled), "after {n_turns} turns");
        nothing_is_open(&open, &format!("after {n_turns} turns")).await;
        if has_started {
            break;
        }
        n_before_start += 1;
        n_turns += 1;
    }
    assert!(n_before_start > 10, "the start takes some turns: {n_before_start}");
}

#[test]
fn a_guest_that_is_dropped_is_gone_at_every_moment() {
    run(drop_at_many_moments());
}

async fn drop_at_many_moments() {
    for n_turns in 0..400 {
        let (client, open) = open().await;
        let guest =
            client.start(Program::wasm(vec![7; N_BYTES]), StartOptions::default()).await.expect("connected");
        for _ in 0..n_turns {
            tokio::task::yield_now().await;
        }
        drop(guest);
        // Whatever is on its way gets its turn.
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        nothing_is_open(&open, &format!("after {n_turns} turns")).await;
    }
}
