//! Where an artifact lies, and which one is meant: `REGISTRY/NAME:TAG`, `REGISTRY/NAME@sha256:…`, or `oci:FOLDER` in the place of
//! registry and name.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::digest::Digest;
use super::error::OciError;

/// What a folder begins with.
const FOLDER: &str = "oci:";
const N_TAG_BYTES_MAX: usize = 128;
const N_REPOSITORY_BYTES_MAX: usize = 255;

/// Where artifacts lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Registry {
        /// With its port, if it has one: `ghcr.io`, `localhost:5000`.
        host: String,
        /// The name there: `tools/chat`.
        repository: String,
    },
    /// An OCI image layout.
    Folder(PathBuf),
}

/// An artifact as the user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) store: Store,
    pub(crate) tag: Option<String>,
    /// Of its manifest. What has another is not it.
    pub(crate) digest: Option<Digest>,
}

impl Reference {
    /// Whether a word that is no path means an artifact: it begins with `oci:`, or with what can be a registry's host, and says
    /// which artifact, by a tag or a digest. `results/a.wasm` and `ghcr.io/tools/chat` are paths.
    pub(crate) fn is_meant(word: &str) -> bool {
        if let Some(folder) = word.strip_prefix(FOLDER) {
            return !folder.is_empty();
        }
        let Some((host, name)) = word.split_once('/') else { return false };
        let is_host = host == "localhost" || host.trim_start_matches('.').contains(['.', ':']);
        is_host && (name.contains(':') || name.contains('@'))
    }

    /// As it is meant, if it is meant.
    pub(crate) fn of_word(word: &str) -> Option<Self> {
        Self::is_meant(word).then(|| word.parse().ok()).flatten()
    }

    /// The same artifact by its digest alone.
    pub(crate) fn pinned(&self, digest: Digest) -> Self {
        Self { tag: None, digest: Some(digest), ..self.clone() }
    }

    /// What a registry's URL or a folder's index has for it: the digest, if there is one.
    pub(super) fn tag_or_digest(&self) -> Option<String> {
        self.digest.map(|digest| digest.to_string()).or_else(|| self.tag.clone())
    }

    /// The last part of its name: `chat`.
    pub(crate) fn name(&self) -> String {
        match &self.store {
            Store::Registry { repository, .. } => {
                repository.rsplit('/').next().unwrap_or(repository).to_owned()
            }
            Store::Folder(folder) => {
                let name = folder.file_name().unwrap_or(folder.as_os_str());
                name.to_string_lossy().into_owned()
            }
        }
    }

    /// As a guest of it is listed, beside the hash of its component: `chat:1.0`, or `chat`.
    pub(crate) fn label(&self) -> String {
        let name = self.name();
        match &self.tag {
            Some(tag) => format!("{name}:{tag}"),
            None => name,
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.store {
            Store::Registry { host, repository } => write!(f, "{host}/{repository}")?,
            Store::Folder(folder) => write!(f, "{FOLDER}{}", folder.display())?,
        }
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

impl FromStr for Reference {
    type Err = OciError;

    fn from_str(word: &str) -> Result<Self, OciError> {
        let wrong = |reason: &str| OciError::Reference { word: word.to_owned(), reason: reason.to_owned() };
        let (rest, digest) = match word.rsplit_once('@') {
            Some((_, end)) if word.starts_with(FOLDER) && !is_like_digest(end) => (word, None),
            Some((rest, digest)) => (rest, Some(digest.parse().map_err(|reason: String| wrong(&reason))?)),
            None => (word, None),
        };
        // A colon before a slash is of a port or of a folder's name.
        let (place, tag) = match rest.rsplit_once(':') {
            Some((place, tag)) if !tag.contains('/') && format!("{place}:") != FOLDER => (place, Some(tag)),
            _ => (rest, None),
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(wrong("a tag has up to 128 letters, digits, dots, dashes and underscores"));
        }
        let store = match place.strip_prefix(FOLDER) {
            Some("") => return Err(wrong("oci: is followed by a folder")),
            Some(folder) => Store::Folder(PathBuf::from(folder)),
            None => {
                let Some((host, repository)) = place.split_once('/') else {
                    return Err(wrong("REGISTRY/NAME:TAG, REGISTRY/NAME@sha256:… and oci:FOLDER are some"));
                };
                if !is_host(host) {
                    return Err(wrong("what stands before the first slash is no registry's host"));
                }
                if !is_repository(repository) {
                    return Err(wrong(
                        "a name has small letters, digits, and dots, dashes and underscores between them",
                    ));
                }
                Store::Registry { host: host.to_owned(), repository: repository.to_owned() }
            }
        };
        Ok(Self { store, tag: tag.map(str::to_owned), digest })
    }
}

/// Whether what follows an `@` is meant as a digest, be it a wrong one: a folder may have an `@` in its name.
fn is_like_digest(end: &str) -> bool {
    end.starts_with("sha") && end.contains(':') && !end.contains('/')
}

/// As the distribution specification has tags.
fn is_tag(tag: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let mut bytes = tag.bytes();
    tag.len() <= N_TAG_BYTES_MAX
        && bytes.next().is_some_and(is_word)
        && bytes.all(|byte| is_word(byte) || matches!(byte, b'.' | b'-'))
}

/// As the distribution specification has names: no part of one can be `..`.
fn is_repository(name: &str) -> bool {
    let is_inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_part = |part: &str| {
        let is_well_ended = |byte: Option<&u8>| byte.is_some_and(|byte| is_inside(*byte));
        let bytes = part.as_bytes();
        is_well_ended(bytes.first())
            && is_well_ended(bytes.last())
            && bytes.iter().all(|byte| is_inside(*byte) || matches!(byte, b'.' | b'-' | b'_'))
            && !part.contains("..")
    };
    name.len() <= N_REPOSITORY_BYTES_MAX && name.split('/').all(is_part)
}

fn is_host(host: &str) -> bool {
    let (name, port) = split_port(host);
    let is_name = |name: &str| {
        !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
    };
    let is_address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).map(str::parse::<IpAddr>);
    is_address.map_or_else(|| is_name(name), |address| address.is_ok())
        && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

fn split_port(host: &str) -> (&str, Option<&str>) {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (host, None),
    }
}

/// Whether a host is this machine itself, whatever it has for a name server.
pub(super) fn is_loopback(host: &str) -> bool {
    let (name, _) = split_port(host);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn paths_and_artifacts_are_told_apart() {
        for word in [
            "ghcr.io/a/b:1",
            "localhost:5000/b:1",
            "localhost/b@x",
            "127.0.0.1:5000/a@x",
            "[::1]:5000/a:b",
            "oci:x",
        ] {
            assert!(Reference::is_meant(word), "{word}");
        }
        for word in
            ["chat", "./a.b/c:d", "../x:y", "a/b:c", "ghcr.io/a/b", "dir.d/guest.wasm", "/a.b/c:d", "oci:"]
        {
            assert!(!Reference::is_meant(word), "{word}");
        }
    }

    #[test]
    fn what_is_read_is_written_again() {
        let with_digest = format!("ghcr.io/tools/chat@{DIGEST}");
        let with_both = format!("localhost:5000/chat:1.0@{DIGEST}");
        for word in [
            "ghcr.io/tools/chat:1.0",
            &with_digest,
            &with_both,
            "[::1]:5000/chat:a",
            "oci:../out:1",
            "oci:out",
            "oci:/srv/me@home/out:1",
            "oci:me@home",
            &format!("oci:me@home@{DIGEST}"),
        ] {
            assert_eq!(word.parse::<Reference>().expect(word).to_string(), word);
        }
        let both: Reference = with_both.parse().expect("valid");
        assert_eq!((both.label().as_str(), both.tag_or_digest().as_deref()), ("chat:1.0", Some(DIGEST)));
        let pinned = both.pinned(both.digest.expect("it has one"));
        assert_eq!(pinned.label(), "chat");
        let at: Reference = format!("oci:me@home:1@{DIGEST}").parse().expect("valid");
        assert_eq!(at.store, Store::Folder(PathBuf::from("me@home")));
        assert_eq!((at.tag.as_deref(), at.digest), (Some("1"), both.digest));
        let port: Reference = "localhost:5000/chat".parse().expect("valid");
        assert_eq!((port.tag.as_deref(), port.name().as_str()), (None, "chat"), "it is a port");
    }

    #[test]
    fn what_could_leave_its_place_is_no_reference() {
        for word in [
            "ghcr.io/../x:1",
            "ghcr.io/a/../../x:1",
            "ghcr.io/a//b:1",
            "ghcr.io/A:1",
            "ghcr.io/a?b:1",
            "ghcr.io/a:1/2",
            "ghcr.io/a:..",
            "ghcr.io/a@sha256:1",
            "user@ghcr.io/a:1",
            "ghcr.io:x/a:1",
            "oci:",
            "oci:out@sha256:1",
            "oci:out@sha512:1",
            "chat",
        ] {
            let error = word.parse::<Reference>().expect_err(word);
            assert!(matches!(error, OciError::Reference { .. }), "{word}: {error}");
        }
    }

    #[test]
    fn this_machine_is_known_by_its_addresses_alone() {
        for host in ["localhost", "localhost:5000", "127.0.0.1", "127.9.0.1:80", "[::1]:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["ghcr.io", "localhost.example.com", "128.0.0.1", "127.0.0.1.example.com:80", "[::2]"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
