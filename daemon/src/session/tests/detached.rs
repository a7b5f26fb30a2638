//! Guests that go on without their connections, and clients that come again.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use trellis_client::{Client, Error, ErrorCode, Event, Program, Resumed, StartOptions};
use trellis_engine::account::{ActorId, Resource};
use trellis_wire::{ACKNOWLEDGED_BYTES, Attach, Call, ClientMessage, OUTPUT_CREDIT_BYTES_MAX};

use super::{ALICE, PATIENCE, World};
use crate::session::{Actor, SessionLimits, StopReason};

const BOB: Actor = Actor { uid: 1001, gid: 1001 };

fn code(error: &Error) -> &ErrorCode {
    error.code().unwrap_or_else(|| panic!("{error:?} has no code"))
}

async fn detach(client: &Client, name: &str, argument: &str) -> Result<u64, Error> {
    let options = StartOptions { arguments: vec![argument.to_owned()], ..StartOptions::default() };
    client.start_detached(Program::named(name), options, |_| {}).await
}

fn limits() -> SessionLimits {
    SessionLimits { stop_ms: 3_000, ..SessionLimits::default() }
}

fn counted(n: u64) -> String {
    (0..n).map(|n| format!("{n} ")).collect()
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

/// Numbers that look random (SplitMix64), the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// A stream that breaks after so many bytes were read from it.
struct Breaking {
    stream: DuplexStream,
    n_bytes_left: u64,
    n_broken: Arc<AtomicUsize>,
}

impl AsyncRead for Breaking {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.n_bytes_left == 0 {
            self.n_broken.fetch_add(1, Ordering::Relaxed);
            return Poll::Ready(Err(std::io::ErrorKind::ConnectionReset.into()));
        }
        let n_bytes = usize::try_from(self.n_bytes_left).unwrap_or(usize::MAX).min(to.remaining());
        let mut bytes = vec![0; n_bytes];
        let mut part = ReadBuf::new(&mut bytes);
        let polled = Pin::new(&mut self.stream).poll_read(cx, &mut part);
        to.put_slice(part.filled());
        self.n_bytes_left -= part.filled().len() as u64;
        polled
    }
}

impl AsyncWrite for Breaking {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[tokio::test]
async fn a_text_over_a_hundred_broken_connections_is_the_text_of_one() {
    const N_BROKEN: usize = 100;
    const N_NUMBERS: u64 = 400_000;
    let world = World::with(limits());
    let guest_id = detach(&world.client().await, "count", &N_NUMBERS.to_string()).await.unwrap();
    let (n_broken, mut numbers) = (Arc::new(AtomicUsize::new(0)), Numbers(7));
    let connect = || {
        let (near, far) = tokio::io::duplex(64 * 1024);
        world.serve(far);
        let is_enough = n_broken.load(Ordering::Relaxed) >= N_BROKEN;
        let n_bytes_left = if is_enough { u64::MAX } else { numbers.below(40_000) };
        Client::over(Breaking { stream: near, n_bytes_left, n_broken: n_broken.clone() })
    };
    let mut guest = Resumed::new(guest_id, Some(0), connect);
    let mut text = String::new();
    while let Some(event) = guest.next().await {
        if let Event::Text { text: more } = event.expect("it goes on") {
            text += &more;
        }
    }
    assert_eq!(n_broken.load(Ordering::Relaxed), N_BROKEN);
    assert!(text == counted(N_NUMBERS), "{} bytes of {}", text.len(), counted(N_NUMBERS).len());
    let usage = guest.usage().expect("it has ended");
    assert_eq!((usage.n_tokens, usage.output_bytes), (1, text.len() as u64));
}

#[tokio::test]
async fn a_guest_that_only_answers_can_be_spoken_to_before_it_has_said_anything() {
    let world = World::with(limits());
    let guest_id = detach(&world.client().await, "echo", "").await.unwrap();
    let mut guest = Resumed::new(guest_id, None, async || Ok(world.client().await));
    assert!(guest.sender().is_none());
    tokio::time::timeout(PATIENCE, guest.attached()).await.expect("in time").unwrap();
    let sender = guest.sender().expect("a connection reads it");
    sender.send("a").await.unwrap();
    assert_eq!(guest.next().await.unwrap().unwrap(), Event::Text { text: "a".into() });
    sender.end_messages().await.unwrap();
    assert!(guest.next().await.is_none());
    assert!(guest.attached().await.is_ok(), "there is nothing to wait for");

    let mut refused = Resumed::new(guest_id + 1, None, async || Ok(world.client().await));
    assert_eq!(code(&refused.attached().await.unwrap_err()), &ErrorCode::UnknownGuest);
    assert!(refused.next().await.is_none(), "it was the last item");
}

#[tokio::test]
async fn who_has_no_patience_hears_of_the_first_connection_that_is_lost() {
    let world = World::with(limits());
    let guest_id = detach(&world.client().await, "count", "400000").await.unwrap();
    let n_broken = Arc::new(AtomicUsize::new(0));
    let connect = || {
        let (near, far) = tokio::io::duplex(64 * 1024);
        world.serve(far);
        Client::over(Breaking { stream: near, n_bytes_left: 10_000, n_broken: n_broken.clone() })
    };
    let mut guest = Resumed::new(guest_id, None, connect).with_patience(Duration::ZERO);
    guest.attached().await.unwrap();
    let error = loop {
        match guest.next().await.expect("it was not read to its end") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::ConnectionLost(_)), "{error:?}");
    assert!(guest.next().await.is_none());
    assert_eq!(n_broken.load(Ordering::Relaxed), 1, "there was no other connection");
}

#[tokio::test]
async fn a_guest_goes_on_without_its_connection_and_its_end_is_had_once() {
    let world = World::with(limits());
    let client = world.client().await;
    let [well, failed] = [detach(&client, "count", "3").await, detach(&client, "fail", "out of luck").await];
    let [well, failed] = [well.unwrap(), failed.unwrap()];
    drop(client);
    world.all_gone().await;
    let client = world.client().await;
    until("both ends are kept", async || world.sessions.used(ALICE).user.n_detached_ended == 2).await;
    let listed = client.ps().await.unwrap();
    let ended: Vec<_> = listed.iter().filter(|guest| guest.state == "ended").collect();
    assert_eq!(ended.iter().map(|guest| guest.guest_id).collect::<Vec<_>>(), [well, failed]);
    assert_eq!(listed.len(), 2, "the service lists them as well, and they are shown once: {listed:?}");
    assert!(ended.iter().all(|guest| guest.is_detached && !guest.is_attached && guest.uid == ALICE.uid));
    let error = client.attach(failed, None).await.unwrap().text().await.unwrap_err();
    assert_eq!((code(&error), error.to_string().as_str()), (&ErrorCode::GuestFailed, "out of luck"));
    assert_eq!(client.attach(well, None).await.unwrap().text().await.unwrap(), "0 1 2 ");
    for guest_id in [well, failed] {
        until("its end was acknowledged", async || {
            client
                .attach(guest_id, None)
                .await
                .is_err_and(|error| error.code() == Some(&ErrorCode::UnknownGuest))
        })
        .await;
    }
    let accounts = world.fake.accounts.get().unwrap();
    until("nothing is kept of them", async || accounts.used_by(ActorId(ALICE.uid), Resource::HostBytes) == 0)
        .await;
}

#[tokio::test]
async fn an_end_that_was_not_acknowledged_is_had_again() {
    let world = World::with(limits());
    let guest_id = detach(&world.client().await, "count", "3").await.unwrap();
    for _ in 0..3 {
        let mut raw = world.raw().await;
        let attach = Attach { guest_id, credit_bytes: 1 << 20, ..Attach::default() };
        raw.send(ClientMessage::Request { id: 1, call: Call::Attach(attach) }).await;
        let Event::Attached { from: 0, .. } = raw.event().await else { panic!("not from the first event") };
        raw.end().await.1.expect("it has ended well");
        // More than it was sent, of a guest that is not there, and what was not asked for.
        for (guest_id, until) in [(guest_id + 1, u64::MAX), (guest_id, 0)] {
            raw.send(ClientMessage::Acknowledge { guest_id, until }).await;
        }
    }
    let mut other = world.raw().await;
    other.send(ClientMessage::Acknowledge { guest_id, until: u64::MAX }).await;
    other.send(ClientMessage::Request { id: 1, call: Call::Models }).await;
    other.end().await.1.expect("answered");
    let attached = world.client().await.attach(guest_id, None).await;
    assert_eq!(attached.expect("who has not read it acknowledges nothing").text().await.unwrap(), "0 1 2 ");
}

#[tokio::test]
async fn a_guest_that_nobody_reads_waits_and_holds_up_nobody() {
    let world = World::with(SessionLimits { detached_bytes: 0, detached_kept_bytes: 5_000, ..limits() });
    let client = world.client().await;
    let guest_id = detach(&client, "flood", "").await.unwrap();
    let guest = world.sessions.detached.find(ALICE, guest_id, None).unwrap();
    let bytes_max = OUTPUT_CREDIT_BYTES_MAX + ACKNOWLEDGED_BYTES;
    until("it has sent what it may", async || guest.kept_bytes() > bytes_max - 2 * 1024).await;
    for _ in 0..3 {
        let count = StartOptions { arguments: vec!["20000".into()], ..StartOptions::default() };
        let text = client.start(Program::named("count"), count).await.unwrap().text().await.unwrap();
        assert_eq!(text, counted(20_000));
    }
    assert!(guest.kept_bytes() <= bytes_max, "{} bytes", guest.kept_bytes());
    let mut attached = client.attach(guest_id, None).await.unwrap();
    let mut n_bytes = 0;
    while n_bytes < 4 * bytes_max {
        n_bytes += attached.next().await.expect("without end").unwrap().credit_bytes();
        assert!(guest.kept_bytes() <= bytes_max + 5_000, "{} bytes", guest.kept_bytes());
    }
    // What was acknowledged beyond what is kept for others is gone, and is not passed over in silence.
    let error = client.attach(guest_id, Some(0)).await.expect_err("long ago");
    let Error::Daemon(body) = &error else { panic!("{error:?}") };
    assert_eq!((&body.code, body.value.as_deref()), (&ErrorCode::OutputLost, Some("0")));
    let first = body.limit.expect("it says what there is");
    assert!(client.attach(guest_id, Some(first)).await.is_ok());
    let error = client.attach(guest_id, Some(u64::MAX)).await.expect_err("it is not so far");
    assert_eq!(code(&error), &ErrorCode::InvalidArgument);
    client.stop(guest_id).await.unwrap();
    world.all_gone().await;
}

#[tokio::test]
async fn one_client_reads_and_the_last_that_comes_is_it() {
    let world = World::with(limits());
    let [one, two] = [world.client().await, world.client().await];
    let guest_id = detach(&one, "echo", "").await.unwrap();
    let mut first = one.attach(guest_id, None).await.unwrap();
    first.sender().send("a").await.unwrap();
    assert_eq!(first.next().await.unwrap().unwrap(), Event::Text { text: "a".into() });
    let listed = |guests: Vec<trellis_client::GuestInfo>| {
        guests.into_iter().find(|guest| guest.guest_id == guest_id).map(|it| (it.is_detached, it.is_attached))
    };
    assert_eq!(listed(one.ps().await.unwrap()), Some((true, true)));
    let mut second = two.attach(guest_id, Some(1)).await.unwrap();
    assert_eq!(code(&first.next().await.unwrap().unwrap_err()), &ErrorCode::TakenOver);
    assert!(first.next().await.is_none());
    second.sender().send("b").await.unwrap();
    assert_eq!(second.next().await.unwrap().unwrap(), Event::Text { text: "b".into() });
    // Who stops reading leaves the guest alone.
    drop(second);
    until("nobody reads", async || listed(two.ps().await.unwrap()) == Some((true, false))).await;
    assert_eq!(world.fake.n_alive(), 1);
    let third = two.attach(guest_id, Some(0)).await.expect("all is kept");
    third.sender().end_messages().await.unwrap();
    assert_eq!(third.text().await.unwrap(), "ab");
    world.all_gone().await;
}

#[tokio::test]
async fn no_other_user_finds_a_guest_and_no_other_daemon_takes_one_for_its_own() {
    let world = World::with(limits());
    let guest_id = detach(&world.client().await, "forever", "").await.unwrap();
    let detached = &world.sessions.detached;
    let of_bob = detached.find(BOB, guest_id, None).expect_err("it is Alice's");
    let unknown = detached.find(ALICE, guest_id + 1, None).expect_err("there is none");
    assert_eq!(of_bob.code, ErrorCode::UnknownGuest);
    let without_number = |message: &str| message.replace(|c: char| c.is_ascii_digit(), "");
    assert_eq!(
        without_number(&of_bob.message),
        without_number(&unknown.message),
        "told as if there were none"
    );
    assert!(detached.find(Actor { gid: 7, ..ALICE }, guest_id, Some(detached.daemon())).is_ok());
    assert!(detached.find(ALICE, guest_id, Some(detached.daemon() ^ 1)).is_err());
    let mut seen = Vec::new();
    detached.mark(BOB, &mut seen);
    assert!(seen.is_empty());
}

#[tokio::test]
async fn there_are_no_more_than_there_may_be() {
    let world = World::with(SessionLimits { n_detached: 2, n_detached_ended: 2, ..limits() });
    let client = world.client().await;
    let mut ids = Vec::new();
    for _ in 0..2 {
        ids.push(detach(&client, "forever", "").await.unwrap());
    }
    let Error::Daemon(body) = detach(&client, "forever", "").await.unwrap_err() else {
        panic!("of the daemon")
    };
    assert_eq!(
        (body.code, body.name.as_deref(), body.value.as_deref(), body.limit),
        (ErrorCode::LimitExceeded, Some("n_detached"), Some("3"), Some(2))
    );
    let used = world.sessions.used(ALICE);
    assert_eq!((used.user.n_detached, used.all.n_detached, used.user.n_detached_ended), (2, 2, 0));
    for id in ids {
        client.stop(id).await.unwrap();
    }
    until("their places are free", async || world.sessions.used(ALICE).user.n_detached == 0).await;
    let detached = &world.sessions.detached;
    let mut ids = Vec::new();
    let mut oldest = None;
    for n in 0..4 {
        let id = detach(&client, "count", &n.to_string()).await.unwrap();
        ids.push(id);
        until("it has ended", async || world.sessions.used(ALICE).user.n_detached == 0).await;
        oldest.get_or_insert_with(|| Arc::downgrade(&detached.find(ALICE, id, None).unwrap()));
    }
    until("the oldest are gone", async || world.sessions.used(ALICE).user.n_detached_ended == 2).await;
    let oldest = oldest.expect("there was one");
    until("what they had is given back", async || oldest.strong_count() == 0).await;
    let kept_bytes =
        ids[2..].iter().map(|id| detached.find(ALICE, *id, None).unwrap().kept_bytes() as u64).sum::<u64>();
    assert!(kept_bytes > 0);
    let accounts = world.fake.accounts.get().unwrap();
    until("the others are paid for", async || {
        accounts.used_by(ActorId(ALICE.uid), Resource::HostBytes) == kept_bytes
    })
    .await;
    for (id, is_kept) in ids.into_iter().zip([false, false, true, true]) {
        assert_eq!(client.attach(id, None).await.is_ok(), is_kept, "{id}");
    }
}

#[tokio::test]
async fn the_ends_that_are_kept_are_the_last_ones_and_those_that_are_read() {
    let world = World::with(SessionLimits { n_detached_ended: 1, ..limits() });
    let client = world.client().await;
    let (detached, used) = (&world.sessions.detached, || world.sessions.used(ALICE).user);
    let first = detach(&client, "forever", "").await.unwrap();
    let read = detach(&client, "count", "3").await.unwrap();
    // A reader without credit: it cannot come to the end.
    let mut raw = world.raw().await;
    let attach = Attach { guest_id: read, credit_bytes: 0, ..Attach::default() };
    raw.send(ClientMessage::Request { id: 1, call: Call::Attach(attach) }).await;
    assert!(matches!(raw.event().await, Event::Attached { .. }));
    until("the one that is read has ended", async || used().n_detached == 1).await;
    let second = detach(&client, "count", "3").await.unwrap();
    until("the second has ended", async || used().n_detached == 1).await;
    client.stop(first).await.unwrap();
    until("one goes", async || used().n_detached == 0 && used().n_detached_ended == 2).await;
    assert!(detached.find(ALICE, second, None).is_err(), "it ended before the first one did");
    assert!(detached.find(ALICE, read, None).is_ok(), "it is read");
    let error = client.attach(first, None).await.unwrap().text().await.unwrap_err();
    assert_eq!(code(&error), &ErrorCode::Stopped);
}

#[tokio::test]
async fn who_has_no_memory_left_starts_none() {
    let world = World::with(SessionLimits { detached_bytes: 1 << 50, ..limits() });
    let error = detach(&world.client().await, "forever", "").await.unwrap_err();
    assert_eq!(code(&error), &ErrorCode::BudgetExceeded);
    assert_eq!(world.fake.n_alive(), 0);
    assert_eq!(world.sessions.used(ALICE).user.n_detached, 0, "its place is free");
}

#[tokio::test]
async fn a_guest_without_a_reader_ends_after_its_time_and_its_end_after_another() {
    let world = World::with(SessionLimits { detached_idle_ms: 1_500, detached_ended_ms: 300, ..limits() });
    let client = world.client().await;
    let guest_id = detach(&client, "forever", "").await.unwrap();
    let attached = client.attach(guest_id, None).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(world.fake.n_alive(), 1, "it is read");
    drop(attached);
    world.all_gone().await;
    assert_eq!(*world.fake.stop_reasons.lock().unwrap(), [StopReason::Unread { limit_ms: 1_500 }]);
    until("its end is forgotten", async || {
        client.attach(guest_id, None).await.is_err_and(|error| error.code() == Some(&ErrorCode::UnknownGuest))
    })
    .await;
}

#[tokio::test]
async fn why_a_guest_without_a_reader_ended_is_told() {
    let world = World::with(SessionLimits { detached_idle_ms: 50, ..limits() });
    let client = world.client().await;
    let guest_id = detach(&client, "flood", "").await.unwrap();
    world.all_gone().await;
    let Error::Daemon(body) = client.attach(guest_id, None).await.unwrap().text().await.unwrap_err() else {
        panic!("of the daemon")
    };
    assert_eq!(
        (body.code, body.name.as_deref(), body.limit),
        (ErrorCode::DeadlineExceeded, Some("detached_idle_ms"), Some(50))
    );
}

#[tokio::test]
async fn a_daemon_that_goes_down_ends_them_and_says_so() {
    let world = World::with(limits());
    let client = world.client().await;
    for name in ["forever", "flood"] {
        detach(&client, name, "").await.unwrap();
    }
    let guest_id = detach(&client, "forever", "").await.unwrap();
    let attached = client.attach(guest_id, None).await.unwrap();
    assert_eq!(world.sessions.n_at_work(), 4, "a drain waits for them, and for who reads");
    world.shutdown.cancel();
    assert_eq!(code(&attached.text().await.unwrap_err()), &ErrorCode::ShuttingDown);
    tokio::time::timeout(PATIENCE, world.sessions.detached_ended()).await.expect("in time");
    assert_eq!(world.fake.n_alive(), 0);
}

#[tokio::test]
async fn a_start_that_comes_to_nothing_leaves_nothing() {
    let world = World::with(limits());
    let client = world.client().await;
    for (name, expected) in [("nowhere", ErrorCode::UnknownProgram), ("panic at start", ErrorCode::Internal)]
    {
        assert_eq!(code(&detach(&client, name, "").await.unwrap_err()), &expected);
    }
    let options = StartOptions { is_recorded: true, ..StartOptions::default() };
    let error = client.start_detached(Program::named("count"), options, |_| {}).await.unwrap_err();
    assert_eq!(code(&error), &ErrorCode::InvalidArgument);
    let slow = tokio::time::timeout(Duration::from_millis(50), detach(&client, "slow start", "")).await;
    assert!(slow.is_err(), "it was given up");
    until("nothing is left", async || world.sessions.used(ALICE).user.n_detached == 0).await;
    world.all_gone().await;
}

#[tokio::test]
async fn a_guest_that_panics_or_sends_too_much_at_once_has_an_end_all_the_same() {
    let world = World::with(limits());
    let client = world.client().await;
    let too_much = (trellis_wire::OUTPUT_BYTES_MAX + 1).to_string();
    for (name, argument, expected) in
        [("panic", "", ErrorCode::Internal), ("json", too_much.as_str(), ErrorCode::LimitExceeded)]
    {
        let guest_id = detach(&client, name, argument).await.unwrap();
        let error = client.attach(guest_id, None).await.unwrap().text().await.unwrap_err();
        assert_eq!(code(&error), &expected, "{name}");
    }
    let large = trellis_wire::OUTPUT_BYTES_MAX.to_string();
    let guest_id = detach(&client, "large", &large).await.unwrap();
    assert_eq!(client.attach(guest_id, None).await.unwrap().text().await.unwrap().len().to_string(), large);
}
