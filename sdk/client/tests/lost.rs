//! A daemon, played by hand, that goes without a word: whatever is under way ends at once, with an error that says that the
//! same may succeed another time.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use trellis_client::{Client, Error, Event, Program, StartOptions};
use trellis_wire::{
    Call, ClientMessage, FRAME_BYTES_MAX, FRAME_BYTES_MIN, FrameBuffer, FrameReader, Hello, Room,
    ServerMessage,
};

/// Long enough for any machine; no test that passes waits so long.
const PATIENCE: Duration = Duration::from_secs(60);

async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("{what} hangs"))
}

/// A client, and the daemon's end of its connection.
async fn connected() -> (Client, DuplexStream) {
    let (near, mut far) = tokio::io::duplex(1 << 10);
    let hello = async {
        Hello::read(&mut far).await.expect("a hello");
        Hello::ours().write(&mut far).await.expect("sent");
    };
    let (client, ()) = tokio::join!(Client::over(near), hello);
    (client.expect("the daemon said hello"), far)
}

fn lost(what: &str, error: &Error) {
    assert!(matches!(error, Error::ConnectionLost(_)) && error.is_retryable(), "{what}: {error:?}");
}

#[tokio::test]
async fn a_daemon_that_goes_before_it_has_said_hello_may_come_again() {
    let whole = Hello::ours().encode();
    for n_bytes in 0..whole.len() {
        let (near, mut far) = tokio::io::duplex(1 << 10);
        far.write_all(&whole[..n_bytes]).await.expect("there is room");
        drop(far);
        lost("a hello", &in_time("a hello", Client::over(near)).await.expect_err("it has gone"));
    }
}

#[tokio::test]
async fn what_waits_for_room_hears_that_the_daemon_has_gone() {
    let (client, mut far) = connected().await;
    // Twice what the outbox holds, of which the daemon reads the first bytes and no more.
    let n_bytes = FRAME_BYTES_MIN as usize / 2;
    let n_starts = 2 * Room::Bulk.n_bytes() / n_bytes;
    let options = move || {
        let arguments = vec!["x".repeat(n_bytes)];
        StartOptions { arguments, ..StartOptions::default() }
    };
    let starts: Vec<_> = (0..n_starts)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.start(Program::named("guest"), options()).await?.wait().await })
        })
        .collect();
    let asker = client.clone();
    let ask = tokio::spawn(async move { asker.ps().await });
    far.read_exact(&mut [0; 64]).await.expect("requests come");
    drop(far);
    for ended in in_time("a start", join_all(starts)).await {
        lost("a start", &ended.expect("no panic").expect_err("it has gone"));
    }
    lost("a question", &in_time("a question", ask).await.expect("no panic").expect_err("it has gone"));
    lost("a later question", &in_time("a later question", client.info()).await.expect_err("it has gone"));
}

#[tokio::test]
async fn messages_to_a_guest_are_lost_with_the_connection() {
    for has_started in [false, true] {
        let (client, far) = connected().await;
        let (reader, mut writer) = tokio::io::split(far);
        let mut frames = FrameReader::new(reader, FRAME_BYTES_MAX);
        let mut guest = client.start(Program::named("guest"), StartOptions::default()).await.expect("asked");
        let asked = frames.next::<ClientMessage>().await.expect("whole").expect("a request");
        let ClientMessage::Request { id, call: Call::Start(_) } = asked else { panic!("{asked:?}") };
        if has_started {
            let mut answers = FrameBuffer::new(FRAME_BYTES_MAX);
            let event = Event::Started { guest_id: 1 };
            answers.push(&ServerMessage::Event { id, event }).expect("it fits");
            // The next frame is cut short.
            answers.write(&mut writer).await.expect("sent");
            writer.write_all(&[9, 0, 0, 0, 1]).await.expect("sent");
            assert!(matches!(guest.next().await, Some(Ok(Event::Started { guest_id: 1 }))));
        }
        let sender = guest.sender();
        let sending = tokio::spawn(async move { sender.send("hello").await });
        if has_started {
            let sent = frames.next::<ClientMessage>().await.expect("whole").expect("a message");
            assert!(matches!(sent, ClientMessage::Request { call: Call::Message { .. }, .. }), "{sent:?}");
        } else {
            tokio::task::yield_now().await;
        }
        drop((frames, writer));
        lost("a message", &in_time("a message", sending).await.expect("no panic").expect_err("it has gone"));
        lost("the guest", &in_time("the guest", guest.wait()).await.expect_err("it has gone"));
        lost("a later message", &in_time("a later message", guest.send("again")).await.expect_err("gone"));
        lost("the end of messages", &in_time("the end", guest.end_messages()).await.expect_err("gone"));
    }
}
