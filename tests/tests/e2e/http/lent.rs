//! A front whose socket a service manager has made, which starts one daemon after the other.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use trellis::config::{Config, HttpListen, HttpSettings};
use trellis::session::SessionLimits;
use trellis_tests::daemons::{self, PATIENCE};
use trellis_tests::guests;

use super::client::Place;
use super::question;
use super::upgrades::ask_while;
use crate::exe;

/// A service manager with its sockets, and the daemon that it has started.
struct Manager {
    folder: TempDir,
    clients: OwnedFd,
    http: OwnedFd,
    daemon: Option<Child>,
}

impl Drop for Manager {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            let _ = (daemon.kill(), daemon.wait());
        }
    }
}

impl Manager {
    fn new(http: OwnedFd, listen: Option<HttpListen>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("http-chat.wasm"), guests::example("http-chat")).expect("written");
        let config = daemons::config(exe());
        let config = Config {
            guests_dir: Some(folder.path().to_owned()),
            state_dir: Some(at("state")),
            http: HttpSettings { listen, ..HttpSettings::default() },
            sessions: SessionLimits { drain_ms: 120_000, ..config.sessions },
            ..config
        };
        fs::write(at("trellis.toml"), toml::to_string(&config).expect("it can be written down"))
            .expect("written");
        let clients = UnixListener::bind(at("trellis.sock")).expect("bound").into();
        Self { folder, clients, http, daemon: None }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.at("log")).unwrap_or_default()
    }

    /// Has the daemon end, if there is one, and starts another, as `systemctl restart` does.
    fn restart(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let pid = Pid::from_raw(i32::try_from(daemon.id()).expect("a process")).expect("not 0");
            kill_process(pid, Signal::TERM).expect("it runs");
            assert_eq!(daemons::wait(&mut daemon).code(), Some(0), "{}", self.log());
        }
        let owned = |fd: &OwnedFd| fd.try_clone().expect("a descriptor");
        let mut daemon = daemons::serve_handed(
            exe(),
            &self.at("trellis.toml"),
            owned(&self.clients),
            Some(owned(&self.http)),
        );
        let log = fs::File::options().create(true).append(true).open(self.at("log")).expect("made");
        self.daemon = Some(daemon.stderr(log).spawn().expect("it starts"));
    }
}

#[test]
fn restarts_under_load_refuse_no_request_where_a_service_manager_keeps_the_socket() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("http.sock");
    let unix = UnixListener::bind(&path).expect("a free place");
    let port = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = port.local_addr().expect("it has one").to_string();
    let elsewhere = HttpListen::Unix(folder.path().join("told.sock"));
    for (http, place, listen) in [
        (OwnedFd::from(unix), Place::Unix(path.clone()), None),
        (OwnedFd::from(port), Place::Port(address), Some(elsewhere)),
    ] {
        let mut manager = Manager::new(http, listen);
        manager.restart();
        let token = match &place {
            Place::Unix(_) => String::new(),
            Place::Port(_) => format!("Authorization: Bearer {}\r\n", token(&manager)),
        };
        let n_answered = ask_while(&place, &token, || {
            for _ in 0..3 {
                thread::sleep(Duration::from_millis(300));
                manager.restart();
            }
        });
        assert!(n_answered >= 6, "{n_answered}");
        let log = manager.log();
        assert_eq!(log.matches("HTTP requests are answered").count(), 4, "{log}");
        assert_eq!(log.contains("http.listen is passed over"), matches!(place, Place::Port(_)), "{log}");
        assert!(!folder.path().join("told.sock").exists());
    }
    assert!(path.exists(), "it is the service manager's");
}

/// The token of the daemon's own user, once the daemon has made it.
fn token(manager: &Manager) -> String {
    let begun = Instant::now();
    loop {
        match fs::read_to_string(manager.at("state/http-token")) {
            Ok(token) if !token.trim().is_empty() => return token.trim().to_owned(),
            _ => assert!(begun.elapsed() < PATIENCE, "no token: {}", manager.log()),
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn who_comes_before_there_is_a_daemon_is_answered_by_the_first() {
    let port = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let place = Place::Port(port.local_addr().expect("it has one").to_string());
    let mut manager = Manager::new(port.into(), None);
    // Nobody is refused, and nobody answers yet.
    let early = TcpStream::connect(place.place()).expect("it waits");
    manager.restart();
    let token = format!("Authorization: Bearer {}\r\n", token(&manager));
    let asked = question("What is 37 + 48?").to_string();
    let answer = place.request("POST", "/v1/chat/completions", &token, &asked).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "85");
    drop(early);
}
