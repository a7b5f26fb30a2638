//! A client of the HTTP front, over plain sockets.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::Value;
use tempfile::TempDir;
use trellis::config::{Config, HttpListen, HttpSettings};
use trellis_tests::daemons::{self, PATIENCE, Served};
use trellis_tests::guests;

use crate::exe;

/// A daemon with the front on a Unix socket or a port, and the guests that the tests name.
pub(super) struct Fronted {
    pub(super) served: Served,
    folder: TempDir,
    place: Place,
}

enum Place {
    Unix(PathBuf),
    Port(String),
}

/// An answer: its status, the lines of its head, and its body.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: String,
}

impl Answer {
    fn of(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        let body = if is_chunked { joined(body) } else { body.to_owned() };
        Self { status, head: head.to_ascii_lowercase(), body }
    }

    /// Its body as JSON, of an answer that went well.
    pub(super) fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        serde_json::from_str(&self.body).expect("JSON")
    }

    /// The error that it is, with this status.
    pub(super) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        serde_json::from_str::<Value>(&self.body).expect("JSON")["error"].clone()
    }

    /// The data of its events.
    pub(super) fn events(&self) -> Vec<String> {
        assert_eq!(self.status, 200, "{self:?}");
        assert!(self.head.contains("content-type: text/event-stream"), "{}", self.head);
        self.body.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }
}

/// A body that came in chunks.
fn joined(body: &str) -> String {
    let (mut rest, mut all) = (body, String::new());
    while let Some((length, after)) = rest.split_once("\r\n") {
        let n_bytes = usize::from_str_radix(length, 16).expect("the length of a chunk");
        if n_bytes == 0 {
            break;
        }
        all += &after[..n_bytes];
        rest = &after[n_bytes + 2..];
    }
    all
}

pub(super) trait Connection: Read + Write {}

impl<T: Read + Write> Connection for T {}

impl Fronted {
    /// On a Unix socket.
    pub(super) fn on_socket() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("http.sock");
        Self::start(folder, HttpListen::Unix(path.clone()), |_| Place::Unix(path.clone()), |_| {})
    }

    /// On a Unix socket, with a configuration of its own.
    pub(super) fn on_socket_with(change: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("http.sock");
        Self::start(folder, HttpListen::Unix(path.clone()), |_| Place::Unix(path.clone()), change)
    }

    /// On a port of the machine's own choice.
    pub(super) fn on_port() -> Self {
        Self::on_port_with(|_| {})
    }

    /// On a port, with a configuration of its own.
    pub(super) fn on_port_with(change: impl FnOnce(&mut Config)) -> Self {
        let address = "127.0.0.1:0".parse().expect("an address");
        let folder = tempfile::tempdir().expect("a folder");
        Self::start(
            folder,
            HttpListen::Loopback(address),
            |log| {
                let (_, rest) = log.split_once("http://").expect("it says where");
                let address = rest.split(|c: char| !c.is_ascii_digit() && c != '.' && c != ':').next();
                Place::Port(address.expect("an address").to_owned())
            },
            change,
        )
    }

    fn start(
        folder: TempDir,
        listen: HttpListen,
        place: impl Fn(&str) -> Place,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let guests_dir = folder.path().join("guests");
        std::fs::create_dir(&guests_dir).expect("made");
        for name in ["http-chat", "chat"] {
            std::fs::write(guests_dir.join(format!("{name}.wasm")), guests::example(name)).expect("written");
        }
        let http = HttpSettings { listen: Some(listen), body_bytes: 1 << 20, ..HttpSettings::default() };
        let mut config = Config {
            guests_dir: Some(guests_dir),
            state_dir: Some(folder.path().join("state")),
            http,
            ..daemons::config(exe())
        };
        change(&mut config);
        let served = Served::start_with(exe(), &config, &[]);
        let begun = Instant::now();
        let place = loop {
            let log = served.log();
            if log.contains("HTTP requests are answered") {
                break place(&log);
            }
            assert!(begun.elapsed() < PATIENCE, "nothing listens: {log}");
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        Self { served, folder, place }
    }

    /// The daemon's own token.
    pub(super) fn token(&self) -> String {
        let path = self.folder.path().join("state/http-token");
        std::fs::read_to_string(path).expect("it is made").trim().to_owned()
    }

    /// The header by which its user asks; none on a Unix socket.
    pub(super) fn token_header(&self) -> String {
        match &self.place {
            Place::Unix(_) => String::new(),
            Place::Port(_) => format!("Authorization: Bearer {}\r\n", self.token()),
        }
    }

    /// The path of its socket, or its address.
    pub(super) fn place(&self) -> &str {
        match &self.place {
            Place::Unix(path) => path.to_str().expect("UTF-8"),
            Place::Port(address) => address,
        }
    }

    /// A connection on which nothing is asked yet.
    pub(super) fn connect(&self) -> Box<dyn Connection> {
        match &self.place {
            Place::Unix(path) => Box::new(UnixStream::connect(path).expect("it listens")),
            Place::Port(address) => Box::new(TcpStream::connect(address).expect("it listens")),
        }
    }

    /// Asks, and leaves the answer to be read.
    pub(super) fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Box<dyn Read> {
        let mut stream = self.connect();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        )
        .expect("it reads");
        Box::new(stream)
    }

    /// Asks, and reads the whole answer.
    pub(super) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let mut bytes = Vec::new();
        // An answer that comes before all was read ends with a connection that is reset.
        let _ = self.ask(method, path, headers, body).read_to_end(&mut bytes);
        Answer::of(&String::from_utf8(bytes).expect("it is text"))
    }

    /// Posts JSON.
    pub(super) fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, "", &body.to_string())
    }
}
