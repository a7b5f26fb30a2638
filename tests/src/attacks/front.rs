//! Where a daemon that is attacked answers HTTP requests, and as whom its clients ask there.

use std::fs::{self, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trellis::config::{Config, HttpListen, HttpSettings};

use super::processes::FIRST_UID;

/// The example that answers requests.
const GUEST: &str = "http-chat";

/// What a client may take to send a head, or a body, and to take something of its answer. Attacks wait for the end of it.
const PATIENCE: Duration = Duration::from_secs(2);

/// The files in the folder of a daemon.
const GUESTS: &str = "guests";
const TOKENS: &str = "tokens";
const SOCKET: &str = "http.sock";
const READY: &str = "ready.json";
const FRONT: &str = "front.json";

/// How long the daemon may take to say where it listens.
const READY_TIME_MAX: Duration = Duration::from_secs(60);

/// The most users that have tokens: more than attack at once, and one that nobody attacks as.
const N_USERS_MAX: usize = 9;

/// Where requests come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Place {
    /// A Unix socket, where the kernel says who asks.
    Socket,
    /// A port of a loopback address, where a token does.
    Port,
}

impl Place {
    /// Both, the first for whatever has nothing to do with HTTP.
    pub const ALL: [Self; 2] = [Self::Socket, Self::Port];

    /// For people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Socket => "a Unix socket",
            Self::Port => "a port, to whom has a token",
        }
    }
}

/// A place where a daemon answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum At {
    Socket(PathBuf),
    Port(SocketAddr),
}

/// What a daemon's clients are told: where it answers, and the tokens, each of another user that the machine knows.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    at: At,
    tokens: Vec<String>,
}

/// What one client knows.
#[derive(Clone, Debug)]
pub struct Front {
    at: At,
    /// Its token; none where the kernel says who asks.
    token: Option<String>,
    /// That of a user who is attacked; none where clients have one user.
    other: Option<String>,
}

/// Settings with which a daemon answers at this place; all that it needs for that is in its folder, where `has_users` says whether
/// clients are to be users of their own. It has little patience.
///
/// # Errors
/// The folder takes no files, or the machine knows no users.
pub fn settings(config: Config, place: Place, folder: &Path, has_users: bool) -> io::Result<Config> {
    let guests_dir = folder.join(GUESTS);
    fs::create_dir(&guests_dir)?;
    fs::write(guests_dir.join(format!("{GUEST}.wasm")), crate::guests::example(GUEST))?;
    let tokens_dir = folder.join(TOKENS);
    let is_of_users = place == Place::Port && has_users;
    if is_of_users {
        fs::create_dir(&tokens_dir)?;
        for uid in uids()? {
            let path = tokens_dir.join(uid.to_string());
            // Nobody keeps it from others here.
            fs::write(&path, blake3::hash(format!("{uid} {}", folder.display()).as_bytes()).to_string())?;
            fs::set_permissions(path, Permissions::from_mode(0o600))?;
        }
    }
    let listen = match place {
        Place::Socket => HttpListen::Unix(folder.join(SOCKET)),
        Place::Port => HttpListen::Loopback(SocketAddr::from(([127, 0, 0, 1], 0))),
    };
    let patience_ms = PATIENCE.as_millis() as u64;
    let http = HttpSettings {
        listen: Some(listen),
        tokens_dir: is_of_users.then_some(tokens_dir),
        read_ms: patience_ms,
        write_ms: patience_ms,
        ..config.http
    };
    Ok(Config { guests_dir: Some(guests_dir), http, ..config })
}

/// Users that the machine knows, none of them root: a token is of such a user.
fn uids() -> io::Result<Vec<u32>> {
    let text = fs::read_to_string("/etc/passwd")?;
    let mut uids: Vec<u32> = text.lines().filter_map(|line| line.split(':').nth(2)?.parse().ok()).collect();
    uids.retain(|&uid| uid != 0);
    uids.sort_unstable();
    uids.dedup();
    uids.truncate(N_USERS_MAX);
    match uids.len() {
        0 | 1 => Err(io::Error::other("the machine knows no two users beside root, whom tokens could be of")),
        _ => Ok(uids),
    }
}

/// Where the daemon of a folder is to write what it says when it is ready.
pub(super) fn ready_file(folder: &Path) -> PathBuf {
    folder.join(READY)
}

/// Waits until the daemon of a folder has said where it answers, and tells its clients.
pub(super) fn tell(folder: &Path) -> io::Result<()> {
    let begun = Instant::now();
    let ready: serde_json::Value = loop {
        let text = fs::read_to_string(ready_file(folder))?;
        if let Some(line) = text.lines().next().filter(|_| text.ends_with('\n')) {
            break serde_json::from_str(line)?;
        }
        if begun.elapsed() > READY_TIME_MAX {
            return Err(io::Error::other("the daemon does not say where it answers HTTP requests"));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let place = ready["http"].as_str().ok_or_else(|| io::Error::other(format!("no place in {ready}")))?;
    let at = match place.strip_prefix("http://") {
        Some(address) => At::Port(address.parse().map_err(io::Error::other)?),
        None => At::Socket(place.into()),
    };
    let mut tokens = Vec::new();
    match &at {
        // Its mode lets its group in; here it is for everybody.
        At::Socket(path) => fs::set_permissions(path, Permissions::from_mode(0o666))?,
        At::Port(_) => {
            let read =
                |path: PathBuf| -> io::Result<String> { Ok(fs::read_to_string(path)?.trim().to_owned()) };
            tokens = match fs::read_dir(folder.join(TOKENS)) {
                Ok(entries) => entries.map(|entry| read(entry?.path())).collect::<io::Result<_>>()?,
                Err(_) => vec![read(folder.join("state/http-token"))?],
            };
        }
    }
    fs::write(folder.join(FRONT), serde_json::to_string(&Told { at, tokens })?)
}

/// What this process is told in the folder of a daemon; nothing where that answers no requests.
pub(super) fn told(folder: &Path) -> io::Result<Option<Front>> {
    let text = match fs::read_to_string(folder.join(FRONT)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    let Told { at, mut tokens } = serde_json::from_str(&text)?;
    // Who attacks is another user each time; the last one is attacked.
    let other = if tokens.len() > 1 { tokens.pop() } else { None };
    let uid = rustix::process::geteuid().as_raw();
    let idx = uid.saturating_sub(FIRST_UID) as usize % tokens.len().max(1);
    Ok(Some(Front { at, token: tokens.into_iter().nth(idx), other }))
}

impl Front {
    /// One at a Unix socket.
    #[must_use]
    pub fn at_socket(path: PathBuf) -> Self {
        Self { at: At::Socket(path), token: None, other: None }
    }

    /// One at a port, for the user of this token.
    #[must_use]
    pub fn at_port(address: SocketAddr, token: String) -> Self {
        Self { at: At::Port(address), token: Some(token), other: None }
    }

    /// Where that is.
    #[must_use]
    pub fn place(&self) -> Place {
        match self.at {
            At::Socket(_) => Place::Socket,
            At::Port(_) => Place::Port,
        }
    }

    /// The path of its socket.
    pub(super) fn socket(&self) -> Option<&Path> {
        match &self.at {
            At::Socket(path) => Some(path),
            At::Port(_) => None,
        }
    }

    /// Its address.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self.at {
            At::Socket(_) => None,
            At::Port(address) => Some(address),
        }
    }

    /// The header of a request by which its user is known.
    pub(super) fn user_header(&self) -> String {
        self.token.as_ref().map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default()
    }

    /// The same for a user who is attacked.
    pub(super) fn of_other(&self) -> Option<Self> {
        let token = Some(self.other.clone()?);
        Some(Self { token, other: None, ..self.clone() })
    }
}
