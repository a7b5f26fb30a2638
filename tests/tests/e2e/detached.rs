//! Guests that go on without the connection that started them, and what clients come to read of them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::task::AbortHandle;
use trellis::config::{Config, Isolation};
use trellis::daemon::Daemon;
use trellis::session::{Actor, SessionLimits};
use trellis_client::{Client, Error, Event, Program, Resumed, StartOptions};
use trellis_engine::account::ActorId;
use trellis_tests::daemons::{self, Served, nothing_is_held, output, run, until, with};
use trellis_tests::engines::{Random, block_on};
use trellis_tests::guests;

use crate::exe;

const ALICE: Actor = Actor { uid: 70_001, gid: 70_001 };
const BOB: Actor = Actor { uid: 70_002, gid: 70_002 };

const PROMPT: &str = "<|begin_of_text|>Once upon a time";
const N_TOKENS: &str = "600";
const N_LOST: usize = 100;

/// A connection, and what ends it from the daemon's side as a kill would.
async fn connection(daemon: &Arc<Daemon>, actor: Actor) -> Result<(Client, AbortHandle), Error> {
    let (near, far) = tokio::io::duplex(64 << 10);
    let served = daemon.clone();
    let task = tokio::spawn(async move {
        let shutdown = served.shutdown().clone();
        let _ = served.sessions().serve(far, actor, shutdown).await;
    });
    Ok((Client::over(near).await?, task.abort_handle()))
}

async fn client(daemon: &Arc<Daemon>, actor: Actor) -> Client {
    connection(daemon, actor).await.expect("connected").0
}

async fn detach(client: &Client, options: StartOptions) -> u64 {
    client.start_detached(Program::wasm(guests::hostile()), options, |_| {}).await.expect("it starts")
}

/// As [`nothing_is_held`], and no detached guest runs or has left something for its readers.
async fn nothing_is_kept(daemon: &Daemon) {
    until("nothing is kept", async || {
        let used = daemon.sessions().used(ALICE).all;
        (used.n_detached, used.n_detached_ended) == (0, 0)
    })
    .await;
    nothing_is_held(daemon).await;
}

fn code(error: &Error) -> &str {
    error.code().unwrap_or_else(|| panic!("{error:?} has no code")).as_str()
}

/// The tokens of a detached guest, over connections that are lost at random moments.
async fn tokens_over_lost_connections(daemon: &Arc<Daemon>, guest_id: u64, seed: u64) -> (Vec<u32>, usize) {
    let current: Mutex<Option<AbortHandle>> = Mutex::new(None);
    let connect = async || {
        let (client, handle) = connection(daemon, ALICE).await?;
        *current.lock().expect("nothing panicked") = Some(handle);
        Ok(client)
    };
    let (mut random, mut n_lost) = (Random(seed), 0);
    let mut guest = Resumed::new(guest_id, Some(0), connect);
    let mut all = Vec::new();
    let mut lose_after = 0;
    loop {
        let event = tokio::select! {
            event = guest.next() => event,
            // In the middle of whatever is on its way.
            () = tokio::time::sleep(Duration::from_micros(lose_after)), if n_lost < N_LOST => {
                if let Some(handle) = current.lock().expect("nothing panicked").take() {
                    handle.abort();
                    n_lost += 1;
                }
                lose_after = random.below(4_000) as u64;
                continue;
            }
        };
        match event {
            Some(Ok(Event::Tokens { tokens })) => all.extend(tokens),
            Some(Ok(_)) => {}
            Some(Err(error)) => panic!("it goes on: {error:?}"),
            None => break,
        }
        // Also right after an event that was not acknowledged.
        if n_lost < N_LOST
            && random.below(3) == 0
            && let Some(handle) = current.lock().expect("nothing panicked").take()
        {
            handle.abort();
            n_lost += 1;
        }
    }
    assert!(guest.usage().is_some_and(|usage| usage.n_tokens > 0), "{:?}", guest.usage());
    (all, n_lost)
}

#[test]
fn a_stream_over_a_hundred_lost_connections_is_the_stream_of_one() {
    block_on(async {
        for isolation in [Isolation::Thread, Isolation::Process] {
            let daemon = Arc::new(daemons::start(&Config { isolation, ..daemons::config(exe()) }));
            let options = || with(&["tokens", N_TOKENS, PROMPT]);
            let alice = client(&daemon, ALICE).await;
            let expected = run(&alice, &guests::hostile(), options()).await.well().tokens;
            let guest_id = detach(&alice, options()).await;
            drop(alice);
            let (tokens, n_lost) = tokens_over_lost_connections(&daemon, guest_id, 7).await;
            assert_eq!(tokens, expected, "{isolation:?}");
            assert_eq!(n_lost, N_LOST, "{isolation:?}: {} events are too few", tokens.len());
            // That the end was had may have been lost with the last connection that was.
            match client(&daemon, ALICE).await.attach(guest_id, None).await {
                Ok(attached) => drop(attached.text().await.expect("it ended well")),
                Err(error) => assert_eq!(code(&error), "unknown_guest"),
            }
            nothing_is_kept(&daemon).await;
        }
    });
}

#[test]
fn a_guest_that_nobody_reads_waits_and_leaves_others_alone() {
    block_on(async {
        for isolation in [Isolation::Thread, Isolation::Process] {
            let sessions = SessionLimits {
                detached_bytes: 0,
                detached_kept_bytes: 0,
                ..daemons::config(exe()).sessions
            };
            let config = Config { isolation, sessions, ..daemons::config(exe()) };
            let daemon = Arc::new(daemons::start(&config));
            let (alice, bob) = (client(&daemon, ALICE).await, client(&daemon, BOB).await);
            let expected = run(&bob, &guests::hostile(), with(&["tokens", "60", PROMPT])).await.well().tokens;
            let flood = detach(&alice, with(&["flood-text"])).await;
            let tokens = run(&bob, &guests::hostile(), with(&["tokens", "60", PROMPT])).await.well().tokens;
            assert_eq!(tokens, expected);
            let tokens = run(&alice, &guests::hostile(), with(&["tokens", "60", PROMPT])).await.well().tokens;
            assert_eq!(tokens, expected, "its own user's neither");
            // It goes on once somebody reads.
            let mut attached = alice.attach(flood, None).await.expect("it runs");
            let mut n_bytes = 0;
            while n_bytes < 2 << 20 {
                n_bytes += attached.next().await.expect("without end").expect("it runs").credit_bytes();
            }
            // What another user may see and stop, it may not read.
            let refused = bob.attach(flood, None).await.expect_err("it is Alice's");
            assert_eq!(code(&refused), "unknown_guest");
            alice.stop(flood).await.expect("it runs");
            assert_eq!(code(&attached.text().await.expect_err("it was stopped")), "stopped");
            drop((alice, bob));
            nothing_is_kept(&daemon).await;
        }
    });
}

#[cfg(target_os = "linux")]
#[test]
fn a_guest_whose_process_is_killed_says_so_to_who_comes_later() {
    block_on(async {
        let daemon =
            Arc::new(daemons::start(&Config { isolation: Isolation::Process, ..daemons::config(exe()) }));
        let guest_id = detach(&client(&daemon, ALICE).await, with(&["endless"])).await;
        let process = || daemon.service().host().process_of(ActorId(ALICE.uid));
        until("it has a process", async || process().is_some()).await;
        let pid = process().expect("it has one");
        let pid = Pid::from_raw(i32::try_from(pid).expect("a process")).expect("not 0");
        kill_process(pid, Signal::KILL).expect("it runs");
        let alice = client(&daemon, ALICE).await;
        let error = alice.attach(guest_id, None).await.expect("its end is kept").text().await;
        assert_eq!(code(&error.expect_err("it was killed")), "process_lost");
        nothing_is_kept(&daemon).await;
    });
}

/// The standard output of a command that ends well.
fn said(served: &Served, arguments: &[&str]) -> String {
    let output = output(&mut served.trellis(arguments));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it is text");
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{arguments:?}: {out}{err}");
    out
}

#[test]
fn guests_are_detached_and_attached_to_by_commands() {
    let served = Served::start(exe());
    let folder = tempfile::tempdir().expect("a folder");
    let wasm = folder.path().join("hostile.wasm");
    std::fs::write(&wasm, guests::hostile()).expect("written");
    let path = wasm.to_str().expect("UTF-8");
    let expected = said(&served, &["run", "--no-stdin", "--seed", "7", path, "tokens", "20", PROMPT]);
    assert!(expected.len() > 20, "{expected}");
    let id = said(&served, &["run", "--detach", "--seed", "7", path, "tokens", "20", PROMPT]);
    let id = id.strip_suffix('\n').expect("a line");
    assert_eq!(said(&served, &["attach", id]), expected);
    let again = output(&mut served.trellis(&["attach", id]));
    assert_eq!(again.status.code(), Some(2), "its end was had: {again:?}");

    let line = said(&served, &["run", "--detach", "--json", path, "echo"]);
    let started = line.lines().last().expect("a line");
    let started: serde_json::Value = serde_json::from_str(started).expect("JSON");
    assert_eq!(started["type"], "started");
    let id = started["guest_id"].as_u64().expect("a number").to_string();
    until_said(&served, "waiting, detached");

    // Ctrl-C ends the reading and not the guest.
    let mut reader = served.trellis(&["attach", &id]).spawn().expect("it runs");
    until_said(&served, "attached");
    let pid = Pid::from_raw(i32::try_from(reader.id()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::INT).expect("it runs");
    assert_eq!(daemons::wait(&mut reader).code(), Some(130));
    until_said(&served, "detached");

    std::fs::write(folder.path().join("lines"), "one\ntwo\n").expect("written");
    let mut messenger = served.trellis(&["attach", "--messages", "--json", &id]);
    messenger.stdin(std::fs::File::open(folder.path().join("lines")).expect("it is there"));
    let output = output(&mut messenger);
    let out = String::from_utf8(output.stdout).expect("it is text");
    assert!(output.status.success() && out.contains("one") && out.contains("\"ok\":true"), "{out}");

    // A reading that another one takes over ends, and says so.
    let id = said(&served, &["run", "--detach", path, "endless"]);
    let id = id.trim();
    let mut command = served.trellis(&["attach", "--json", id]);
    let first = std::thread::spawn(move || daemons::output(&mut command));
    until_said(&served, "attached");
    let mut second = served.trellis(&["attach", id]).spawn().expect("it runs");
    let output = first.join().expect("it ends");
    let out = String::from_utf8(output.stdout).expect("it is text");
    let end = out.lines().last().expect("a line");
    assert!(end.contains("\"type\":\"end\"") && end.contains("\"code\":\"taken_over\""), "{out}");
    assert_eq!(output.status.code(), Some(1), "{out}");
    kill_process(Pid::from_child(&second), Signal::INT).expect("it runs");
    assert_eq!(daemons::wait(&mut second).code(), Some(130));
    assert!(said(&served, &["stop", id]).contains("stopped guest"));
    let attached = daemons::output(&mut served.trellis(&["attach", "--json", id]));
    let out = String::from_utf8(attached.stdout).expect("it is text");
    assert!(attached.status.code() == Some(1) && out.contains("\"code\":\"stopped\""), "{out}");
}

fn until_said(served: &Served, what: &str) {
    block_on(until(what, async || said(served, &["ps"]).contains(what)));
}
