//! What signals do to a daemon, and what its clients hear of it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use trellis_client::{Client, Guest, Program};
use trellis_tests::daemons::{self, Served, collect, started, with};
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
    // A terminal that closes may send two.
    for signals in [&[Signal::TERM][..], &[Signal::INT], &[Signal::HUP, Signal::HUP]] {
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
