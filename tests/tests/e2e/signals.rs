//! What signals do to a daemon, and what its clients hear of it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
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
