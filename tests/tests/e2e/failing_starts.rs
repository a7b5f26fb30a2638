//! A daemon that fails over and over at its start, under a service manager that keeps its socket and starts it again.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use trellis::config::{Config, Device};
use trellis::ipc::{Owner, Phase, owner_of};
use trellis_tests::daemons::{self, PATIENCE};
use trellis_tests::terminal::Terminal;
use trellis_tests::{guests, held};

use crate::exe;

/// What systemd waits before it starts a daemon again (`RestartSec=`).
const PAUSE: Duration = Duration::from_secs(1);

/// How a start comes to nothing.
#[derive(Clone, Copy, Debug)]
enum Fails {
    /// It is killed while it loads a model, as where memory does not suffice.
    Killed,
    /// It finds by itself that it cannot start.
    Gives,
}

/// A service manager that has made the socket.
struct Manager {
    folder: TempDir,
    /// Until it has given up.
    listener: Option<UnixListener>,
}

impl Manager {
    fn new(config: &Config) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let text = toml::to_string(config).expect("settings can be written down");
        fs::write(folder.path().join("trellis.toml"), text).expect("written");
        fs::write(folder.path().join("hostile.wasm"), guests::hostile()).expect("written");
        let listener = UnixListener::bind(folder.path().join("trellis.sock")).expect("bound");
        Self { folder, listener: Some(listener) }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.at("trellis.sock")
    }

    /// Starts a daemon, which is handed the socket. Its loads are held up as long as there is the file `held`.
    fn start(&self) -> Child {
        let listener = self.listener.as_ref().expect("it has not given up");
        let socket = listener.try_clone().expect("a descriptor");
        let mut daemon = daemons::serve_handed(exe(), &self.at("trellis.toml"), socket.into(), None);
        daemon.env(held::ENVIRONMENT, self.at("held"));
        let log = fs::File::options().create(true).append(true).open(self.at("log")).expect("made");
        daemon.stderr(log).spawn().expect("it starts")
    }

    /// A start that comes to nothing, and the pause after it.
    fn fail(&self, fails: Fails, is_over: &AtomicBool) {
        let mut daemon = self.start();
        match fails {
            Fails::Killed => {
                until("it loads", || said(&self.socket()).is_some_and(|said| said.starts_with("loading")));
                // Long enough to be seen.
                rest(PAUSE, is_over);
                daemon.kill().expect("it runs");
                let _ = daemons::wait(&mut daemon);
            }
            Fails::Gives => assert!(!daemons::wait(&mut daemon).success()),
        }
        rest(PAUSE, is_over);
    }

    /// The arguments of a short run.
    fn run(&self, more: &[&str]) -> Vec<String> {
        let (socket, guest) = (self.socket(), self.at("hostile.wasm"));
        let place = ["run", "--socket", socket.to_str().expect("UTF-8"), "--no-stdin"];
        let guest = [guest.to_str().expect("UTF-8"), "exit-well"];
        [&place[..], more, &guest[..]].concat().into_iter().map(str::to_owned).collect()
    }

    fn trellis(&self, arguments: &[String]) -> Command {
        let mut command = daemons::trellis(exe());
        command.args(arguments);
        command
    }
}

/// What a daemon says of its start.
fn said(socket: &Path) -> Option<String> {
    match owner_of(socket) {
        Some(Owner { phase: Phase::Starting(said), .. }) => said,
        _ => None,
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits so long, unless all is over before.
fn rest(time: Duration, is_over: &AtomicBool) {
    let begun = Instant::now();
    while begun.elapsed() < time && !is_over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(20));
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn config() -> Config {
    Config { device: Device::Cpu, ..daemons::config(exe()) }
}

/// That a command has waited for three starts, and says what came of them.
fn has_given_up(ended: &Output) {
    assert_eq!(ended.status.code(), Some(i32::from(trellis::cli::TRY_AGAIN)), "{ended:?}");
    let said = text(&ended.stderr);
    assert!(
        said.contains("starts over and over: 3 starts came to nothing while it was waited for"),
        "{said}"
    );
}

/// Says that all is over, also where something has failed.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits for a daemon each start of which comes to nothing, in several ways at once.
fn is_waited_for_no_longer_than_three_starts(config: &Config, fails: Fails) -> Manager {
    let manager = Manager::new(config);
    if let Fails::Killed = fails {
        fs::write(manager.at("held"), "").expect("written");
    }
    let (is_over, n_starts) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let over = Over(&is_over);
        let starts = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                n_starts.fetch_add(1, Ordering::Relaxed);
                manager.fail(fails, &is_over);
            }
        });
        let beside = |arguments: Vec<String>| {
            let mut command = manager.trellis(&arguments);
            scope.spawn(move || daemons::output(&mut command))
        };
        let arguments = manager.run(&[]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let terminal = Terminal::run(exe(), &arguments, &[]);
        let socket = manager.socket();
        let attach = ["attach", "--socket", socket.to_str().expect("UTF-8"), "7"];
        let [plain, detached, json, attached] = [
            manager.run(&[]),
            manager.run(&["--detach"]),
            manager.run(&["--json"]),
            attach.map(str::to_owned).to_vec(),
        ]
        .map(beside);
        if let (Some(terminal), Fails::Killed) = (&terminal, fails) {
            terminal.until("it says how far that is", |screen| {
                screen.contains("waiting for the daemon: loading tiny")
            });
        }
        let ended = [plain, detached, attached].map(|waiting| waiting.join().expect("no panic"));
        let json = json.join().expect("no panic");
        if let Some(terminal) = &terminal {
            assert_eq!(terminal.status(), i32::from(trellis::cli::TRY_AGAIN), "{}", terminal.screen());
        }
        drop(over);
        starts.join().expect("no panic");
        ended.iter().for_each(has_given_up);
        has_given_up(&json);
        assert!(text(&json.stderr).contains("\"retryable\":true"), "{json:?}");
    });
    // Each has seen three come to nothing; they have not begun to wait at one moment.
    assert!(n_starts.load(Ordering::Relaxed) >= 3);
    manager
}

#[test]
fn a_daemon_that_is_killed_over_and_over_as_it_loads_is_given_up_and_found_again_once_it_starts() {
    let manager = is_waited_for_no_longer_than_three_starts(&config(), Fails::Killed);
    fs::remove_file(manager.at("held")).expect("it is there");
    let mut daemon = manager.start();
    // Those who have given up have left nothing at the socket that would keep others from being served.
    let ran = daemons::output(&mut manager.trellis(&manager.run(&[])));
    let _ = (daemon.kill(), daemon.wait());
    assert!(ran.status.success(), "{ran:?}");
}

/// A folder that is there, and is no model.
fn broken() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("config.json"), "{}").expect("written");
    folder
}

#[test]
fn who_waits_hears_that_a_service_manager_has_given_a_daemon_up() {
    let broken = broken();
    let models = vec![broken.path().to_str().expect("UTF-8").to_owned()];
    let mut manager = Manager::new(&Config { models, ..config() });
    let said = manager.at("said");
    let mut waiting = manager.trellis(&manager.run(&[]));
    let mut waiting = waiting.stderr(fs::File::create(&said).expect("made")).spawn().expect("it runs");
    let said = || fs::read_to_string(&said).expect("it is there");
    until("it waits", || said().contains("waiting for the daemon"));
    manager.fail(Fails::Gives, &AtomicBool::new(true));
    // As systemd closes a socket once its service has failed too often (`StartLimitBurst=`).
    drop(manager.listener.take());
    let status = daemons::wait(&mut waiting);
    assert_eq!(status.code(), Some(i32::from(trellis::cli::TRY_AGAIN)), "{}", said());
    assert!(said().contains("does not start") && said().contains("reset-failed"), "{}", said());
}

#[test]
fn a_daemon_that_gives_up_over_and_over_is_given_up() {
    let broken = broken();
    let models = vec![broken.path().to_str().expect("UTF-8").to_owned()];
    let manager = is_waited_for_no_longer_than_three_starts(&Config { models, ..config() }, Fails::Gives);
    let log = fs::read_to_string(manager.at("log")).expect("it is there");
    assert!(log.matches("error: ").count() >= 3, "each says why: {log}");
}
