//! What one client may ask for, and what happens at each limit.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use trellis_engine::account::Resource;
use trellis_wire::{
    Call, ClientMessage, ComponentHash, ErrorCode, Event, OUTPUT_OVERHEAD_BYTES, Room, Value,
};

use super::{Raw, World};
use crate::accounts::Accounts;
use crate::config::{Budgets, SharedBudget};
use crate::guest::GuestLimits;
use crate::session::{SessionLimits, StopReason};

fn hash(bytes: &[u8]) -> ComponentHash {
    ComponentHash(*blake3::hash(bytes).as_bytes())
}

async fn upload(raw: &mut Raw, id: u64, announced: ComponentHash, n_bytes: u64, chunks: &[&[u8]]) {
    raw.send(ClientMessage::Request { id, call: Call::Upload { hash: announced, n_bytes } }).await;
    for chunk in chunks {
        raw.send(ClientMessage::Chunk { id, bytes: chunk.to_vec() }).await;
    }
}

#[tokio::test]
async fn uploads_are_what_was_announced() {
    let world = World::with_guests(
        SessionLimits::default(),
        GuestLimits { component_bytes: 400_000, ..GuestLimits::default() },
    );
    let mut raw = world.raw().await;
    let large = vec![7; 300_000];

    upload(&mut raw, 1, hash(b"ab"), 2, &[b"a", b"b"]).await;
    assert_eq!(raw.end().await, (1, Ok(Value::Done)));
    upload(&mut raw, 2, hash(b"xy"), 2, &[b"x", b"c", b"late"]).await;
    assert_eq!(raw.end().await.1.unwrap_err().code, ErrorCode::HashMismatch);
    upload(&mut raw, 3, hash(b"xy"), 2, &[b"x", b"yc", b"late"]).await;
    let error = raw.end().await.1.unwrap_err();
    assert_eq!(
        (error.code, error.value.as_deref(), error.limit),
        (ErrorCode::LimitExceeded, Some("3"), Some(2))
    );
    upload(&mut raw, 4, hash(b""), 0, &[]).await;
    assert_eq!(raw.end().await.1.unwrap_err().code, ErrorCode::InvalidComponent);
    upload(&mut raw, 5, hash(b""), 400_001, &[b"late"]).await;
    let error = raw.end().await.1.unwrap_err();
    assert_eq!((error.value.as_deref(), error.limit), (Some("400001"), Some(400_000)));
    upload(&mut raw, 6, hash(&large), 300_000, &[&large]).await;
    let error = raw.end().await.1.unwrap_err();
    assert_eq!((error.name.as_deref(), error.limit), (Some("chunk bytes"), Some(256 * 1024)));
    upload(&mut raw, 7, hash(&large), 300_000, &[&large[..200_000], &large[200_000..]]).await;
    assert_eq!(raw.end().await, (7, Ok(Value::Done)));
    let stored = world.fake.components.lock().unwrap().remove(&hash(&large)).expect("it is stored");
    let n_bytes_held = stored.try_into_mut().expect("nobody else has it").capacity();
    assert_eq!(n_bytes_held, 300_000, "no more is held than what was sent");
    assert_eq!(world.fake.components.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn uploads_at_a_time_are_counted_for_the_user() {
    let limits = SessionLimits { n_uploads: 2, n_uploads_waiting: 2, ..SessionLimits::default() };
    let world = World::with(limits);
    let (mut one, mut two) = (world.raw().await, world.raw().await);
    for (id, component) in [(1, b"ab"), (2, b"cd")] {
        upload(&mut one, id, hash(component), 2, &[&component[..1]]).await;
        assert_eq!(one.event().await, Event::Wanted);
    }
    upload(&mut two, 1, hash(b"ef"), 2, &[]).await;
    upload(&mut two, 2, hash(b"gh"), 2, &[]).await;
    assert!(two.is_silent().await, "who is over the limit waits");
    // Requests are taken in order: both uploads wait by then.
    two.send(ClientMessage::Request { id: 3, call: Call::Models }).await;
    assert_eq!(two.end().await.0, 3);
    upload(&mut one, 3, hash(b"ij"), 2, &[]).await;
    let error = one.end().await.1.unwrap_err();
    assert_eq!(
        (error.name.as_deref(), error.value.as_deref(), error.limit),
        (Some("waiting uploads"), Some("3"), Some(2))
    );

    one.send(ClientMessage::Cancel { id: 1 }).await;
    assert_eq!(one.end().await.1.unwrap_err().code, ErrorCode::Cancelled);
    assert_eq!(two.event().await, Event::Wanted);
    two.send(ClientMessage::Chunk { id: 1, bytes: b"ef".to_vec() }).await;
    // The place goes on to the second one, whose bytes would be refused otherwise.
    assert_eq!(two.end().await, (1, Ok(Value::Done)));
    drop(one);
    two.send(ClientMessage::Chunk { id: 2, bytes: b"gh".to_vec() }).await;
    assert_eq!(two.end().await, (2, Ok(Value::Done)));
    for id in 4..7 {
        upload(&mut two, id, hash(b"ab"), 2, &[b"a", b"b"]).await;
        assert_eq!(two.end().await, (id, Ok(Value::Done)));
    }
    assert_eq!(world.sessions.n_uploads(), 0);
}

#[tokio::test]
async fn one_component_is_uploaded_by_one_client_at_a_time() {
    let world = World::new();
    let (mut one, mut two, mut three) = (world.raw().await, world.raw().await, world.raw().await);
    for raw in [&mut one, &mut two, &mut three] {
        upload(raw, 1, hash(b"ab"), 2, &[]).await;
        raw.send(ClientMessage::Request { id: 2, call: Call::Models }).await;
        assert_eq!(raw.end().await.0, 2);
    }
    one.send(ClientMessage::Chunk { id: 1, bytes: b"a".to_vec() }).await;
    assert!(two.is_silent().await && three.is_silent().await);
    // The next one takes over, from the first byte.
    drop(one);
    assert_eq!(two.event().await, Event::Wanted);
    two.send(ClientMessage::Chunk { id: 1, bytes: b"xy".to_vec() }).await;
    assert_eq!(two.end().await.1.unwrap_err().code, ErrorCode::HashMismatch);
    assert_eq!(three.event().await, Event::Wanted);
    upload(&mut two, 3, hash(b"ab"), 2, &[]).await;
    three.send(ClientMessage::Chunk { id: 1, bytes: b"ab".to_vec() }).await;
    assert_eq!(three.end().await, (1, Ok(Value::Done)));
    assert_eq!(two.end().await, (3, Ok(Value::Done)), "what another one has brought is there");
    assert_eq!(world.fake.n_stored.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn bytes_of_an_upload_come_when_they_are_wanted() {
    let world = World::with(SessionLimits { n_uploads: 1, ..SessionLimits::default() });
    let (mut one, mut two) = (world.raw().await, world.raw().await);
    upload(&mut one, 1, hash(b"abc"), 3, &[b"a"]).await;
    assert_eq!(one.event().await, Event::Wanted);
    upload(&mut two, 1, hash(b"de"), 2, &[b"d"]).await;
    let error = two.end().await.1.unwrap_err();
    assert_eq!((error.code, error.name.as_deref()), (ErrorCode::InvalidArgument, Some("chunk")));
    // Nor before the daemon knows whether the user may.
    world.fake.is_at_a_loss.store(true, Ordering::SeqCst);
    upload(&mut two, 2, hash(b"de"), 2, &[b"d"]).await;
    let error = two.end().await.1.unwrap_err();
    assert_eq!((error.code, error.name.as_deref()), (ErrorCode::InvalidArgument, Some("chunk")));
}

#[tokio::test]
async fn bytes_of_an_upload_go_on_coming() {
    let world = World::with(SessionLimits { n_uploads: 1, upload_idle_ms: 100, ..SessionLimits::default() });
    let (mut one, mut two) = (world.raw().await, world.raw().await);
    upload(&mut one, 1, hash(b"abc"), 3, &[b"a"]).await;
    assert_eq!(one.event().await, Event::Wanted);
    upload(&mut two, 1, hash(b"de"), 2, &[]).await;
    for _ in 0..3 {
        // Longer than the timeout in all, with progress in between.
        tokio::time::sleep(Duration::from_millis(60)).await;
        one.send(ClientMessage::Chunk { id: 1, bytes: Vec::new() }).await;
    }
    one.send(ClientMessage::Chunk { id: 1, bytes: b"b".to_vec() }).await;
    let error = one.end().await.1.unwrap_err();
    assert_eq!(
        (error.code, error.name.as_deref(), error.limit),
        (ErrorCode::LimitExceeded, Some("upload idle ms"), Some(100))
    );
    assert_eq!(two.event().await, Event::Wanted, "the place of an upload that stands still is free");
}

#[tokio::test]
async fn requests_in_flight_are_counted() {
    let world = World::with(SessionLimits { n_requests: 2, ..SessionLimits::default() });
    let mut raw = world.raw().await;
    raw.start(1, "forever", "", 10).await;
    raw.start(2, "forever", "", 10).await;
    raw.start(3, "forever", "", 10).await;
    let (id, error) = raw.end().await;
    let error = error.unwrap_err();
    assert_eq!((id, error.value.as_deref(), error.limit), (3, Some("3"), Some(2)));
    raw.send(ClientMessage::Cancel { id: 2 }).await;
    assert_eq!(raw.end().await.0, 2);
    raw.send(ClientMessage::Request { id: 4, call: Call::Models }).await;
    assert_eq!(raw.end().await.0, 4);
}

#[tokio::test]
async fn requests_under_way_are_paid_for() {
    let world = World::new();
    let session = SharedBudget { host_bytes: Some(10 << 10), ..SharedBudget::default() };
    let budgets = Budgets { session, ..Budgets::default() };
    world.fake.accounts.set(Accounts::new(&budgets, 1 << 30)).expect("nobody is connected");
    let mut raw = world.raw().await;
    // Four send, the others wait. Ten are paid for, and eight are not.
    for id in 1..=19_u64 {
        upload(&mut raw, id, hash(&id.to_le_bytes()), 1, &[]).await;
    }
    let (id, error) = raw.end().await;
    let error = error.unwrap_err();
    assert_eq!(
        (id, error.code, error.name.as_deref(), error.limit),
        (19, ErrorCode::BudgetExceeded, Some("host_bytes"), Some(10 << 10))
    );
    // What is over is paid for no longer.
    raw.send(ClientMessage::Cancel { id: 18 }).await;
    assert_eq!(raw.end().await.0, 18);
    upload(&mut raw, 20, hash(b"ab"), 2, &[]).await;
    assert!(raw.is_silent().await, "it waits, and is not refused");
    assert_eq!(world.fake.accounts.get().map(|accounts| accounts.used(Resource::HostBytes)), Some(10 << 10));
}

#[tokio::test]
async fn a_program_of_a_name_that_no_file_has_is_refused_at_once() {
    let world = World::new();
    let mut raw = world.raw().await;
    raw.start(1, &"é".repeat(400_000), "", 10).await;
    let (id, error) = raw.end().await;
    let error = error.unwrap_err();
    assert_eq!((id, &error.code, error.name.as_deref()), (1, &ErrorCode::UnknownProgram, Some("program")));
    assert!(error.message.len() < 500 && error.message.contains("800000 bytes"), "{error}");
    assert_eq!(world.fake.n_alive(), 0);
}

#[tokio::test]
async fn who_asks_much_may_still_stop_and_small_frames_do_not_wait_for_large_ones() {
    let world = World::new();
    let mut raw = world.raw().await;
    raw.start(1, "forever", "", 1000).await;
    let Event::Started { guest_id } = raw.event().await else { panic!("it is started first") };
    // All turns of the user are taken, but that for stops.
    let turns = world.sessions.turns.of(super::ALICE.uid);
    let _questions = turns.questions.acquire_many(2).await.unwrap();
    let _frames = turns.frames.acquire().await.unwrap();
    let mut other = world.raw().await;
    other.send(ClientMessage::Request { id: 1, call: Call::Guests }).await;
    other.send(ClientMessage::Request { id: 2, call: Call::Stop { guest_id } }).await;
    assert_eq!(other.end().await, (2, Ok(Value::Done)));
    assert_eq!(raw.end().await.0, 1);
    // Stops have turns of their own.
    let stops = turns.stops.acquire().await.unwrap();
    other.send(ClientMessage::Request { id: 3, call: Call::Stop { guest_id: 99 } }).await;
    assert!(other.is_silent().await);
    drop(stops);
    assert_eq!(other.end().await.0, 3);
}

#[tokio::test]
async fn connections_are_counted_for_the_user() {
    let world = World::with(SessionLimits { n_connections: 1, ..SessionLimits::default() });
    let first = world.raw().await;
    let mut second = world.raw().await;
    let fault = second.fault().await;
    assert_eq!((fault.code, fault.limit), (ErrorCode::LimitExceeded, Some(1)));
    drop((first.reader, first.frames, first.writer));
    first.session.await.unwrap().unwrap();
    let mut third = world.raw().await;
    third.send(ClientMessage::Request { id: 1, call: Call::Models }).await;
    assert_eq!(third.end().await.0, 1);
}

#[tokio::test]
async fn output_waits_for_credit() {
    let world = World::new();
    let mut raw = world.raw().await;
    let credit = |n_bytes: u64, n_outputs: u64| n_bytes + n_outputs * OUTPUT_OVERHEAD_BYTES as u64;
    raw.start(1, "count", "1000", credit(4, 2)).await;
    assert!(matches!(raw.event().await, Event::Started { .. }));
    assert_eq!(raw.event().await, Event::Text { text: "0 ".into() });
    assert_eq!(raw.event().await, Event::Text { text: "1 ".into() });
    assert!(raw.is_silent().await);
    raw.send(ClientMessage::Credit { id: 1, n_bytes: credit(3, 1) }).await;
    assert_eq!(raw.event().await, Event::Text { text: "2 ".into() });
    assert!(raw.is_silent().await);
    raw.send(ClientMessage::Credit { id: 1, n_bytes: credit(1, 1) }).await;
    assert_eq!(raw.event().await, Event::Text { text: "3 ".into() });
    raw.send(ClientMessage::Request { id: 2, call: Call::Models }).await;
    assert_eq!(raw.end().await.0, 2, "waiting for credit holds up nothing else");
}

#[tokio::test]
async fn credit_is_bounded() {
    let world = World::with_guests(
        SessionLimits::default(),
        GuestLimits { output_bytes_in_flight: 1000, ..GuestLimits::default() },
    );
    let mut raw = world.raw().await;
    raw.start(1, "forever", "", 1001).await;
    let error = raw.end().await.1.unwrap_err();
    assert_eq!((error.value.as_deref(), error.limit), (Some("1001"), Some(1000)));
    raw.start(2, "forever", "", 600).await;
    raw.send(ClientMessage::Credit { id: 2, n_bytes: 400 }).await;
    raw.send(ClientMessage::Request { id: 3, call: Call::Models }).await;
    assert_eq!(raw.end().await.0, 3);
    raw.send(ClientMessage::Credit { id: 2, n_bytes: u64::MAX }).await;
    let (id, error) = raw.end().await;
    let error = error.unwrap_err();
    let most = u64::MAX.to_string();
    assert_eq!((id, &error.code, error.limit), (2, &ErrorCode::LimitExceeded, Some(1000)));
    assert_eq!((error.name.as_deref(), error.value.as_deref()), (Some("credit bytes"), Some(&*most)));
    let overdrawn = StopReason::Overdrawn { open_bytes: u64::MAX, limit_bytes: 1000 };
    assert_eq!(*world.fake.stop_reasons.lock().unwrap(), [overdrawn]);
    // What was used may be granted again, however often.
    raw.start(4, "flood", "", 1000).await;
    raw.send(ClientMessage::Cancel { id: 4 }).await;
    assert_eq!(raw.end().await.0, 4);
    raw.start(5, "count", "100000", 1000).await;
    let mut n_bytes = 0;
    while n_bytes < 50_000 {
        let event = raw.event().await;
        n_bytes += event.credit_bytes();
        raw.send(ClientMessage::Credit { id: 5, n_bytes: event.credit_bytes() as u64 }).await;
    }
    // Also while the guest is being started.
    raw.start(6, "slow start", "", 1000).await;
    raw.send(ClientMessage::Credit { id: 6, n_bytes: 1 }).await;
    let error = loop {
        match raw.end().await {
            (6, result) => break result.unwrap_err(),
            (id, _) => assert_eq!(id, 5),
        }
    };
    assert_eq!((error.value.as_deref(), error.limit), (Some("1001"), Some(1000)), "{error}");
}

#[tokio::test]
async fn a_full_inbox_makes_the_sender_wait() {
    let world = World::with_guests(
        SessionLimits { message_bytes: 3, ..SessionLimits::default() },
        GuestLimits { n_messages: 2, ..GuestLimits::default() },
    );
    let mut raw = world.raw().await;
    let message = |to, text: &str| Call::Message { to, text: text.into() };
    raw.start(1, "forever", "", 1000).await;
    assert!(matches!(raw.event().await, Event::Started { .. }));
    for id in 2..5 {
        raw.send(ClientMessage::Request { id, call: message(1, "m") }).await;
    }
    assert_eq!(raw.end().await, (2, Ok(Value::Done)));
    assert_eq!(raw.end().await, (3, Ok(Value::Done)));
    assert!(raw.is_silent().await);
    raw.send(ClientMessage::Request { id: 5, call: message(1, "four") }).await;
    assert_eq!(raw.end().await.1.unwrap_err().limit, Some(3));
    raw.send(ClientMessage::Request { id: 6, call: message(9, "m") }).await;
    assert_eq!(raw.end().await.1.unwrap_err().code, ErrorCode::UnknownGuest);
    raw.send(ClientMessage::EndMessages { id: 1 }).await;
    raw.send(ClientMessage::Request { id: 7, call: message(1, "m") }).await;
    assert_eq!(raw.end().await.1.unwrap_err().code, ErrorCode::InvalidArgument);
    raw.send(ClientMessage::Cancel { id: 1 }).await;
    let mut ends = [raw.end().await, raw.end().await];
    ends.sort_by_key(|(id, _)| *id);
    assert_eq!(ends[0].0, 1);
    assert_eq!(
        ends[1].1.as_ref().unwrap_err().code,
        ErrorCode::UnknownGuest,
        "the waiting message learns of it"
    );
}

#[tokio::test]
async fn waiting_messages_are_bounded_in_bytes() {
    let limits = SessionLimits { waiting_message_bytes: 10, ..SessionLimits::default() };
    let world = World::with_guests(limits, GuestLimits { n_messages: 1, ..GuestLimits::default() });
    let mut raw = world.raw().await;
    let message = |text: &str| Call::Message { to: 1, text: text.into() };
    raw.start(1, "forever", "", 1000).await;
    assert!(matches!(raw.event().await, Event::Started { .. }));
    raw.send(ClientMessage::Request { id: 2, call: message("in the box") }).await;
    assert_eq!(raw.end().await, (2, Ok(Value::Done)));
    raw.send(ClientMessage::Request { id: 3, call: message("sixsix") }).await;
    raw.send(ClientMessage::Request { id: 4, call: message("four") }).await;
    assert!(raw.is_silent().await);
    raw.send(ClientMessage::Request { id: 5, call: message("1") }).await;
    let (id, error) = raw.end().await;
    let error = error.unwrap_err();
    assert_eq!(
        (id, error.code, error.name.as_deref()),
        (5, ErrorCode::LimitExceeded, Some("waiting message bytes"))
    );
    assert_eq!((error.value.as_deref(), error.limit), (Some("11"), Some(10)));
    // What no longer waits counts no longer.
    raw.send(ClientMessage::Cancel { id: 4 }).await;
    assert_eq!(raw.end().await.0, 4);
    raw.send(ClientMessage::Request { id: 6, call: message("1") }).await;
    assert!(raw.is_silent().await);
}

#[tokio::test]
async fn messages_that_find_room_are_never_refused() {
    let limits = SessionLimits { waiting_message_bytes: 1, ..SessionLimits::default() };
    let world = World::with_guests(limits, GuestLimits { n_messages: 256, ..GuestLimits::default() });
    let mut raw = world.raw().await;
    raw.start(1, "forever", "", 1000).await;
    for id in 2..258 {
        raw.send(ClientMessage::Request { id, call: Call::Message { to: 1, text: "m".into() } }).await;
    }
    for id in 2..258 {
        assert_eq!(raw.end().await, (id, Ok(Value::Done)));
    }
}

#[tokio::test]
async fn large_outputs_come_in_pieces_or_not_at_all() {
    let world = World::new();
    let mut raw = world.raw().await;
    raw.start(1, "large", "3000000", 4_000_000).await;
    let mut n_bytes = 0;
    while n_bytes < 3_000_000 {
        n_bytes += raw.event().await.output_bytes().unwrap_or_default();
    }
    assert_eq!(raw.end().await, (1, Ok(Value::Done)));
    raw.start(2, "json", "3000000", 4_000_000).await;
    let error = raw.end().await.1.unwrap_err();
    assert_eq!((error.name.as_deref(), error.value.as_deref()), (Some("output bytes"), Some("3000000")));
    raw.send(ClientMessage::Request { id: 3, call: Call::Models }).await;
    assert_eq!(raw.end().await.0, 3);
}

#[tokio::test]
async fn a_client_that_never_reads_is_shut_down_in_time() {
    let world = World::with(SessionLimits { stop_ms: 50, ..SessionLimits::default() });
    let mut raw = world.raw().await;
    for id in 1..5 {
        raw.start(id, "flood", "", 4_000_000).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    world.shutdown.cancel();
    tokio::time::timeout(super::PATIENCE, raw.session).await.expect("in time").unwrap().unwrap();
    world.all_gone().await;
}

#[tokio::test]
async fn messages_that_nobody_receives_are_bounded_for_guest_session_and_user() {
    let guest_limits = GuestLimits { n_messages: 100, inbox_bytes: 30_000, ..GuestLimits::default() };
    let world = World::with_guests(SessionLimits::default(), guest_limits);
    let of = |host_bytes| SharedBudget { host_bytes: Some(host_bytes), ..SharedBudget::default() };
    let budgets = Budgets { session: of(100_000), user: of(150_000), ..Budgets::default() };
    world.fake.accounts.set(Accounts::new(&budgets, 1 << 30)).expect("nobody is connected");
    let (mut one, mut two) = (world.raw().await, world.raw().await);
    // With what it costs to hold it, a message of 9,936 bytes takes 10,000.
    let message = |id, to| {
        let call = Call::Message { to, text: "m".repeat(9_936) };
        ClientMessage::Request { id, call }
    };
    for id in 1..3 {
        one.start(id, "forever", "", 1000).await;
        assert!(matches!(one.event().await, Event::Started { .. }));
    }
    for id in 3..6 {
        one.send(message(id, 1)).await;
        assert_eq!(one.end().await, (id, Ok(Value::Done)));
    }
    for id in 6..8 {
        one.send(message(id, 1)).await;
    }
    assert!(one.is_silent().await, "a full inbox makes the sender wait");
    for id in 8..11 {
        one.send(message(id, 2)).await;
        assert_eq!(one.end().await, (id, Ok(Value::Done)), "another guest's inbox has room");
    }
    for id in 11..13 {
        one.send(message(id, 2)).await;
    }
    one.send(message(13, 2)).await;
    let (id, error) = one.end().await;
    let error = error.unwrap_err();
    assert_eq!(
        (id, error.name.as_deref(), error.value.as_deref(), error.limit),
        (13, Some("host_bytes"), Some("110000"), Some(100_000))
    );
    let used = world.sessions.used(super::ALICE);
    assert_eq!(used.user.n_connections, 2);
    assert_eq!(used.all, used.user, "there is no other user");
    assert!(error.message.contains("session"), "{error:?}");
    two.start(1, "forever", "", 1000).await;
    assert!(matches!(two.event().await, Event::Started { .. }));
    for id in 2..7 {
        two.send(message(id, 1)).await;
    }
    two.send(message(7, 1)).await;
    let error = loop {
        if let (7, error) = two.end().await {
            break error.unwrap_err();
        }
    };
    assert_eq!((error.value.as_deref(), error.limit), (Some("160000"), Some(150_000)));
    assert!(error.message.contains("user"), "{error:?}");
    // What is gone counts no longer.
    one.send(ClientMessage::Cancel { id: 1 }).await;
    while one.end().await.0 != 1 {}
    two.send(ClientMessage::Cancel { id: 6 }).await;
    assert_eq!(two.end().await.0, 6);
    two.send(message(8, 1)).await;
    assert!(two.is_silent().await, "it waits, and is not refused");
}

#[tokio::test]
async fn frames_and_uploads_on_their_way_in_are_paid_for() {
    let world = World::new();
    let of = |host_bytes| SharedBudget { host_bytes: Some(host_bytes), ..SharedBudget::default() };
    let budgets = Budgets { user: of(1_200_000), ..Budgets::default() };
    world.fake.accounts.set(Accounts::new(&budgets, 1 << 30)).expect("nobody is connected");
    let used = || world.fake.accounts.get().map(|accounts| accounts.used(Resource::HostBytes));
    // One that has the largest part of a frame and not all of it.
    let mut one = world.raw().await;
    one.writer.write_all(&700_000_u32.to_le_bytes()).await.expect("it is read");
    one.writer.write_all(&[0; 600_000]).await.expect("it is read");
    while used() < Some(530_000) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut two = world.raw().await;
    let big = vec![7; 500_000];
    upload(&mut two, 1, hash(&big), 500_000, &[]).await;
    assert!(matches!(two.event().await, Event::Wanted));
    for chunk in big.chunks(250_000) {
        two.send(ClientMessage::Chunk { id: 1, bytes: chunk.to_vec() }).await;
    }
    let error = two.end().await.1.expect_err("there is no room beside the first");
    assert_eq!(
        (error.code, error.name.as_deref(), error.limit),
        (ErrorCode::BudgetExceeded, Some("host_bytes"), Some(1_200_000))
    );
    // A second frame finds no room at all: its session ends.
    let mut three = world.raw().await;
    three.writer.write_all(&900_000_u32.to_le_bytes()).await.expect("it is read");
    let _ = three.writer.write_all(&[0; 800_000]).await;
    let fault = three.fault().await;
    assert_eq!((fault.code, fault.name.as_deref()), (ErrorCode::BudgetExceeded, Some("host_bytes")));
    drop((one, two, three));
    world.all_gone().await;
    tokio::time::timeout(super::PATIENCE, async {
        while used() != Some(0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("all is given back");
}

/// Lets the outbox of a connection fill up without reading.
async fn unread(world: &World) -> Raw {
    let mut raw = world.raw().await;
    for id in 1..5 {
        raw.start(id, "flood", "", 4_000_000).await;
    }
    while world.fake.n_alive() < 4 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    raw
}

#[tokio::test]
async fn who_does_not_read_may_cancel_and_grant() {
    let world = World::new();
    let mut raw = unread(&world).await;
    raw.send(ClientMessage::Credit { id: 4, n_bytes: u64::MAX }).await;
    for id in 1..4 {
        raw.send(ClientMessage::Cancel { id }).await;
    }
    world.all_gone().await;
    let reasons = world.fake.stop_reasons.lock().unwrap().clone();
    assert_eq!(reasons.len(), 4);
    let is_overdrawn = |reason: &StopReason| matches!(reason, StopReason::Overdrawn { .. });
    assert!(reasons.iter().any(is_overdrawn) && reasons.contains(&StopReason::Cancelled));
    let mut ended = [raw.end().await.0, raw.end().await.0, raw.end().await.0, raw.end().await.0];
    ended.sort_unstable();
    assert_eq!(ended, [1, 2, 3, 4], "all is there once it reads again");
}

#[tokio::test]
async fn requests_of_who_does_not_read_wait_at_a_bound() {
    let world = World::new();
    let mut raw = unread(&world).await;
    let mut n_sent = 0_u64;
    let request = |n: u64| ClientMessage::Request { id: 5 + n, call: Call::Unknown };
    // Longer than a machine stands still.
    while tokio::time::timeout(Duration::from_secs(5), raw.send(request(n_sent))).await.is_ok() {
        n_sent += 1;
        // Each answer takes more than 50 bytes, a request less than 100 on its way.
        let n_max = (Room::Answers.n_bytes() / 50 + (64 << 10)) as u64;
        assert!(n_sent < n_max, "{n_sent} requests were taken from a client that does not read");
    }
    assert!(n_sent > 100, "a few requests are answered all the same: {n_sent}");
    // The last one is half written; what came before is answered, in order.
    let mut n_answered = 0;
    while n_answered < n_sent {
        let (id, result) = raw.end().await;
        if id < 5 {
            continue;
        }
        assert_eq!((id, result.unwrap_err().code), (5 + n_answered, ErrorCode::Unsupported));
        n_answered += 1;
    }
}
