//! What a service manager hears from a daemon.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use trellis_client::{Client, Program};
use trellis_tests::daemons::{self, PATIENCE, Served, with};
use trellis_tests::engines::block_on;
use trellis_tests::{faulty, guests};

use crate::exe;

/// How often this one wants to hear that the daemon lives.
const WATCHDOG: Duration = Duration::from_millis(400);

/// A service manager with a daemon.
struct Manager {
    socket: UnixDatagram,
    served: Served,
}

impl Manager {
    /// Starts a daemon, with this in its environment as well.
    fn start(environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("bound");
        let watchdog = WATCHDOG.as_micros().to_string();
        let told = [("NOTIFY_SOCKET", path.to_str().expect("UTF-8")), ("WATCHDOG_USEC", &watchdog)];
        let environment: Vec<_> = told.into_iter().chain(environment.iter().copied()).collect();
        let served = Served::start_with(exe(), &daemons::config(exe()), &environment);
        // What is bound stays reachable to whoever has its path open; the daemon opens it for each message.
        let _kept = folder.keep();
        Self { socket, served }
    }

    /// What the daemon says within this time, if anything.
    fn hears(&self, within: Duration) -> Option<String> {
        let mut bytes = [0; 4096];
        self.socket.set_read_timeout(Some(within)).expect("a time");
        match self.socket.recv(&mut bytes) {
            Ok(n) => Some(String::from_utf8(bytes[..n].to_vec()).expect("UTF-8")),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Waits until it says this.
    fn waits_for(&self, what: &str) -> String {
        loop {
            let said = self.hears(PATIENCE).unwrap_or_else(|| panic!("never said: {what}"));
            if said.lines().any(|line| line.starts_with(what)) {
                return said;
            }
        }
    }
}

#[test]
fn a_service_manager_hears_of_the_start_of_life_and_of_the_end() {
    let mut manager = Manager::start(&[]);
    let loading = manager.waits_for("STATUS=loading tiny");
    assert!(loading.contains("\nEXTEND_TIMEOUT_USEC=30000000\n"), "{loading:?}");
    let ready = manager.waits_for("READY=1");
    assert!(ready.contains("STATUS=serving tiny"), "{ready:?}");
    for _ in 0..3 {
        let since = Instant::now();
        manager.waits_for("WATCHDOG=1");
        assert!(since.elapsed() < 10 * WATCHDOG, "{:?}", since.elapsed());
    }
    let pid = Pid::from_raw(i32::try_from(manager.served.pid()).expect("a process")).expect("not 0");
    for (text, status) in [
        (None, "STATUS=serving; read again: 0"),
        (Some("wrong"), "STATUS=serving; the configuration is wrong"),
    ] {
        if let Some(text) = text {
            fs::write(manager.served.config(), text).expect("written");
        }
        kill_process(pid, Signal::HUP).expect("it runs");
        assert!(manager.waits_for("RELOADING=1").contains("\nMONOTONIC_USEC="));
        assert!(manager.waits_for("READY=1").contains(status));
    }
    kill_process(pid, Signal::TERM).expect("it runs");
    manager.waits_for("STOPPING=1");
    assert_eq!(manager.served.wait().code(), Some(0));
}

#[test]
fn a_service_manager_hears_that_another_program_takes_the_place_of_the_first() {
    let manager = Manager::start(&[]);
    manager.waits_for("READY=1");
    let pid = Pid::from_raw(i32::try_from(manager.served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::USR2).expect("it runs");
    assert!(manager.waits_for("RELOADING=1").contains("\nMONOTONIC_USEC="));
    let mut said = String::new();
    while !said.contains("READY=1") {
        said = manager.hears(PATIENCE).expect("it serves again");
        // It is the same process, and goes on.
        assert!(!said.contains("STOPPING=1"), "{said:?}");
    }
    assert!(said.contains("STATUS=serving tiny"), "{said:?}");
    for _ in 0..3 {
        manager.waits_for("WATCHDOG=1");
    }
}

#[test]
fn of_a_daemon_whose_engine_stands_still_nothing_more_is_heard() {
    let manager = Manager::start(&[(faulty::ENVIRONMENT, "tiny 3 hang")]);
    manager.waits_for("WATCHDOG=1");
    block_on(async {
        let client = Client::connect_to(&manager.served.socket()).await.expect("connected");
        let _guest =
            client.start(Program::wasm(guests::hostile()), with(&["endless"])).await.expect("started");
        let begun = Instant::now();
        while manager.hears(5 * WATCHDOG).is_some() {
            assert!(begun.elapsed() < PATIENCE, "it goes on to say that it lives");
        }
    });
}

/// A daemon that is handed a socket, as by a socket unit, and told to listen elsewhere.
struct Handed {
    daemon: Child,
    folder: tempfile::TempDir,
}

impl Handed {
    /// Starts it; this is done to the socket's file beforehand.
    fn start(beforehand: impl FnOnce(&Path)) -> Self {
        const SCRIPT: &str = "exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$0\" \"$@\"";
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let text = toml::to_string(&daemons::config(exe())).expect("settings can be written down");
        fs::write(at("trellis.toml"), text).expect("written");
        let listener = UnixListener::bind(at("lent.sock")).expect("bound");
        beforehand(&at("lent.sock"));
        let mut daemon = daemons::trellis("sh");
        daemon.args(["-c", SCRIPT, exe(), "serve", "--config"]).arg(at("trellis.toml"));
        daemon.arg("--socket").arg(at("told.sock")).stdin(Stdio::from(OwnedFd::from(listener)));
        daemon.stderr(File::create(at("log")).expect("made"));
        Self { daemon: daemon.spawn().expect("it starts"), folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Waits until it answers where it was handed a socket; its log.
    fn answers(&self) -> String {
        let begun = Instant::now();
        let log = || fs::read_to_string(self.at("log")).expect("it is there");
        let asked = async || Client::connect_to(&self.at("lent.sock")).await?.info().await;
        while block_on(asked()).is_err() {
            assert!(begun.elapsed() < PATIENCE, "it does not answer: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!self.at("told.sock").exists());
        log()
    }

    /// Waits until it answers there, and ends it; its log.
    fn answers_and_ends(mut self) -> String {
        let log = self.answers();
        let pid = Pid::from_raw(i32::try_from(self.daemon.id()).expect("a process")).expect("not 0");
        kill_process(pid, Signal::TERM).expect("it runs");
        assert_eq!(daemons::wait(&mut self.daemon).code(), Some(0));
        log
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[test]
fn of_two_sockets_the_one_that_is_handed_over_is_used_and_that_is_said() {
    let log = Handed::start(|_| {}).answers_and_ends();
    assert!(log.contains("passed over") && log.contains("told.sock") && log.contains("lent.sock"), "{log}");
}

#[test]
fn where_a_service_manager_keeps_the_socket_it_starts_the_next_daemon() {
    let handed = Handed::start(|_| {});
    handed.answers();
    let refused = block_on(async {
        let client = Client::connect_to(&handed.at("lent.sock")).await.expect("connected");
        client.upgrade(None).await.expect_err("clients wait there anyhow")
    });
    assert_eq!(refused.code().map(|code| code.as_str()), Some("unsupported"));
    assert!(refused.to_string().contains("systemctl restart"), "{refused}");
    handed.answers_and_ends();
}

#[test]
fn a_daemon_makes_its_own_socket_where_the_file_of_the_handed_one_is_gone() {
    let log = Handed::start(|socket| fs::remove_file(socket).expect("it is there")).answers_and_ends();
    assert!(log.contains("is gone") && log.contains("restart its socket unit"), "{log}");
}
