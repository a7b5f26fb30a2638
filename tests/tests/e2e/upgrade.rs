//! Daemons in whose place another program comes, in the same process and on the same socket.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use trellis::config::Config;
use trellis::ipc::{Phase, owner_of};
use trellis::session::{Actor, SessionLimits};
use trellis_client::{Client, Program};
use trellis_tests::daemons::{self, PATIENCE, Served, collect, started, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;
use crate::identity::client;

const ALICE: Actor = Actor { uid: 40_001, gid: 40_001 };
const PROMPT: &str = "<|begin_of_text|>Once upon a time";
const N_CLIENTS: usize = 8;

fn signal(served: &Served, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, signal).expect("it runs");
}

/// A daemon that waits so long for what it is at.
fn serve(drain_ms: u64) -> Served {
    let config = daemons::config(exe());
    let sessions = SessionLimits { drain_ms, ..config.sessions };
    let metrics_listen = Some("127.0.0.1:0".parse().expect("an address"));
    Served::start_with(exe(), &Config { sessions, metrics_listen, ..config }, &[])
}

/// A component in a file, for the command.
fn component(folder: &Path) -> PathBuf {
    let path = folder.join("hostile.wasm");
    fs::write(&path, guests::hostile()).expect("written");
    path
}

/// A short guest of this seed.
fn run(served: &Served, wasm: &Path, seed: usize) -> Output {
    let (seed, wasm) = (seed.to_string(), wasm.to_str().expect("UTF-8"));
    let arguments = ["run", "--no-stdin", "--seed", &seed, wasm, "tokens", "12", PROMPT];
    daemons::output(&mut served.trellis(&arguments))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits until the log has said this so many times.
fn until_said(served: &Served, what: &str, n: usize) {
    until(what, || served.log().matches(what).count() >= n);
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn n_descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count()
}

/// Children of a process that have ended and whose end nobody asks for.
fn n_zombies(pid: u32) -> usize {
    let processes = fs::read_dir("/proc").expect("it is there").filter_map(Result::ok);
    let states = processes.filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
    let is_one = |stat: &String| {
        let mut words = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ')).into_iter().flatten();
        words.next() == Some("Z") && words.next().and_then(|parent| parent.parse().ok()) == Some(pid)
    };
    states.filter(is_one).count()
}

/// Where the daemon has said that metrics are.
fn metrics_of(served: &Served) -> Vec<SocketAddr> {
    let log = served.log();
    let lines = log.lines().filter(|line| line.contains("metrics are read over HTTP"));
    let address = |line: &str| {
        let (_, rest) = line.split_once("127.0.0.1:")?;
        let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
        format!("127.0.0.1:{port}").parse().ok()
    };
    lines.filter_map(address).collect()
}

/// What is answered, if anything is.
fn scrape(address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).expect("somebody listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    // A daemon that ends answers for a while only.
    stream.read_to_string(&mut answer).ok().filter(|&n| n > 0).map(|_| answer)
}

#[test]
fn three_upgrades_under_load_refuse_nobody_and_leave_nothing() {
    let served = serve(120_000);
    let folder = tempfile::tempdir().expect("a folder");
    let wasm = component(folder.path());
    let expected: Vec<_> = (0..N_CLIENTS).map(|seed| run(&served, &wasm, seed)).collect();
    assert!(expected.iter().all(|ran| ran.status.success()), "{expected:?}");
    let inode = || fs::symlink_metadata(served.socket()).expect("it is there").ino();
    until("nothing is left of the guests", || n_zombies(served.pid()) == 0);
    let (made, n_descriptors_before) = (inode(), n_descriptors(served.pid()));
    let metrics = metrics_of(&served)[0];

    let is_over = AtomicBool::new(false);
    let n_ran: usize = thread::scope(|scope| {
        let (served, wasm, is_over) = (&served, &wasm, &is_over);
        let clients: Vec<_> = expected
            .iter()
            .enumerate()
            .map(|(seed, expected)| {
                scope.spawn(move || {
                    let mut n_ran = 0_usize;
                    while !is_over.load(Ordering::Relaxed) {
                        let ran = run(served, wasm, seed);
                        assert!(ran.status.success(), "{ran:?}");
                        assert_eq!(ran.stdout, expected.stdout, "{ran:?}");
                        n_ran += 1;
                    }
                    n_ran
                })
            })
            .collect();
        let scraper = scope.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let answer = scrape(metrics).or_else(|| scrape(metrics)).expect("the next one answers");
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
                thread::sleep(Duration::from_millis(20));
            }
        });
        // Whatever fails below, the clients end.
        let upgrades = scope.spawn(move || {
            for n in 1..=3 {
                thread::sleep(Duration::from_millis(500));
                if n == 2 {
                    signal(served, Signal::USR2);
                } else {
                    let ended = daemons::output(&mut served.trellis(&["upgrade"]));
                    assert!(ended.status.success(), "{ended:?}");
                    assert!(text(&ended.stdout).starts_with("upgraded from "), "{ended:?}");
                }
                until_said(served, "ready in ", n + 1);
            }
        });
        let upgraded = upgrades.join();
        is_over.store(true, Ordering::Relaxed);
        upgraded.expect("it is upgraded");
        scraper.join().expect("no panic");
        clients.into_iter().map(|client| client.join().expect("no panic")).sum()
    });
    assert!(n_ran >= N_CLIENTS, "{n_ran}");
    assert_eq!(served.log().matches("takes the place of this program").count(), 3, "{}", served.log());
    assert_eq!(inode(), made, "the socket is the same");
    assert_eq!(metrics_of(&served), vec![metrics; 4]);
    assert_eq!(run(&served, &wasm, 3).stdout, expected[3].stdout);
    until("no more is open than before", || n_descriptors(served.pid()) <= n_descriptors_before);
    until("no child is left", || n_zombies(served.pid()) == 0);
    // It goes as any other.
    let mut served = served;
    signal(&served, Signal::TERM);
    assert_eq!(served.wait().code(), Some(0));
    assert!(!served.socket().exists());
}

#[test]
fn a_program_that_would_not_start_is_refused_and_the_daemon_serves_on() {
    let served = serve(0);
    let folder = tempfile::tempdir().expect("a folder");
    let wasm = component(folder.path());
    let put = |name: &str, lines: &str, mode: u32| {
        let path = folder.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{lines}\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
        path.to_str().expect("UTF-8").to_owned()
    };
    let refused = |arguments: &[&str], why: &str| {
        let all = [&["upgrade"][..], arguments].concat();
        let ended = daemons::output(&mut served.trellis(&all));
        let said = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(why) && said.contains("nothing has changed"), "{arguments:?}: {said}");
        assert!(run(&served, &wasm, 1).status.success(), "{arguments:?}");
    };
    let well = format!("exec '{}' \"$@\"", exe());
    refused(&["--program", &put("plain", &well, 0o600)], "cannot be started");
    refused(&["--program", &put("open", &well, 0o707)], "everybody may write to");
    refused(&["--program", &put("fails", "exit 1", 0o700)], "no trellis that works here");
    refused(&["--program", "/bin/true"], "no trellis that works here");
    refused(&["--program", folder.path().to_str().expect("UTF-8")], "no regular file");
    let settings = fs::read_to_string(served.config()).expect("it is there");
    fs::write(served.config(), "modles = ['tiny']").expect("written");
    refused(&[], "did you mean");
    signal(&served, Signal::USR2);
    until_said(&served, "no program takes the place of this one", 1);
    fs::write(served.config(), settings).expect("written");
    assert!(run(&served, &wasm, 1).status.success());
    assert!(!served.log().contains("takes the place of this program"), "{}", served.log());

    // A program of another path, from then on.
    let other = put("well", &well, 0o700);
    let ended = daemons::output(&mut served.trellis(&["upgrade", "--program", &other]));
    assert!(ended.status.success(), "{ended:?}");
    assert!(served.log().contains(&other), "{}", served.log());
    assert!(run(&served, &wasm, 1).status.success());
}

#[test]
fn what_goes_on_past_the_drain_hears_why_and_the_next_program_serves() {
    const DRAIN_MS: u64 = 1_000;
    let served = serve(DRAIN_MS);
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let program = Program::wasm(guests::hostile());
        let mut guest = client.start(program, with(&["endless"])).await.expect("connected");
        started(&mut guest).await;
        let operator = Client::connect_to(&served.socket()).await.expect("connected");
        let info = operator.upgrade(None).await.expect("it would start");
        assert_eq!((info.n_at_work, info.drain_ms), (1, DRAIN_MS));
        let again = operator.upgrade(None).await.expect_err("it is under way");
        assert!(again.is_retryable(), "{again}");
        // What comes before the drain has begun still runs.
        let refused = loop {
            match client.start(Program::wasm(guests::hostile()), with(&["exit-well"])).await {
                Ok(guest) => match collect(guest).await.error {
                    Some(error) => break error,
                    None => continue,
                },
                Err(error) => break error,
            }
        };
        assert!(refused.is_retryable(), "{refused}");
        let ended = collect(guest).await;
        assert_eq!(ended.reason().code.as_str(), "shutting_down");
        // It has waited at the socket.
        let next = Client::connect_to(&served.socket()).await.expect("connected");
        let _ = daemons::run(&next, &guests::hostile(), with(&["exit-well"])).await.well();
    });
}

#[test]
fn a_daemon_that_is_told_to_end_before_it_was_replaced_ends() {
    let mut served = serve(600_000);
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let program = Program::wasm(guests::hostile());
        let mut guest = client.start(program, with(&["endless"])).await.expect("connected");
        started(&mut guest).await;
        signal(&served, Signal::USR2);
        until_said(&served, "another program takes the place of this one", 1);
        let status = daemons::output(&mut served.trellis(&["status", "--json"]));
        assert_eq!(status.status.code(), Some(3), "{status:?}");
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
        assert_eq!(status["state"], "starting", "a probe waits: {status}");
        let progress = status["progress"].as_str().expect("it says what is waited for");
        assert!(progress.starts_with("another program takes its place in up to "), "{progress}");
        let mut doctor = daemons::trellis(exe());
        let doctor = daemons::output(doctor.arg("doctor").env("TRELLIS_SOCKET", served.socket()));
        assert!(text(&doctor.stdout).contains("another program takes its place"), "{doctor:?}");
        signal(&served, Signal::TERM);
        until_said(&served, "no program takes its place", 1);
        // It is not said any more to those who wait.
        until("it says that it ends", || {
            owner_of(&served.socket()).is_some_and(|owner| owner.phase == Phase::Ending)
        });
        signal(&served, Signal::TERM);
        assert_eq!(collect(guest).await.reason().code.as_str(), "shutting_down");
    });
    assert_eq!(served.wait().code(), Some(0));
    assert!(!served.socket().exists());
}

/// Whether a thread has SIGTERM held, if it lives.
fn holds_term(task: &Path) -> Option<bool> {
    let status = fs::read_to_string(task.join("status")).unwrap_or_default();
    let held = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let held = held.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    held.map(|mask| mask >> (Signal::TERM.as_raw() - 1) & 1 == 1)
}

#[test]
fn a_signal_between_two_programs_is_for_the_next_one() {
    let mut served = serve(0);
    // Another thread would take it from the next program.
    let threads = |served: &Served| {
        let process = PathBuf::from(format!("/proc/{}", served.pid()));
        let tasks = fs::read_dir(process.join("task")).expect("it runs").filter_map(Result::ok);
        tasks.filter(|task| holds_term(&task.path()) == Some(false)).count()
    };
    assert_eq!(threads(&served), 1);
    signal(&served, Signal::USR2);
    until_said(&served, "ready in ", 2);
    assert_eq!(threads(&served), 1);
    signal(&served, Signal::USR2);
    until_said(&served, "takes the place of this program", 2);
    signal(&served, Signal::TERM);
    assert!(served.wait().code().is_some(), "it ends by itself");
}

#[test]
fn until_it_is_replaced_a_daemon_has_children_of_its_own_program() {
    let beside = Path::new(exe()).parent().expect("a folder");
    let folder = tempfile::tempdir_in(beside).expect("a folder");
    let program = folder.path().join("trellis");
    fs::hard_link(exe(), &program).expect("the same file");
    // Nothing is compiled there yet, and the daemon's own program is to do it.
    let cache_dir = Some(folder.path().join("cache"));
    let config = Config { compile_exe: None, cache_dir, ..daemons::config(exe()) };
    let served = Served::start_with(program.to_str().expect("UTF-8"), &config, &[]);
    let next = folder.path().join("next");
    fs::write(&next, "#!/bin/sh\nexit 1\n").expect("written");
    fs::set_permissions(&next, fs::Permissions::from_mode(0o700)).expect("it is ours");
    fs::rename(&next, &program).expect("put in its place");
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let refused = client.upgrade(None).await.expect_err("it does not start");
        assert!(refused.to_string().contains("no trellis that works here"), "{refused}");
        let _ = daemons::run(&client, &guests::hostile(), with(&["exit-well"])).await.well();
    });
}

#[test]
fn programs_are_replaced_by_the_operator_where_they_are_daemons() {
    block_on(async {
        let daemon = daemons::start(&daemons::config(exe()));
        let daemon = std::sync::Arc::new(daemon);
        let alice = client(&daemon, ALICE).await;
        let refused = alice.upgrade(None).await.expect_err("that is the operator's");
        assert_eq!(refused.code().map(|code| code.as_str()), Some("permission_denied"));
        let operator = client(&daemon, Actor::this_process()).await;
        let refused = operator.upgrade(None).await.expect_err("it is part of the tests");
        assert_eq!(refused.code().map(|code| code.as_str()), Some("unsupported"));
    });
}
