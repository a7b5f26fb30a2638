//! Guests in a process of their own for each user: they do what they do in threads, and end alone.
#![cfg(target_os = "linux")]

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use trellis::config::{Config, Isolation};
use trellis::daemon::Daemon;
use trellis::guest::{GuestLimits, PolicySettings};
use trellis::session::Actor;
use trellis_client::{Client, Event, Guest, Program, StartOptions};
use trellis_engine::account::ActorId;
use trellis_tests::daemons::{self, Served, collect, nothing_is_held, output, run, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

const ALICE: Actor = Actor { uid: 70_001, gid: 70_001 };
const BOB: Actor = Actor { uid: 70_002, gid: 70_002 };

fn config(isolation: Isolation) -> Config {
    Config { isolation, ..daemons::config(exe()) }
}

async fn client(daemon: &Arc<Daemon>, actor: Actor) -> Client {
    let (near, far) = tokio::io::duplex(64 << 10);
    let daemon = daemon.clone();
    tokio::spawn(async move { daemon.sessions().serve(far, actor, daemon.shutdown().clone()).await });
    Client::over(near).await.expect("connected")
}

/// The process of a user's guests.
fn process_of(daemon: &Daemon, actor: Actor) -> u32 {
    daemon.service().host().process_of(ActorId(actor.uid)).expect("the user's guests have a process")
}

fn is_there(pid: u32) -> bool {
    // One that was killed and that nobody has waited for has an empty command line.
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|command| !command.is_empty())
}

fn stream(n_tokens: &str) -> StartOptions {
    with(&["tokens", n_tokens, "<|begin_of_text|>Once upon a time"])
}

async fn start(client: &Client, options: StartOptions) -> Guest {
    client.start(Program::wasm(guests::hostile()), options).await.expect("the connection stands")
}

async fn first_tokens(guest: &mut Guest) {
    loop {
        match guest.next().await {
            Some(Ok(Event::Tokens { .. })) => return,
            Some(Ok(_)) => {}
            other => panic!("it streams: {other:?}"),
        }
    }
}

#[test]
fn guests_say_and_use_the_same_in_processes_and_in_threads() {
    block_on(async {
        let mut seen = Vec::new();
        for isolation in [Isolation::Thread, Isolation::Process] {
            let daemon = Arc::new(daemons::start(&config(isolation)));
            let alice = client(&daemon, ALICE).await;
            let ended = run(&alice, &guests::hostile(), stream("40")).await.well();
            let usage = ended.usage.expect("it ended");
            seen.push((ended.tokens, usage.n_tokens > 0));
            drop(alice);
            nothing_is_held(&daemon).await;
        }
        assert_eq!(seen[0].0.len(), 40);
        assert_eq!(seen[0], seen[1]);
    });
}

#[test]
fn a_process_that_is_killed_takes_its_own_guests_along_and_nobody_elses() {
    block_on(async {
        let daemon = Arc::new(daemons::start(&config(Isolation::Process)));
        let (alice, bob) = (client(&daemon, ALICE).await, client(&daemon, BOB).await);
        let expected = run(&bob, &guests::hostile(), stream("120")).await.well().tokens;
        let mut victim = start(&alice, stream("100000")).await;
        first_tokens(&mut victim).await;
        let own = process_of(&daemon, ALICE);
        assert_ne!(own, process_of(&daemon, BOB), "each user has one");
        let neighbour = start(&bob, stream("120")).await;
        let killed = std::process::Command::new("kill").args(["-9", &own.to_string()]).status();
        assert!(killed.expect("kill is there").success());
        let ended = collect(victim).await;
        assert_eq!(ended.reason().code.as_str(), "process_lost", "{ended:?}");
        assert!(
            ended.reason().code.is_retryable() && ended.reason().message.contains("signal 9"),
            "{ended:?}"
        );
        assert_eq!(
            collect(neighbour).await.well().tokens,
            expected,
            "the other user's stream is what it was"
        );
        // The next guest of the user has a process again.
        assert_eq!(run(&alice, &guests::hostile(), stream("120")).await.well().tokens, expected);
        drop((alice, bob));
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn what_is_said_of_a_process_that_ended_is_for_the_operators_policy_too() {
    let file = tempfile::NamedTempFile::with_suffix(".wasm").expect("a file");
    fs::write(file.path(), guests::faulty_policy()).expect("the component is written");
    let policy = PolicySettings {
        component: Some(file.path().to_owned()),
        settings: [("fault".to_owned(), "errors".to_owned())].into(),
        // Slow machines take their time.
        call_ms: 2_000,
        load_ms: 20_000,
        ..PolicySettings::default()
    };
    block_on(async {
        let daemon = Arc::new(daemons::start(&Config { policy, ..config(Isolation::Process) }));
        let alice = client(&daemon, ALICE).await;
        let mut victim = start(&alice, stream("100000")).await;
        first_tokens(&mut victim).await;
        let killed =
            std::process::Command::new("kill").args(["-9", &process_of(&daemon, ALICE).to_string()]).status();
        assert!(killed.expect("kill is there").success());
        let ended = collect(victim).await;
        let reason = ended.reason();
        assert_eq!((reason.code.as_str(), reason.message.as_str()), ("process_lost", "it did not go well"));
        assert_eq!(reason.value, None);
    });
}

#[test]
fn what_all_guests_of_a_user_may_hold_is_one_budget_in_their_process() {
    block_on(async {
        let mut config = config(Isolation::Process);
        config.budgets.user.host_bytes = Some(48 << 20);
        config.budgets.session.host_bytes = Some(32 << 20);
        let daemon = Arc::new(daemons::start(&config));
        let (first, second) = (client(&daemon, ALICE).await, client(&daemon, ALICE).await);
        let bob = client(&daemon, BOB).await;
        let ended = run(&first, &guests::hostile(), with(&["memory"])).await;
        let reason = ended.reason();
        assert_eq!((reason.code.as_str(), reason.name.as_deref()), ("budget_exceeded", Some("host_bytes")));
        assert_eq!(reason.limit, Some(32 << 20), "{reason:?}");
        // What it borrowed comes back with its end.
        let _ = run(&second, &guests::hostile(), stream("8")).await.well();
        let _ = run(&bob, &guests::hostile(), stream("8")).await.well();
        drop((first, second, bob));
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_process_that_uses_more_memory_than_it_may_ends_alone() {
    block_on(async {
        let limits = GuestLimits { process_memory_bytes: Some(1 << 20), ..daemons::limits() };
        let mut config = Config { limits, ..config(Isolation::Process) };
        // By default it is what the process leaves, and would refuse the guest before.
        config.budgets.user.host_bytes = Some(1 << 30);
        let daemon = Arc::new(daemons::start(&config));
        let alice = client(&daemon, ALICE).await;
        let ended = run(&alice, &guests::hostile(), stream("8")).await;
        assert_eq!(ended.reason().code.as_str(), "process_lost", "{ended:?}");
        assert!(alice.info().await.is_ok(), "the daemon goes on");
        drop(alice);
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn an_idle_process_is_there_for_the_next_guest() {
    block_on(async {
        let daemon = Arc::new(daemons::start(&config(Isolation::Process)));
        let alice = client(&daemon, ALICE).await;
        let _ = run(&alice, &guests::hostile(), stream("8")).await.well();
        let own = process_of(&daemon, ALICE);
        let begun = Instant::now();
        let _ = run(&alice, &guests::hostile(), stream("8")).await.well();
        println!("a second guest took {:?}", begun.elapsed());
        assert!(process_of(&daemon, ALICE) == own && is_there(own));
        drop(alice);
        drop(daemon);
        until("its process ends with the daemon", async || !is_there(own)).await;
        assert!(begun.elapsed() < Duration::from_secs(60));
    });
}

/// A word that a command says of the daemon or of its file.
fn said(served: &Served, command: &mut Command) -> serde_json::Value {
    let ran = output(command.arg("--json").env("TRELLIS_SOCKET", served.socket()));
    let text = String::from_utf8_lossy(&ran.stdout);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text} {ran:?}"))
}

#[test]
fn where_guests_run_follows_from_who_may_come() {
    let text = |isolation| toml::to_string(&config(isolation)).expect("settings can be written down");
    let is_root = rustix::process::geteuid().is_root();
    // The folder of the socket is its user's alone: others come to root's all the same.
    let expected = if is_root { "process" } else { "thread" };
    for (told, holds, source) in [
        (Isolation::Auto, expected, "socket"),
        (Isolation::Thread, "thread", "file"),
        (Isolation::Process, "process", "file"),
    ] {
        let served = Served::start_on(exe(), &text(told), &[]);
        let mut info = daemons::trellis(exe());
        let info = said(&served, info.arg("info"));
        assert_eq!(info["isolation"], holds, "{told:?}");
        // How far processes are confined is said where there are such, and is in the log where that is not in whole.
        assert_eq!(info["file_rules"].is_string(), holds == "process", "{info}");
        let is_whole = holds == "thread" || info["file_rules"] == "enforced";
        let n_warnings =
            served.log().matches("guests run in processes of their own, and this kernel").count();
        assert_eq!(n_warnings, usize::from(!is_whole), "{}", served.log());
        let mut show = daemons::trellis(exe());
        let shown =
            said(&served, show.args(["config", "show", "isolation", "--config"]).arg(served.config()));
        assert_eq!((&shown[0]["value"], &shown[0]["source"]), (&holds.into(), &source.into()), "{shown}");
        // It does not change while the daemon runs.
        let reloaded = output(&mut served.trellis(&["reload"]));
        assert_eq!(String::from_utf8_lossy(&reloaded.stdout), "nothing has changed\n", "{told:?}");
    }
}
