//! A registry of OCI artifacts on this machine: what the distribution specification says of pulls and pushes, with a password or a
//! certificate if it is to have one, and able to lie.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, LOCATION, WWW_AUTHENTICATE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::pack;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What is sent of a body without an end, and how often: fast enough to show that it is not read for ever.
const CHUNK: [u8; 16 << 10] = [b'x'; 16 << 10];
const PAUSE: Duration = Duration::from_millis(1);

/// What a registry is asked.
#[derive(Clone, Debug)]
pub struct Asked {
    /// `GET`
    pub method: Method,
    /// `/v2/chat/manifests/1`
    pub path: String,
    /// Whether it was shown a password or a token.
    pub is_authorized: bool,
}

/// What a registry answers that lies.
#[derive(Clone, Debug)]
pub enum Lie {
    /// This content in the place of what is there.
    Content(Bytes),
    /// Content without an end.
    Endless,
    /// The beginning of content, and then nothing, for ever.
    Silent,
    /// That it is elsewhere.
    Elsewhere(String),
    /// This status.
    Status(u16),
    /// Another digest in the header than the content has.
    Header(String),
}

type Lying = Box<dyn FnMut(&Asked) -> Option<Lie> + Send>;

#[derive(Default)]
struct Held {
    /// By their digests.
    blobs: BTreeMap<String, Bytes>,
    /// By their paths: each under its tag and under its digest.
    manifests: BTreeMap<String, Bytes>,
    asked: Vec<Asked>,
    lying: Option<Lying>,
    n_uploads: usize,
}

struct Shared {
    host: String,
    /// A user and a password, as one header has them.
    basic: Option<String>,
    held: Mutex<Held>,
}

/// A registry, until it is dropped.
pub struct Registry {
    shared: Arc<Shared>,
    _runtime: tokio::runtime::Runtime,
}

impl Registry {
    /// Starts one for everybody.
    ///
    /// # Panics
    /// The machine has no port left.
    #[must_use]
    pub fn start() -> Self {
        Self::started(None, None)
    }

    /// Starts one for who has a password: this value of an `Authorization` header.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn with_password(basic: &str) -> Self {
        Self::started(Some(basic.to_owned()), None)
    }

    /// Starts one that is spoken to over TLS alone. It is 127.0.0.1, says who signs at [`authority`].
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn with_tls() -> Self {
        let read = |name: &str| std::fs::read(tls_file(name)).expect("it is in the repository");
        let chain = CertificateDer::pem_slice_iter(&read("server.pem")).collect::<Result<Vec<_>, _>>();
        let key = PrivateKeyDer::from_pem_slice(&read("server.key")).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has them")
            .with_no_client_auth()
            .with_single_cert(chain.expect("certificates"), key)
            .expect("they belong together");
        Self::started(None, Some(TlsAcceptor::from(Arc::new(config))))
    }

    fn started(basic: Option<String>, tls: Option<TlsAcceptor>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let host = listener.local_addr().expect("it has an address").to_string();
        let shared = Arc::new(Shared { host, basic, held: Mutex::default() });
        let served = shared.clone();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = served.clone();
                let tls = tls.clone();
                tokio::spawn(async move {
                    match tls {
                        None => serve(shared, stream).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve(shared, stream).await;
                            }
                        }
                    }
                });
            }
        });
        Self { shared, _runtime: runtime }
    }

    /// Its host, with its port.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.shared.host
    }

    /// All that it was asked so far.
    #[must_use]
    pub fn asked(&self) -> Vec<Asked> {
        self.shared.held().asked.clone()
    }

    /// Has it lie where this says so.
    pub fn lie(&self, lying: impl FnMut(&Asked) -> Option<Lie> + Send + 'static) {
        self.shared.held().lying = Some(Box::new(lying));
    }

    /// Has it say the truth again.
    pub fn lie_no_more(&self) {
        self.shared.held().lying = None;
    }

    /// The manifest that a tag or a digest names.
    ///
    /// # Panics
    /// There is none.
    #[must_use]
    pub fn manifest(&self, name: &str, tag: &str) -> Bytes {
        let path = format!("/v2/{name}/manifests/{tag}");
        self.shared.held().manifests.get(&path).unwrap_or_else(|| panic!("there is no {path}")).clone()
    }

    /// Puts a manifest there, whatever it says. Its digest.
    pub fn put_manifest(&self, name: &str, tag: &str, manifest: &[u8]) -> String {
        self.shared.put_manifest(&format!("/v2/{name}/manifests/{tag}"), Bytes::copy_from_slice(manifest))
    }

    /// Puts content there. Its digest.
    pub fn put_blob(&self, content: &[u8]) -> String {
        let digest = digest(content);
        self.shared.held().blobs.insert(digest.clone(), Bytes::copy_from_slice(content));
        digest
    }
}

/// The certificate that signs that of a registry with TLS. Nobody but a test trusts it.
#[must_use]
pub fn authority() -> PathBuf {
    tls_file("ca.pem")
}

fn tls_file(name: &str) -> PathBuf {
    pack::root().join("tests/golden/tls").join(name)
}

async fn serve(shared: Arc<Shared>, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(shared.answer(request).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new();
    drop(connection.serve_connection(TokioIo::new(stream), service).await);
}

/// `sha256:…` of some content.
#[must_use]
pub fn digest(content: &[u8]) -> String {
    let digits: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_manifest(&self, path: &str, manifest: Bytes) -> String {
        let digest = digest(&manifest);
        let (repository, _) = path.rsplit_once('/').expect("it has a name");
        let mut held = self.held();
        held.manifests.insert(format!("{repository}/{digest}"), manifest.clone());
        held.manifests.insert(path.to_owned(), manifest);
        digest
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let header =
            request.headers().get(AUTHORIZATION).map(|value| value.to_str().expect("text").to_owned());
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let query = request.uri().query().unwrap_or_default().to_owned();
        let asked = Asked { method: method.clone(), path: path.clone(), is_authorized: header.is_some() };
        let content = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let lie = {
            let mut held = self.held();
            held.asked.push(asked.clone());
            held.lying.as_mut().and_then(|lying| lying(&asked))
        };
        if let Some(basic) = &self.basic {
            if path == "/token" {
                let may_push = query.contains("push");
                return match header.as_ref() == Some(basic) {
                    true if may_push => with(StatusCode::OK, r#"{"token": "pushes"}"#.into()),
                    true => with(StatusCode::OK, r#"{"token": "pulls"}"#.into()),
                    false => error(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", "no such password"),
                };
            }
            let is_read = method == Method::GET || method == Method::HEAD;
            let is_let_in = match header.as_deref() {
                Some("Bearer pushes") => true,
                Some("Bearer pulls") => is_read,
                _ => false,
            };
            if !is_let_in {
                let mut answer = error(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", "who is asking?");
                let realm = format!("http://{}/token", self.host);
                // What this one request would have needed, as registries say it.
                let scope = if is_read { "pull" } else { "pull,push" };
                let challenge =
                    format!(r#"Bearer realm="{realm}",service="tests",scope="repository:x:{scope}""#);
                answer.headers_mut().insert(WWW_AUTHENTICATE, challenge.parse().expect("a value"));
                return answer;
            }
        }
        match lie {
            Some(lie) => told(lie),
            None => self.truth(&method, &path, &query, content),
        }
    }

    fn truth(&self, method: &Method, path: &str, query: &str, content: Bytes) -> Response<Body> {
        let is_read = method == Method::GET || method == Method::HEAD;
        if path.contains("/manifests/") {
            if method == Method::PUT {
                return digested(StatusCode::CREATED, &self.put_manifest(path, content), Bytes::new());
            }
            let manifest = self.held().manifests.get(path).cloned();
            return match manifest {
                Some(manifest) if is_read => digested(StatusCode::OK, &digest(&manifest), manifest),
                _ => error(StatusCode::NOT_FOUND, "MANIFEST_UNKNOWN", "manifest unknown"),
            };
        }
        if path.contains("/blobs/uploads/") {
            if method == Method::POST {
                let mut held = self.held();
                held.n_uploads += 1;
                let mut answer = with(StatusCode::ACCEPTED, Bytes::new());
                let place = format!("{path}{}?state=begun", held.n_uploads);
                answer.headers_mut().insert(LOCATION, place.parse().expect("a value"));
                return answer;
            }
            let said = query.split('&').find_map(|pair| pair.strip_prefix("digest="));
            let actual = digest(&content);
            if said.map(|said| said.replace("%3A", ":")) != Some(actual.clone()) {
                return error(StatusCode::BAD_REQUEST, "DIGEST_INVALID", "the content has another digest");
            }
            self.held().blobs.insert(actual.clone(), content);
            return digested(StatusCode::CREATED, &actual, Bytes::new());
        }
        let blob = path.rsplit('/').next().and_then(|digest| self.held().blobs.get(digest).cloned());
        match blob {
            Some(blob) if is_read => digested(StatusCode::OK, &digest(&blob), blob),
            _ => error(StatusCode::NOT_FOUND, "BLOB_UNKNOWN", "blob unknown"),
        }
    }
}

fn told(lie: Lie) -> Response<Body> {
    match lie {
        Lie::Content(content) => with(StatusCode::OK, content),
        Lie::Endless => streamed(true),
        Lie::Silent => streamed(false),
        Lie::Elsewhere(place) => {
            let mut answer = with(StatusCode::TEMPORARY_REDIRECT, Bytes::new());
            answer.headers_mut().insert(LOCATION, place.parse().expect("a value"));
            answer
        }
        Lie::Status(status) => with(StatusCode::from_u16(status).expect("a status"), Bytes::new()),
        Lie::Header(digest) => digested(StatusCode::CREATED, &digest, Bytes::new()),
    }
}

fn streamed(is_endless: bool) -> Response<Body> {
    let chunk = || Ok(Frame::data(Bytes::from_static(&CHUNK)));
    let first = stream::iter([chunk()]);
    let body = if is_endless {
        let rest = stream::repeat_with(chunk).then(|chunk| async move {
            tokio::time::sleep(PAUSE).await;
            chunk
        });
        StreamBody::new(first.chain(rest)).boxed_unsync()
    } else {
        StreamBody::new(first.chain(stream::pending())).boxed_unsync()
    };
    Response::new(body)
}

fn with(status: StatusCode, content: Bytes) -> Response<Body> {
    let mut answer = Response::new(Full::new(content.clone()).boxed_unsync());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_LENGTH, content.len().into());
    answer
}

fn digested(status: StatusCode, digest: &str, content: Bytes) -> Response<Body> {
    let mut answer = with(status, content);
    answer.headers_mut().insert("docker-content-digest", digest.parse().expect("a value"));
    answer
}

fn error(status: StatusCode, code: &str, message: &str) -> Response<Body> {
    let text = serde_json::json!({"errors": [{"code": code, "message": message}]}).to_string();
    let mut answer = with(status, text.into());
    answer.headers_mut().insert(CONTENT_TYPE, "application/json".parse().expect("a value"));
    answer
}
