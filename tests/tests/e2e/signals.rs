//! What signals do to a daemon, and what its clients hear of it.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use trellis::config::Config;
use trellis::session::SessionLimits;
use trellis_client::{Client, Guest, Program};
use trellis_tests::daemons::{self, Served, collect, run, started, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

fn signal(served: &Served, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, signal).expect("it runs");
}

/// The command after these lines of a shell, as a program of its own.
pub(crate) fn after(folder: &Path, lines: &str) -> String {
    let path = folder.join("trellis");
    let text = format!("#!/bin/sh\n{lines}\nexec '{}' \"$@\"\n", exe());
    std::fs::write(&path, text).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).expect("executable");
    path.to_str().expect("UTF-8").to_owned()
}

async fn start(client: &Client, mode: &str) -> Guest {
    let mut guest = client.start(Program::wasm(guests::hostile()), with(&[mode])).await.expect("connected");
    started(&mut guest).await;
    guest
}

/// How guests end whose daemon gets a signal while they run.
fn ends(served: &mut Served, signals: &[Signal]) {
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let mut guests = Vec::new();
        for mode in ["loop", "sleep", "endless", "flood-text"] {
            guests.push((mode, start(&client, mode).await));
        }
        for one in signals {
            signal(served, *one);
        }
        for (mode, guest) in guests {
            assert_eq!(collect(guest).await.reason().code.as_str(), "shutting_down", "{signals:?}: {mode}");
        }
    });
    assert_eq!(served.wait().code(), Some(0), "{signals:?}");
    assert!(!served.socket().exists(), "{signals:?}");
}

#[test]
fn guests_hear_that_their_daemon_goes_down_however_it_was_told() {
    for signals in [&[Signal::TERM][..], &[Signal::INT]] {
        ends(&mut Served::start(exe()), signals);
    }
}

#[test]
fn a_daemon_that_is_to_outlive_its_terminal_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut served = Served::start_with(&after(folder.path(), "trap '' HUP"), &daemons::config(exe()), &[]);
    for _ in 0..3 {
        signal(&served, Signal::HUP);
        std::thread::sleep(Duration::from_millis(50));
    }
    ends(&mut served, &[Signal::TERM]);
}

/// Starts guests until one is refused because the daemon goes down.
async fn until_it_takes_on_nothing(client: &Client) {
    loop {
        let ended = run(client, &guests::hostile(), with(&["exit-well"])).await;
        if let Some(error) = &ended.error {
            assert_eq!(error.code().expect("the daemon says so").as_str(), "shutting_down", "{error}");
            return;
        }
    }
}

/// A daemon that waits so long for what it is at.
pub(crate) fn draining(drain_ms: u64) -> Served {
    let config = daemons::config(exe());
    let sessions = SessionLimits { drain_ms, ..config.sessions };
    Served::start_with(exe(), &Config { sessions, ..config }, &[])
}

#[test]
fn a_daemon_that_was_told_to_end_takes_on_nothing_and_lets_what_it_is_at_go_on() {
    let mut served = draining(60_000);
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let guest = start(&client, "echo").await;
        signal(&served, Signal::TERM);
        until_it_takes_on_nothing(&client).await;
        // Who comes now may still ask.
        let late = Client::connect_to(&served.socket()).await.expect("connected");
        assert_eq!(late.ps().await.expect("answered").len(), 1);
        guest.send("still there").await.expect("it runs");
        guest.end_messages().await.expect("it runs");
        assert_eq!(collect(guest).await.well().text, "still there");
    });
    assert_eq!(served.wait().code(), Some(0));
    assert!(!served.socket().exists());
}

#[test]
fn a_run_that_meets_a_daemon_on_its_way_out_is_run_by_the_next() {
    let mut served = draining(120_000);
    let folder = tempfile::tempdir().expect("a folder");
    let wasm = folder.path().join("hostile.wasm");
    std::fs::write(&wasm, guests::hostile()).expect("written");
    let prompt = "<|begin_of_text|>Once upon a time";
    let arguments =
        ["run", "--no-stdin", "--seed", "7", wasm.to_str().expect("UTF-8"), "tokens", "4", prompt];
    let before = daemons::output(&mut served.trellis(&arguments));
    assert!(before.status.success(), "{before:?}");
    let run = block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let guest = start(&client, "echo").await;
        signal(&served, Signal::TERM);
        until_it_takes_on_nothing(&client).await;
        let mut run = served.trellis(&arguments);
        let run = std::thread::spawn(move || daemons::output(&mut run));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(!run.is_finished(), "it waits");
        guest.end_messages().await.expect("it runs");
        assert_eq!(collect(guest).await.well().text, "");
        run
    });
    assert_eq!(served.wait().code(), Some(0));
    served.start_again();
    let ran = run.join().expect("no panic");
    assert!(ran.status.success(), "{ran:?}");
    assert_eq!(ran.stdout, before.stdout);
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(said.contains("about to go down; waiting for the next one"), "{said}");
}

/// A connection whose reader stops at some moment.
struct Stalling {
    stream: UnixStream,
    is_stalled: Arc<AtomicBool>,
}

impl AsyncRead for Stalling {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.is_stalled.load(Ordering::Relaxed) {
            true => Poll::Pending,
            false => Pin::new(&mut self.stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stalling {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[test]
fn streams_end_with_a_reason_inside_the_time_of_a_drain_whoever_does_not_read() {
    const N_STREAMS: usize = 64;
    const DRAIN: Duration = Duration::from_secs(3);
    // On a machine that does other things, too; a client that does not read would be waited for for 20 s.
    const BEYOND: Duration = Duration::from_secs(6);
    let mut served = draining(DRAIN.as_millis() as u64);
    let ended = block_on(async {
        let stream = UnixStream::connect(served.socket()).await.expect("connected");
        let is_stalled = Arc::<AtomicBool>::default();
        let deaf = Client::over(Stalling { stream, is_stalled: is_stalled.clone() }).await.expect("a daemon");
        let mut floods = vec![start(&deaf, "flood-text").await];
        is_stalled.store(true, Ordering::Relaxed);
        // More than the system keeps for a connection.
        for _ in 0..8 {
            let program = Program::wasm(guests::hostile());
            floods.push(deaf.start(program, with(&["flood-text"])).await.expect("asked for"));
        }
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        // One that nobody reads.
        let program = Program::wasm(guests::hostile());
        client.start_detached(program, with(&["flood-text"]), |_| {}).await.expect("it runs");
        let mut streams = Vec::new();
        for _ in 0..N_STREAMS {
            streams.push(start(&client, "endless").await);
        }
        let begun = Instant::now();
        signal(&served, Signal::TERM);
        let ends = streams.into_iter().map(|stream| tokio::spawn(collect(stream)));
        for end in ends.collect::<Vec<_>>() {
            let ended = end.await.expect("no panic");
            assert_eq!(ended.reason().code.as_str(), "shutting_down");
        }
        let told = begun.elapsed();
        assert!(DRAIN <= told && told < DRAIN + BEYOND, "{told:?}");
        // Whose reader is still there.
        let status = tokio::task::spawn_blocking(move || served.wait()).await.expect("no panic");
        drop(floods);
        assert_eq!(status.code(), Some(0));
        begun.elapsed()
    });
    assert!(ended < DRAIN + BEYOND, "{ended:?}");
}

#[test]
fn what_goes_on_past_its_time_is_ended_and_at_once_at_a_second_signal() {
    const DRAIN_MS: u64 = 500;
    let begun = Instant::now();
    ends(&mut draining(DRAIN_MS), &[Signal::TERM]);
    assert!(begun.elapsed() >= Duration::from_millis(DRAIN_MS));
    let mut served = draining(600_000);
    let begun = Instant::now();
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let guest = start(&client, "endless").await;
        signal(&served, Signal::TERM);
        until_it_takes_on_nothing(&client).await;
        signal(&served, Signal::TERM);
        assert_eq!(collect(guest).await.reason().code.as_str(), "shutting_down");
    });
    assert_eq!(served.wait().code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
}
