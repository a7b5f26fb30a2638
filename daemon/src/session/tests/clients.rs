//! The client crate and the session together.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use trellis_client::{Client, Error, ErrorCode, Event, Guest, Lost, Program, Stage, StartOptions};
use trellis_wire::{Call, ClientMessage, GuestUsage, Hello, VERSION_OF_MODELS, Value};

use super::{PATIENCE, World};
use crate::session::{SessionLimits, StopReason};

fn with_argument(argument: &str) -> StartOptions {
    StartOptions { arguments: vec![argument.to_owned()], ..StartOptions::default() }
}

async fn start(client: &Client, name: &str, argument: &str) -> Guest {
    client.start(Program::named(name), with_argument(argument)).await.unwrap()
}

fn code(error: &Error) -> &ErrorCode {
    error.code().unwrap_or_else(|| panic!("{error:?} has no code"))
}

#[tokio::test]
async fn a_guest_streams_and_ends() {
    let world = World::new();
    let client = world.client().await;
    let mut guest = start(&client, "count", "3").await;
    assert_eq!(guest.next().await.unwrap().unwrap(), Event::Started { guest_id: 1 });
    for n in 0..3 {
        assert_eq!(guest.next().await.unwrap().unwrap(), Event::Text { text: format!("{n} ") });
    }
    assert!(guest.next().await.is_none());
    assert!(guest.next().await.is_none());
    let usage = guest.usage().unwrap();
    assert_eq!((usage.n_tokens, usage.output_bytes), (1, 6));
    assert_eq!(start(&client, "count", "12").await.text().await.unwrap(), "0 1 2 3 4 5 6 7 8 9 10 11 ");
}

#[tokio::test]
async fn errors_keep_code_and_fields() {
    let world = World::new();
    let client = world.client().await;
    let error = start(&client, "fail", "out of luck").await.text().await.unwrap_err();
    assert_eq!((code(&error), error.to_string().as_str()), (&ErrorCode::GuestFailed, "out of luck"));
    let error = start(&client, "nowhere", "").await.wait().await.unwrap_err();
    assert!(matches!(&error, Error::Daemon(body) if body.name.as_deref() == Some("nowhere")));
    assert_eq!(code(&client.stop(99).await.unwrap_err()), &ErrorCode::UnknownGuest);
    assert_eq!(code(&client.shutdown().await.unwrap_err()), &ErrorCode::PermissionDenied);
    assert_eq!(client.models().await.unwrap()[0].name, "tiny");
}

#[tokio::test]
async fn an_answer_larger_than_a_frame_is_an_error() {
    let world = World::new();
    let client = world.client().await;
    let error = client.info().await.unwrap_err();
    assert!(matches!(&error, Error::Daemon(body) if body.limit == Some(1 << 20)), "{error:?}");
    assert_eq!(client.models().await.unwrap().len(), 1);
}

#[tokio::test]
async fn an_error_longer_than_a_frame_is_cut_and_keeps_its_code() {
    let world = World::new();
    let client = world.client().await;
    let mut guest = start(&client, "fail at length", "300001").await;
    let error = guest.wait().await.unwrap_err();
    let Error::Daemon(body) = &error else { panic!("{error:?}") };
    assert_eq!((&body.code, body.name.as_deref()), (&ErrorCode::GuestFailed, Some("n")));
    for text in [&body.message, body.value.as_ref().unwrap()] {
        assert!(text.starts_with("ééé") && text.ends_with("… (600002 bytes)"), "{text}");
        assert!(text.len() < 1_100, "{}", text.len());
    }
    assert_eq!(guest.usage().unwrap().n_tokens, 1);
}

#[tokio::test]
async fn panics_end_one_request() {
    let world = World::new();
    let client = world.client().await;
    let mut neighbour = start(&client, "echo", "").await;
    for name in ["panic", "panic at start"] {
        let error = start(&client, name, "").await.wait().await.unwrap_err();
        assert_eq!(code(&error), &ErrorCode::Internal);
    }
    neighbour.send("still here").await.unwrap();
    neighbour.end_messages().await.unwrap();
    assert!(matches!(neighbour.next().await, Some(Ok(Event::Started { .. }))));
    assert_eq!(neighbour.text().await.unwrap(), "still here");
}

#[tokio::test]
async fn a_component_is_uploaded_once() {
    let world = World::new();
    let client = world.client().await;
    let bytes: Bytes = (0..700_000_u32).map(|n| (n % 251) as u8).collect();
    let mut stages = Vec::new();
    let mut guest = client.start(Program::wasm(bytes.clone()), with_argument("2")).await.unwrap();
    let mut text = String::new();
    while let Some(event) = guest.next().await {
        match event.unwrap() {
            Event::Progress { stage, done, total, .. } => stages.push((stage, done, total)),
            Event::Text { text: more } => text += &more,
            _ => {}
        }
    }
    assert_eq!(text, "0 1 ");
    let n = bytes.len() as u64;
    assert_eq!(stages.first(), Some(&(Stage::Upload, 0, n)));
    assert!(stages.contains(&(Stage::Upload, n, n)));
    assert_eq!(stages.last(), Some(&(Stage::Compile, 3, 3)));
    assert_eq!(world.fake.components.lock().unwrap().values().collect::<Vec<_>>(), [&bytes]);

    let mut again = client.start(Program::wasm(bytes), with_argument("2")).await.unwrap();
    let first = again.next().await.unwrap().unwrap();
    assert_eq!(first, Event::Progress { stage: Stage::Compile, name: None, done: 3, total: 3 });
    assert_eq!(again.text().await.unwrap(), "0 1 ");
}

#[tokio::test]
async fn messages_reach_a_guest_that_was_uploaded_meanwhile() {
    let world = World::new();
    let client = world.client().await;
    let guest = start(&client, "echo", "").await;
    let sender = guest.sender();
    let talk = tokio::spawn(async move {
        for n in 0..100 {
            sender.send(format!("{n},")).await.unwrap();
        }
        sender.end_messages().await.unwrap();
        sender
    });
    let expected: String = (0..100).map(|n| format!("{n},")).collect();
    assert_eq!(guest.text().await.unwrap(), expected);
    let sender = talk.await.unwrap();
    assert!(matches!(sender.send("late").await.unwrap_err(), Error::GuestEnded));
}

#[tokio::test]
async fn a_guest_whose_last_words_were_lost_has_not_ended_well() {
    let world = World::new();
    let client = world.client().await;
    let mut guest = start(&client, "last word", "").await;
    assert!(matches!(guest.next().await, Some(Ok(Event::Started { .. }))));
    guest.cancel();
    let error = guest.text().await.expect_err("it was cancelled before it said them");
    assert_eq!(code(&error), &ErrorCode::Cancelled);
}

#[tokio::test]
async fn dropping_a_guest_cancels_it() {
    let world = World::new();
    let client = world.client().await;
    for name in ["forever", "flood", "slow start"] {
        let mut guest = start(&client, name, "").await;
        if name != "slow start" {
            assert!(matches!(guest.next().await, Some(Ok(Event::Started { .. }))));
        }
        drop(guest);
        assert_eq!(client.models().await.unwrap().len(), 1, "the connection lives");
        world.all_gone().await;
    }
    assert_eq!(*world.fake.stop_reasons.lock().unwrap(), [StopReason::Cancelled; 2]);
}

/// A guest that sends may fail over that before it hears of the stop.
#[tokio::test]
async fn cancel_leaves_the_stream_to_be_read() {
    let world = World::new();
    let client = world.client().await;
    for name in ["forever", "flood", "drops", "echo"] {
        let mut guest = start(&client, name, "").await;
        assert!(matches!(guest.next().await, Some(Ok(Event::Started { .. }))));
        guest.cancel();
        assert_eq!(code(&guest.wait().await.unwrap_err()), &ErrorCode::Cancelled, "{name}");
        assert_eq!(guest.usage().unwrap().n_tokens, 1);
    }
}

#[tokio::test]
async fn stop_ends_a_guest_of_another_connection() {
    let world = World::new();
    let [one, two] = [world.client().await, world.client().await];
    let mut guest = start(&one, "forever", "").await;
    let Some(Ok(Event::Started { guest_id })) = guest.next().await else { panic!("starts") };
    assert_eq!(two.ps().await.unwrap()[0].guest_id, guest_id);
    two.stop(guest_id).await.unwrap();
    assert_eq!(code(&guest.wait().await.unwrap_err()), &ErrorCode::Stopped);
}

#[tokio::test]
async fn dropping_the_client_ends_its_guests() {
    let world = World::new();
    let client = world.client().await;
    let mut guests = Vec::new();
    for name in ["forever", "flood", "echo", "slow start"] {
        guests.push(start(&client, name, "").await);
    }
    client.models().await.unwrap();
    assert_eq!(world.fake.n_alive(), 4);
    drop((client, guests));
    world.all_gone().await;
}

#[tokio::test]
async fn a_slow_reader_stops_its_own_guest_only() {
    let world = World::new();
    let client = world.client().await;
    let unread = start(&client, "flood", "").await;
    let dripping = start(&client, "drops", "").await;
    for _ in 0..3 {
        let text = start(&client, "count", "20000").await.text().await.unwrap();
        assert!(text.ends_with(" 19999 "));
    }
    drop((unread, dripping));
    world.all_gone().await;
}

#[tokio::test]
async fn credit_comes_back_as_events_are_read() {
    let world = World::new();
    let client = world.client().await;
    let options = StartOptions { window_bytes: 1, ..StartOptions::default() };
    let mut guest = client.start(Program::named("flood"), options).await.unwrap();
    let mut n_bytes = 0;
    while n_bytes < 5_000_000 {
        n_bytes += guest.next().await.unwrap().unwrap().credit_bytes();
    }
    for n_bytes in [trellis_wire::OUTPUT_BYTES_MAX, 100] {
        let options = StartOptions { window_bytes: 1, ..with_argument(&n_bytes.to_string()) };
        let guest = client.start(Program::named("large"), options).await.unwrap();
        assert_eq!(guest.text().await.unwrap().len(), n_bytes);
    }
}

#[tokio::test]
async fn shutdown_ends_every_request_and_says_so() {
    let world = World::new();
    let client = world.client().await;
    let idle = world.client().await;
    let mut guests = Vec::new();
    for name in ["forever", "stubborn", "slow start"] {
        guests.push(start(&client, name, "").await);
    }
    client.models().await.unwrap();
    world.shutdown.cancel();
    let [forever, stubborn, slow] = guests.try_into().unwrap();
    assert_eq!(code(&forever.text().await.unwrap_err()), &ErrorCode::ShuttingDown);
    assert_eq!(code(&stubborn.text().await.unwrap_err()), &ErrorCode::ShuttingDown);
    assert_eq!(code(&slow.text().await.unwrap_err()), &ErrorCode::ShuttingDown);
    while let Ok(_models) = idle.models().await {}
    let error = idle.models().await.unwrap_err();
    assert!(matches!(error, Error::ConnectionLost(Lost::Fault(_))), "{error:?}");
    assert_eq!(code(&error), &ErrorCode::ShuttingDown);
}

#[tokio::test]
async fn who_has_said_nothing_yet_when_the_daemon_goes_down_is_told_so_too() {
    let world = World::new();
    let mut raw = world.raw_before_hello();
    tokio::task::yield_now().await;
    world.shutdown.cancel();
    Hello::read(&mut raw.stream_reader()).await.unwrap();
    assert_eq!(raw.fault().await.code, ErrorCode::ShuttingDown);
    raw.session.await.unwrap().unwrap();
}

#[tokio::test]
async fn who_shuts_down_is_told_that_it_is_done() {
    let world = World::new();
    world.fake.shutdown.set(world.shutdown.clone()).expect("set once");
    let mut raw = world.raw().await;
    raw.send(ClientMessage::Request { id: 1, call: Call::Shutdown }).await;
    assert_eq!(raw.end().await, (1, Ok(Value::Done)));
    assert_eq!(raw.fault().await.code, ErrorCode::ShuttingDown);
    raw.session.await.unwrap().unwrap();
}

#[tokio::test]
async fn many_clients_bring_one_component() {
    let world = World::with(SessionLimits { n_uploads: 1, ..SessionLimits::default() });
    let bytes: Bytes = (0..700_000_u32).map(|n| (n % 251) as u8).collect();
    let mut guests = Vec::new();
    for _ in 0..32 {
        let client = world.client().await;
        guests.push(client.start(Program::wasm(bytes.clone()), with_argument("2")).await.unwrap());
    }
    for guest in guests {
        assert_eq!(guest.text().await.unwrap(), "0 1 ");
    }
    assert_eq!(world.fake.n_stored.load(Ordering::SeqCst), 1);
}

/// A guest that begins in the moment in which its start is cancelled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_is_cancelled_ends_when_all_is_free() {
    let world = World::new();
    let client = world.client().await;
    for _ in 0..5 {
        let mut guest = start(&client, "late start", "").await;
        while world.fake.n_alive() == 0 {
            tokio::task::yield_now().await;
        }
        guest.cancel();
        assert_eq!(code(&guest.wait().await.unwrap_err()), &ErrorCode::Cancelled);
        assert_eq!(world.fake.n_alive(), 0, "the guest is gone before its end is told");
        assert_eq!(guest.usage().expect("of the guest that had begun").n_tokens, 1);
    }
    let mut guest = start(&client, "slow start", "").await;
    client.models().await.unwrap();
    guest.cancel();
    assert_eq!(code(&guest.wait().await.unwrap_err()), &ErrorCode::Cancelled);
    assert_eq!(guest.usage(), Some(&GuestUsage::default()), "nothing was used");
}

#[tokio::test]
async fn a_daemon_that_would_pass_over_the_model_is_not_asked_to_run_the_guest() {
    let (near, mut far) = tokio::io::duplex(1 << 10);
    let older = Hello { version_max: VERSION_OF_MODELS - 1, build: "older".to_owned(), ..Hello::ours() };
    older.write(&mut far).await.unwrap();
    let client = Client::over(near).await.unwrap();
    let options = StartOptions { model: Some("draft".to_owned()), ..StartOptions::default() };
    let error = client.start(Program::named("count"), options).await.unwrap_err();
    assert!(matches!(&error, Error::TooOld { needed: VERSION_OF_MODELS, .. }), "{error:?}");
    assert!(error.to_string().contains("older"), "{error}");
    // Without a model there is nothing that it would pass over.
    assert!(client.start(Program::named("count"), StartOptions::default()).await.is_ok());
}

#[tokio::test]
async fn a_drain_is_cut_short_by_a_stop_that_comes_in_it_and_not_by_one_that_came_before() {
    const HALF_AN_HOUR: Duration = Duration::from_secs(1_800);
    for is_stopped_before in [true, false] {
        let world = World::with(SessionLimits { drain_ms: 3_600_000, ..SessionLimits::default() });
        if is_stopped_before {
            world.shutdown.cancel();
        }
        let at_work = world.sessions.at_work();
        let draining = tokio::spawn({
            let (sessions, shutdown) = (world.sessions.clone(), world.shutdown.clone());
            async move { sessions.drain_unless(&shutdown).await }
        });
        tokio::time::timeout(PATIENCE, world.sessions.drains()).await.expect("it takes on no more");
        tokio::task::yield_now().await;
        let left = || world.sessions.ends_by().drain_left().unwrap_or_default();
        assert!(left() > HALF_AN_HOUR, "{:?} left", left());
        if is_stopped_before {
            assert!(!draining.is_finished(), "what was saved may still come onto disk");
            drop(at_work);
        } else {
            world.shutdown.cancel();
        }
        tokio::time::timeout(PATIENCE, draining).await.expect("in time").unwrap();
        assert_eq!(left() > HALF_AN_HOUR, is_stopped_before, "{:?} left", left());
    }
}
