//! Those who wait for a daemon while another program takes its place, or while it loads its models.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use trellis::config::{Config, Device};
use trellis::ipc::{Owner, Phase, owner_of};
use trellis::session::SessionLimits;
use trellis_client::{Client, Program};
use trellis_tests::daemons::{self, PATIENCE, Served, collect, started, with};
use trellis_tests::engines::block_on;
use trellis_tests::terminal::Terminal;
use trellis_tests::{builds, guests, held, pack};

use crate::exe;

const PROMPT: &str = "<|begin_of_text|>Once upon a time";

/// A daemon whose loads a test can hold up, and a guest beside it.
struct Desk {
    served: Served,
    folder: TempDir,
    component: String,
}

/// A process that is killed when its test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Desk {
    /// One whose drains take so long.
    fn new(drain_ms: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let component = folder.path().join("hostile.wasm");
        fs::write(&component, guests::hostile()).expect("written");
        let config = daemons::config(exe());
        let sessions = SessionLimits { drain_ms, ..config.sessions };
        let config = Config { device: Device::Cpu, sessions, ..config };
        let held = folder.path().join("held");
        let environment = [(held::ENVIRONMENT, held.to_str().expect("UTF-8"))];
        let served = Served::start_with(exe(), &config, &environment);
        Self { served, component: component.to_str().expect("UTF-8").to_owned(), folder }
    }

    fn held(&self) -> PathBuf {
        self.folder.path().join("held")
    }

    /// Has the next program take the place of this one.
    fn upgrade(&self) {
        let pid = Pid::from_raw(i32::try_from(self.served.pid()).expect("a process")).expect("not 0");
        kill_process(pid, Signal::USR2).expect("it runs");
    }

    /// The same, and holds the next one up as it loads.
    fn upgrade_to_one_that_loads(&self) {
        fs::write(self.held(), "").expect("written");
        self.upgrade();
        until("the next one loads", || self.said().as_deref() == Some("loading tiny"));
    }

    /// What the daemon says of its start.
    fn said(&self) -> Option<String> {
        match owner_of(&self.served.socket()) {
            Some(Owner { phase: Phase::Starting(said), .. }) => said,
            _ => None,
        }
    }

    fn go_on(&self) {
        fs::remove_file(self.held()).expect("it is there");
    }

    /// The arguments of a short run.
    fn run(&self, more: &[&'static str]) -> Vec<String> {
        let guest = [self.component.as_str(), "tokens", "12", PROMPT].map(str::to_owned);
        let options = [&["run", "--seed", "3", "--no-stdin"][..], more].concat();
        options.into_iter().map(str::to_owned).chain(guest).collect()
    }

    /// Runs a command beside the test.
    fn beside(&self, arguments: &[String]) -> thread::JoinHandle<Output> {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut command = self.served.trellis(&arguments);
        thread::spawn(move || daemons::output(&mut command))
    }

    /// The same on a terminal, if there is one.
    fn on_terminal(&self, arguments: &[&str], environment: &[(&str, &Path)]) -> Option<Terminal> {
        let socket = self.served.socket();
        let (name, rest) = arguments.split_first().expect("a command has a name");
        let arguments = [&[*name, "--socket", socket.to_str().expect("UTF-8")][..], rest].concat();
        Terminal::run(exe(), &arguments, environment)
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn what_starts_while_the_next_program_loads_waits_and_is_shown_how_far_that_is() {
    let desk = Desk::new(0);
    let expected = desk.beside(&desk.run(&[])).join().expect("no panic");
    assert!(expected.status.success(), "{expected:?}");
    desk.upgrade_to_one_that_loads();
    let arguments = desk.run(&[]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let terminal = desk.on_terminal(&arguments, &[]);
    let plain = desk.beside(&desk.run(&[]));
    let json = desk.beside(&desk.run(&["--json"]));
    let detached = desk.beside(&desk.run(&["--detach"]));
    let attached = desk.beside(&["attach", "7"].map(str::to_owned));
    if let Some(terminal) = &terminal {
        terminal.until("it says how far that is", |screen| {
            screen.contains("waiting for the daemon: loading tiny")
        });
    }
    thread::sleep(Duration::from_millis(1_500));
    let waiting = [&plain, &json, &detached, &attached];
    assert!(waiting.iter().all(|one| !one.is_finished()), "they wait");
    desk.go_on();
    if let Some(terminal) = terminal {
        assert_eq!(terminal.status(), 0, "{}", terminal.screen());
        assert!(!terminal.screen().contains("waiting for"), "{}", terminal.screen());
    }
    let plain = plain.join().expect("no panic");
    assert!(plain.status.success(), "{plain:?}");
    assert_eq!(plain.stdout, expected.stdout);
    assert!(text(&plain.stderr).contains("waiting for the daemon"), "{plain:?}");
    let json = json.join().expect("no panic");
    assert!(json.status.success() && json.stderr.is_empty(), "{json:?}");
    let detached = detached.join().expect("no panic");
    assert!(detached.status.success(), "{detached:?}");
    let guest_id = text(&detached.stdout).trim().to_owned();
    let read = desk.beside(&["attach".to_owned(), guest_id]).join().expect("no panic");
    assert_eq!((read.status.code(), read.stdout), (Some(0), expected.stdout));
    // The guest was of the program before, if of any.
    let attached = attached.join().expect("no panic");
    assert_eq!(attached.status.code(), Some(2), "{attached:?}");
    assert!(text(&attached.stderr).contains("there is no detached guest 7"), "{attached:?}");
}

#[test]
fn a_daemon_that_gives_no_sign_is_waited_for_as_long_as_was_said() {
    let desk = Desk::new(0);
    desk.upgrade_to_one_that_loads();
    let begun = Instant::now();
    let ran = desk.beside(&desk.run(&["--wait", "2"])).join().expect("no panic");
    assert_eq!(ran.status.code(), Some(i32::from(trellis::cli::TRY_AGAIN)), "{ran:?}");
    assert!(text(&ran.stderr).contains("has not answered, nor shown that it comes on, for 2 s"), "{ran:?}");
    assert!(begun.elapsed() >= Duration::from_secs(2));
    desk.go_on();
}

#[test]
fn what_is_refused_by_a_program_on_its_way_out_is_started_in_the_next() {
    let desk = Desk::new(120_000);
    let detached = block_on(async {
        let client = Client::connect_to(&desk.served.socket()).await.expect("connected");
        let mut guest =
            client.start(Program::wasm(guests::hostile()), with(&["echo"])).await.expect("started");
        started(&mut guest).await;
        let pid = Pid::from_raw(i32::try_from(desk.served.pid()).expect("a process")).expect("not 0");
        kill_process(pid, Signal::TERM).expect("it runs");
        daemons::until("it drains", async || {
            client.info().await.is_ok_and(|info| info.state.as_deref() == Some("draining"))
        })
        .await;
        let detached = desk.beside(&desk.run(&["--detach"]));
        tokio::time::sleep(Duration::from_millis(1_000)).await;
        assert!(!detached.is_finished(), "it waits for the next one");
        guest.end_messages().await.expect("it listens");
        let _ = collect(guest).await.well();
        detached
    });
    let mut desk = desk;
    assert_eq!(desk.served.wait().code(), Some(0));
    desk.served.start_again();
    let detached = detached.join().expect("no panic");
    assert!(detached.status.success(), "{detached:?}");
    assert!(text(&detached.stderr).contains("about to go down; waiting for the next one"), "{detached:?}");
}

#[test]
fn who_watches_a_guest_goes_on_in_the_next_program() {
    let desk = Desk::new(0);
    let said = desk.folder.path().join("said");
    let mut command = desk.served.trellis(&["run", "--watch", &desk.component, "tokens", "4", PROMPT]);
    command.stderr(fs::File::create(&said).expect("made")).stdout(Stdio::null());
    let mut watching = Running(command.spawn().expect("it runs"));
    let n_rounds = || fs::read_to_string(&said).expect("it is there").matches("waiting for a change").count();
    until("the first round is over", || n_rounds() == 1);
    desk.upgrade_to_one_that_loads();
    // It is built anew while the next daemon loads.
    fs::write(&desk.component, guests::hostile()).expect("written");
    thread::sleep(Duration::from_millis(1_500));
    assert_eq!(n_rounds(), 1, "it waits");
    desk.go_on();
    until("the second round is over", || n_rounds() == 2);
    assert!(watching.0.try_wait().expect("it can be asked").is_none());
    let said = fs::read_to_string(&said).expect("it is there");
    assert!(!said.contains("error: "), "{said}");
}

#[test]
fn who_watches_a_guest_that_was_cut_short_has_it_run_again_in_the_next_program() {
    let desk = Desk::new(0);
    let said = desk.folder.path().join("said");
    let mut command = desk.served.trellis(&["run", "--watch", &desk.component, "endless"]);
    command.stderr(fs::File::create(&said).expect("made")).stdout(Stdio::null());
    let mut watching = Running(command.spawn().expect("it runs"));
    let n_guests = || {
        block_on(async {
            match Client::connect_to(&desk.served.socket()).await {
                Ok(client) => client.info().await.map_or(0, |info| info.n_guests),
                Err(_) => 0,
            }
        })
    };
    until("it runs", || n_guests() == 1);
    desk.upgrade();
    until("the next program serves", || desk.served.log().matches("ready in ").count() == 2);
    until("it runs again", || n_guests() == 1);
    assert!(watching.0.try_wait().expect("it can be asked").is_none());
    let said = fs::read_to_string(&said).expect("it is there");
    assert!(said.contains("the daemon is going down"), "{said}");
}

#[test]
fn a_conversation_goes_on_with_the_next_program() {
    if pack::folder().is_some() {
        println!("skipped: the guest is built from source");
        return;
    }
    // Built in a time of its own.
    assert!(!guests::example("conversation").is_empty());
    let desk = Desk::new(5_000);
    let state = tempfile::tempdir().expect("a folder");
    let Some(terminal) = desk.on_terminal(&["chat"], &[("XDG_STATE_HOME", state.path())]) else { return };
    terminal.ends_with(&[">>>"]);
    terminal.line("What is 37 + 48?");
    terminal.ends_with(&["85", ">>>"]);
    desk.upgrade_to_one_that_loads();
    terminal.line("What is 3 + 4?");
    terminal.until("it waits", |screen| screen.contains("waiting for the daemon: loading tiny"));
    desk.go_on();
    terminal.ends_with(&["7", ">>>"]);
    // Interrupted, a wait ends, and the conversation does not.
    desk.upgrade_to_one_that_loads();
    terminal.line("What is 37 + 48?");
    terminal.until("it waits", |screen| screen.contains("waiting for the daemon: loading tiny"));
    terminal.press(&["C-c"]);
    terminal.until("a prompt", |screen| screen.ends_with("\n>>>") && !screen.contains("waiting for"));
    desk.go_on();
    terminal.line("What is 37 + 48?");
    terminal.ends_with(&["85", ">>>"]);
    terminal.line("/bye");
    assert_eq!(terminal.status(), 0);
}

/// A program that passes for another version, which knows sockets that are left in this format.
fn other_version(folder: &Path, version: &str, format: u32) -> String {
    let path = folder.join(format!("trellis-{version}"));
    let variable = builds::ENVIRONMENT;
    let lines = format!("#!/bin/sh\n{variable}='{version} {format}' exec '{}' \"$@\"\n", exe());
    fs::write(&path, lines).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("it is ours");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn a_program_of_another_version_takes_a_socket_that_it_knows_how_to_take_and_no_other() {
    let desk = Desk::new(0);
    let upgrade =
        |program: &str| daemons::output(&mut desk.served.trellis(&["upgrade", "--program", program]));
    let runs = || {
        let ran = desk.beside(&desk.run(&[])).join().expect("no panic");
        assert!(ran.status.success(), "{ran:?}");
    };
    let unknown = other_version(desk.folder.path(), "9.9.9", 2);
    let refused = upgrade(&unknown);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let said = text(&refused.stderr);
    assert!(said.contains("(9.9.9) would not start as this daemon did"), "{said}");
    assert!(said.contains("in format 1, of which this program knows 2"), "{said}");
    runs();
    assert!(!desk.served.log().contains("takes the place of this program"), "{}", desk.served.log());

    let known = other_version(desk.folder.path(), "9.9.8", 1);
    let upgraded = upgrade(&known);
    assert!(upgraded.status.success(), "{upgraded:?}");
    assert!(desk.served.log().contains(&format!("{known} (9.9.8) takes the place")), "{}", desk.served.log());
    runs();
    // And back again, as an operator does who finds it wanting.
    let back = upgrade(exe());
    assert!(back.status.success(), "{back:?}");
    runs();
}
