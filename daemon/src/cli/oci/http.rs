//! Requests to registries: over TLS but to this machine, with an end in time and in bytes, and nowhere that was not asked for.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response, StatusCode, Url, redirect};
use serde::Deserialize;

use super::error::OciError;
use super::reference::is_loopback;

const CONNECTS: Duration = Duration::from_secs(15);
/// Without a byte of an answer that has begun.
const SILENT: Duration = Duration::from_secs(30);
/// For one answer without its content.
const ANSWERS: Duration = Duration::from_secs(60);
/// What content has to come and go with, beside that: slower than this is as good as not at all.
const BYTES_PER_S: u64 = 16 << 10;
/// What is read of an answer that only says what is wrong.
const REMARK_BYTES_MAX: u64 = 16 << 10;
const REMARK_CHARS_MAX: usize = 300;

/// Hears how many bytes have come or gone.
pub(super) type Tell = Arc<dyn Fn(u64) + Send + Sync>;

/// For what is over at once.
pub(super) fn untold() -> Tell {
    Arc::new(|_| {})
}

/// A client of one registry.
#[derive(Debug)]
pub(super) struct Http {
    client: Client,
    host: String,
    is_plain: bool,
}

impl Http {
    /// Without TLS for a registry on this machine, or where that is asked for.
    ///
    /// # Errors
    /// There is no certificate to trust.
    pub(super) fn new(host: &str, plain_http: bool) -> Result<Self, OciError> {
        // Another client of this process may have been first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let is_plain = plain_http || is_loopback(host);
        let builder = || {
            let builder = Client::builder()
                .user_agent(concat!("trellis/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(CONNECTS)
                .redirect(redirect::Policy::none());
            if is_loopback(host) { builder.no_proxy() } else { builder }
        };
        let built = match builder().build() {
            // A machine without certificates can be asked by itself all the same.
            Err(_) if is_plain => builder().tls_certs_only([]).build(),
            built => built,
        };
        let client =
            built.map_err(|error| OciError::Unreachable { url: host.to_owned(), reason: reason(&error) })?;
        Ok(Self { client, host: host.to_owned(), is_plain })
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// A URL of the registry.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn url(&self, path: &str) -> Result<Url, OciError> {
        let scheme = if self.is_plain { "http" } else { "https" };
        let url = format!("{scheme}://{}{path}", self.host);
        Url::parse(&url).map_err(|error| OciError::Protocol { url, reason: error.to_string() })
    }

    /// A URL that the registry has given, perhaps of another host.
    ///
    /// # Errors
    /// It is none, or one without TLS of another host: only a registry on this machine may name another place on it.
    pub(super) fn follow(&self, from: &Url, to: &str) -> Result<Url, OciError> {
        let protocol = |reason: String| OciError::Protocol { url: shown(from), reason };
        let url = from.join(to).map_err(|error| protocol(format!("it names the place {to:?}: {error}")))?;
        // It would be shown in the place of what this user has, or beside it.
        if !url.username().is_empty() || url.password().is_some() {
            return Err(protocol("it names a place together with a user or a password".to_owned()));
        }
        let host = url.host_str().ok_or_else(|| protocol(format!("it names the place {to:?}")))?;
        let is_allowed = match url.scheme() {
            "https" => true,
            "http" => self.is_plain && (self.is_own(&url) || is_loopback(&self.host) && is_loopback(host)),
            _ => return Err(protocol(format!("it names the place {to:?}"))),
        };
        if is_allowed { Ok(url) } else { Err(OciError::Plain { url: shown(&url) }) }
    }

    /// Whether a URL is the registry's own, which alone is told who asks.
    pub(super) fn is_own(&self, url: &Url) -> bool {
        self.url("/").is_ok_and(|own| own.origin() == url.origin())
    }

    /// Sends a request with this much content.
    ///
    /// # Errors
    /// No answer comes in time.
    pub(super) async fn send(&self, request: RequestBuilder, n_bytes: u64) -> Result<Response, OciError> {
        let sending = tokio::time::timeout(time_for(n_bytes), request.send());
        match sending.await {
            Ok(answer) => answer.map_err(|error| failed(&error, &self.host)),
            Err(_) => Err(OciError::TimedOut { url: self.host.clone() }),
        }
    }
}

/// Reads content up to a limit, and tells how far it is.
///
/// # Errors
/// There is more of it, or it does not come in time.
pub(super) async fn content(
    answer: Response,
    what: &str,
    limit_bytes: u64,
    tell: &Tell,
) -> Result<Vec<u8>, OciError> {
    content_within(answer, what, limit_bytes, tell, SILENT).await
}

async fn content_within(
    mut answer: Response,
    what: &str,
    limit_bytes: u64,
    tell: &Tell,
    silent: Duration,
) -> Result<Vec<u8>, OciError> {
    let url = shown(answer.url());
    if let Some(n_bytes) = answer.content_length().filter(|n_bytes| *n_bytes > limit_bytes) {
        return Err(OciError::TooLarge { what: what.to_owned(), n_bytes, limit_bytes });
    }
    let reading = async {
        let mut bytes = Vec::new();
        let timed_out = || OciError::TimedOut { url: url.clone() };
        loop {
            let chunk = tokio::time::timeout(silent, answer.chunk()).await.map_err(|_| timed_out())?;
            let Some(chunk) = chunk.map_err(|error| failed(&error, &url))? else { break };
            if (bytes.len() + chunk.len()) as u64 > limit_bytes {
                return Err(OciError::Endless { what: what.to_owned(), limit_bytes });
            }
            bytes.extend_from_slice(&chunk);
            tell(bytes.len() as u64);
        }
        Ok(bytes)
    };
    let read = tokio::time::timeout(time_for(limit_bytes), reading).await;
    read.unwrap_or_else(|_| Err(OciError::TimedOut { url: url.clone() }))
}

fn time_for(n_bytes: u64) -> Duration {
    ANSWERS + Duration::from_secs(n_bytes / BYTES_PER_S)
}

/// What an answer says that is none of those that were hoped for.
pub(super) async fn refusal(answer: Response, host: &str, what: &str) -> OciError {
    let (status, url) = (answer.status(), shown(answer.url()));
    let said = content(answer, "the answer", REMARK_BYTES_MAX, &untold()).await.unwrap_or_default();
    let message = message(&said);
    match status {
        StatusCode::NOT_FOUND => OciError::NotFound(what.to_owned()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            let reason = if message.is_empty() { status.to_string() } else { message };
            OciError::Unauthorised { host: host.to_owned(), reason }
        }
        _ => OciError::Status { url, status: status.as_u16(), message },
    }
}

/// The messages of an answer as the specification has errors; of others, the beginning.
fn message(said: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Errors {
        errors: Vec<OneError>,
    }
    #[derive(Deserialize)]
    struct OneError {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let text = match serde_json::from_slice::<Errors>(said) {
        Ok(Errors { errors }) => {
            let mut seen = HashSet::new();
            let texts =
                errors.into_iter().map(|one| if one.message.is_empty() { one.code } else { one.message });
            texts.filter(|text| seen.insert(text.clone())).collect::<Vec<_>>().join(", ")
        }
        Err(_) => String::from_utf8_lossy(said).trim().to_owned(),
    };
    text.chars().take(REMARK_CHARS_MAX).collect()
}

/// A URL for people: without its query, which lets whoever has it in where content lies elsewhere.
pub(super) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.to_string()
}

fn failed(error: &reqwest::Error, place: &str) -> OciError {
    let url = error.url().map_or_else(|| place.to_owned(), shown);
    match error.is_timeout() {
        true => OciError::TimedOut { url },
        false if is_untrusted(error) => OciError::Untrusted { url, reason: reason(error) },
        false => OciError::Unreachable { url, reason: reason(error) },
    }
}

/// Whether a certificate is what a connection failed of. Where TLS is read from a stream, its errors are inside of the stream's.
fn is_untrusted(error: &reqwest::Error) -> bool {
    let is_it = |error: &(dyn std::error::Error + 'static)| {
        matches!(error.downcast_ref(), Some(rustls::Error::InvalidCertificate(_)))
    };
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if is_it(error) || inner.is_some_and(|inner| is_it(inner)) {
            return true;
        }
        next = inner.map(|inner| inner as &(dyn std::error::Error + 'static)).or_else(|| error.source());
    }
    false
}

/// The innermost cause, which alone says something: a name that is not known, a connection that is refused.
fn reason(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_asked_without_tls() {
        let http = |host: &str, plain| Http::new(host, plain).expect("made");
        let scheme = |http: &Http| http.url("/v2/").expect("a URL").scheme().to_owned();
        assert_eq!(scheme(&http("ghcr.io", false)), "https");
        assert_eq!(scheme(&http("ghcr.io", true)), "http");
        assert_eq!(scheme(&http("127.0.0.1:5000", false)), "http");
    }

    #[test]
    fn nowhere_is_gone_without_tls_because_a_registry_says_so() {
        let goes = |host: &str, plain, to: &str| {
            let http = Http::new(host, plain).expect("made");
            let from = http.url("/v2/a/blobs/x").expect("a URL");
            http.follow(&from, to)
        };
        for (host, plain, to) in [
            ("ghcr.io", false, "https://cdn.example.com/x"),
            ("ghcr.io", false, "/elsewhere"),
            ("ghcr.io", true, "http://ghcr.io/x"),
            ("localhost:5000", false, "http://localhost:5000/x"),
            ("localhost:5000", false, "http://127.0.0.1:9000/x"),
        ] {
            goes(host, plain, to).expect(to);
        }
        for (host, plain, to) in [
            ("ghcr.io", false, "http://ghcr.io/x"),
            ("ghcr.io", false, "http://localhost/x"),
            ("ghcr.io", true, "http://cdn.example.com/x"),
            ("ghcr.io", true, "http://localhost/x"),
            ("localhost:5000", false, "http://cdn.example.com/x"),
        ] {
            assert!(matches!(goes(host, plain, to), Err(OciError::Plain { .. })), "{host} {to}");
        }
        assert!(matches!(goes("ghcr.io", true, "file:///etc/passwd"), Err(OciError::Protocol { .. })));
        for to in ["https://me:secret@ghcr.io/x", "https://token@cdn.example.com/x"] {
            let refused = goes("ghcr.io", false, to).expect_err(to);
            assert!(matches!(&refused, OciError::Protocol { .. }) && !refused.to_string().contains("secret"));
        }
        let http = Http::new("ghcr.io", false).expect("made");
        let is_own = |url: &str| http.is_own(&Url::parse(url).expect("a URL"));
        assert!(
            is_own("https://ghcr.io/x") && !is_own("https://ghcr.io:444/x") && !is_own("https://cdn.io/x")
        );
    }

    #[tokio::test]
    async fn an_answer_that_stops_is_waited_for_no_longer_than_that() {
        use std::io::{Read as _, Write as _};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let http = Http::new(&listener.local_addr().expect("it has one").to_string(), false).expect("made");
        let (ended, ends) = std::sync::mpsc::channel::<()>();
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("it is asked");
            // An answer before its question is none.
            assert_ne!(stream.read(&mut [0; 512]).expect("a question"), 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab").expect("it is read");
            let _ = ends.recv();
        });
        let request = http.client().get(http.url("/v2/").expect("a URL"));
        let answer = http.send(request, 0).await.expect("it begins");
        let read = content_within(answer, "it", 5, &untold(), Duration::from_millis(50)).await;
        assert!(matches!(&read, Err(error @ OciError::TimedOut { .. }) if error.is_retryable()), "{read:?}");
        drop(ended);
        served.join().expect("no panic");
    }

    #[test]
    fn what_lets_somebody_in_is_not_shown() {
        let signed = Url::parse("https://cdn.example.com/x?signature=secret").expect("a URL");
        assert_eq!(shown(&signed), "https://cdn.example.com/x");
        let plain = Http::new("ghcr.io", false).expect("made");
        let from = plain.url("/v2/").expect("a URL");
        let refused =
            plain.follow(&from, "http://cdn.example.com/x?signature=secret").expect_err("without TLS");
        assert!(!refused.to_string().contains("secret"), "{refused}");
    }

    #[test]
    fn what_a_registry_says_is_said() {
        let errors = br#"{"errors":[{"code":"DENIED","message":"no"},{"code":"X"},{"code":"X"}]}"#;
        assert_eq!(message(errors), "no, X");
        assert_eq!(message(b" bad gateway\n"), "bad gateway");
        assert_eq!(message(&[b'x'; 5000]).len(), REMARK_CHARS_MAX);
    }
}
