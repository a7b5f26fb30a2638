//! The HTTP front: where it listens, and what is asked there at most.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use crate::metrics::is_loopback;

/// Settings of the HTTP front, which is there for clients that speak the APIs of others. Changes wait for a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct HttpSettings {
    /// Where the daemon answers HTTP requests in the form of OpenAI's API: the absolute path of a Unix socket, where the kernel says
    /// who asks, in a folder of root or the daemon to which nobody else may write; or a loopback address, as `127.0.0.1:8080`, where a
    /// token does; nowhere when absent. Not an address under the packaged unit, which is shut off from every network.
    pub listen: Option<HttpListen>,
    /// The folder of the tokens, for a loopback address, of root or the daemon, to which nobody else may write: each file is named by a
    /// user, holds its token in 4,096 bytes at most, and may be read by nobody but its owner, which is that user, root or the user of
    /// the daemon. When absent there is one token, of the daemon's own user, in the file `http-token` of `state_dir`, which the daemon
    /// makes.
    pub tokens_dir: Option<PathBuf>,
    /// Bytes of the body of one request. What becomes of them is on the account of its user, `host_bytes`, until the answer is read.
    pub body_bytes: usize,
    /// Connections of each user at a time. On a loopback address all have four times as many together. All are among those that the
    /// daemon has descriptors for. Those beyond are closed.
    pub n_connections: usize,
    /// Time that a client may take to send the head of a request, and again to send its body.
    pub read_ms: u64,
    /// Time in which a client has to take some of its answer when there is more of it to send.
    pub write_ms: u64,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            listen: None,
            tokens_dir: None,
            body_bytes: 1 << 20,
            n_connections: 64,
            read_ms: 30_000,
            write_ms: 30_000,
        }
    }
}

/// Where HTTP requests come in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum HttpListen {
    /// A Unix socket at an absolute path.
    Unix(PathBuf),
    /// A loopback address.
    Loopback(SocketAddr),
}

/// What is no such place.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{0:?} is no place for HTTP: expected the absolute path of a Unix socket, or a loopback address with a port, as 127.0.0.1:8080"
)]
pub struct NoHttpPlace(String);

impl FromStr for HttpListen {
    type Err = NoHttpPlace;

    fn from_str(text: &str) -> Result<Self, NoHttpPlace> {
        let path = PathBuf::from(text);
        if path.is_absolute() && path.file_name().is_some() {
            return Ok(Self::Unix(path));
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if is_loopback(&address) => Ok(Self::Loopback(address)),
            _ => Err(NoHttpPlace(text.to_owned())),
        }
    }
}

impl TryFrom<String> for HttpListen {
    type Error = NoHttpPlace;

    fn try_from(text: String) -> Result<Self, NoHttpPlace> {
        text.parse()
    }
}

impl fmt::Display for HttpListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Loopback(address) => write!(f, "{address}"),
        }
    }
}

impl From<HttpListen> for String {
    fn from(listen: HttpListen) -> Self {
        listen.to_string()
    }
}

/// Refuses numbers with which nobody would be answered.
pub(super) fn check(http: &HttpSettings) -> Result<(), ConfigError> {
    let least = [
        ("http.n_connections", http.n_connections as u64),
        ("http.read_ms", http.read_ms),
        ("http.write_ms", http.write_ms),
    ];
    match least.into_iter().find(|(_, value)| *value == 0) {
        Some((field, _)) => {
            Err(ConfigError::OutOfRange { field, value: 0.0, expected: "at least 1".to_owned() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_from_this_machine_alone() {
        let listen = |text: &str| text.parse::<HttpListen>();
        assert_eq!(listen("/run/t/http.sock").expect("a path"), HttpListen::Unix("/run/t/http.sock".into()));
        for text in ["127.0.0.1:8080", "[::1]:0"] {
            assert_eq!(String::from(listen(text).expect("an address")), text);
        }
        for text in ["0.0.0.0:80", "192.168.0.1:80", "http.sock", "", "/", "localhost:80"] {
            let error = listen(text).expect_err(text).to_string();
            assert!(error.contains("expected the absolute path"), "{error}");
        }
    }

    #[test]
    fn a_front_that_answers_nobody_is_refused() {
        assert!(check(&HttpSettings::default()).is_ok());
        let error = check(&HttpSettings { n_connections: 0, ..HttpSettings::default() }).expect_err("nobody");
        assert_eq!(error.to_string(), "http.n_connections is 0, expected at least 1");
        assert!(check(&HttpSettings { read_ms: 0, ..HttpSettings::default() }).is_err());
        assert!(check(&HttpSettings { write_ms: 0, ..HttpSettings::default() }).is_err());
    }
}
