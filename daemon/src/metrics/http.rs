//! The metrics over HTTP, for Prometheus and its like, on an address that only this machine reaches.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, ORIGIN};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;

use super::exposition::{Exposition, TextFormat};

/// Connections at once. Those beyond wait until one of them ends.
const N_CONNECTIONS: usize = 8;

/// How long a connection lasts, which is for one answer: nobody keeps a place from others.
const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// What was read off is told again for so long.
const FRESH_TIME: Duration = Duration::from_secs(1);

/// How long to wait where the process has no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Between two complaints of that.
const COMPLAINT_PAUSE: Duration = Duration::from_secs(60);

/// Whether nobody but this machine reaches an address.
pub(crate) fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// A place where metrics are asked for.
#[derive(Debug)]
pub(crate) struct Endpoint {
    listener: Arc<TcpListener>,
}

/// How long those who ask have for their answers once nobody is accepted any more.
const LAST_TIME: Duration = Duration::from_secs(1);

impl Endpoint {
    /// Listens there. Who comes is kept waiting until [`Self::serve`].
    ///
    /// # Errors
    /// The address is in use, or not to be had.
    pub(crate) async fn bind(address: SocketAddr) -> io::Result<Self> {
        Ok(Self { listener: Arc::new(TcpListener::bind(address).await?) })
    }

    /// Takes a socket that another has made.
    ///
    /// # Errors
    /// Other machines reach it.
    pub(crate) fn adopt(listener: std::net::TcpListener) -> io::Result<Self> {
        let address = listener.local_addr()?;
        if !is_loopback(&address) {
            let message = format!("{address} is no loopback address, and who asks there is not known");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        listener.set_nonblocking(true)?;
        Ok(Self { listener: Arc::new(TcpListener::from_std(listener)?) })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The socket, which stays open for as long as this does: who comes meanwhile waits there.
    pub(crate) fn socket(&self) -> Arc<TcpListener> {
        self.listener.clone()
    }

    /// Answers with what `read` gives at that moment, until the token is cancelled, and to those who are there then.
    pub(crate) async fn serve<F, R>(self, read: F, shutdown: CancellationToken)
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = Option<Exposition>> + Send + 'static,
    {
        let read = Arc::new(Cache { read, last: Mutex::default() });
        let places = Arc::new(Semaphore::new(N_CONNECTIONS));
        let (mut is_not_accepting, mut last_told) = (false, None::<Instant>);
        let accept = async {
            loop {
                let Ok(place) = places.clone().acquire_owned().await else { return };
                match self.listener.accept().await {
                    Ok((stream, _)) => {
                        is_not_accepting = false;
                        let (read, shutdown) = (read.clone(), shutdown.clone());
                        tokio::spawn(async move {
                            let connection = tokio::time::timeout(CONNECTION_TIME, talk(stream, &*read));
                            let last = async {
                                shutdown.cancelled().await;
                                tokio::time::sleep(LAST_TIME).await;
                            };
                            tokio::select! {
                                _ = connection => {}
                                () = last => {}
                            }
                            drop(place);
                        });
                    }
                    Err(error) => {
                        // As for clients: whoever connects is not to fill the log.
                        let is_due = last_told.is_none_or(|told| told.elapsed() >= COMPLAINT_PAUSE);
                        if !is_not_accepting && is_due {
                            (is_not_accepting, last_told) = (true, Some(Instant::now()));
                            tracing::warn!(%error, "cannot accept a connection for metrics");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        };
        tokio::select! {
            () = accept => {}
            () = shutdown.cancelled() => {}
        }
        // All places are free once nobody has one.
        drop(places.acquire_many(N_CONNECTIONS as u32).await);
    }
}

/// What was read off last, for all who ask at the same time and shortly after.
struct Cache<F> {
    read: F,
    last: Mutex<Option<(Instant, Arc<Exposition>)>>,
}

impl<F, R> Cache<F>
where
    F: Fn() -> R,
    R: Future<Output = Option<Exposition>>,
{
    async fn get(&self) -> Option<Arc<Exposition>> {
        // It is held while one reads, so that the others wait for what that one gets.
        let mut last = self.last.lock().await;
        if let Some((read, exposition)) = &*last
            && read.elapsed() < FRESH_TIME
        {
            return Some(exposition.clone());
        }
        let exposition = Arc::new((self.read)().await?);
        *last = Some((Instant::now(), exposition.clone()));
        Some(exposition)
    }
}

/// Whether what asks means this machine and is no page of another, which a browser would have ask here under its own name.
fn is_local(headers: &HeaderMap) -> bool {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let is_loopback = name.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback());
    (is_loopback || name.eq_ignore_ascii_case("localhost")) && !headers.contains_key(ORIGIN)
}

async fn talk<F, R>(stream: TcpStream, read: &Cache<F>)
where
    F: Fn() -> R,
    R: Future<Output = Option<Exposition>>,
{
    let answer = service_fn(|request: Request<Incoming>| async move {
        Ok::<_, Infallible>(answer(request.method(), request.uri().path(), request.headers(), read).await)
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(CONNECTION_TIME).keep_alive(false);
    // A client that breaks off, or says what is no HTTP, hears no more.
    let _ = server.serve_connection(TokioIo::new(stream), answer).await;
}

async fn answer<F, R>(
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    read: &Cache<F>,
) -> Response<Full<Bytes>>
where
    F: Fn() -> R,
    R: Future<Output = Option<Exposition>>,
{
    if !is_local(headers) {
        return plain(
            StatusCode::FORBIDDEN,
            "metrics are for this machine, asked for as localhost or by a loopback address\n",
        );
    }
    if path != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "metrics are at /metrics\n");
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "metrics are only read\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let Some(exposition) = read.get().await else {
        return plain(StatusCode::SERVICE_UNAVAILABLE, "the daemon cannot say how it is\n");
    };
    let format = format_for(headers);
    let mut response = Response::new(Full::from(exposition.text(format)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
    response
}

/// OpenMetrics for whoever says that it takes that.
fn format_for(headers: &HeaderMap) -> TextFormat {
    let accepted = headers.get_all(ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
    let mut types = accepted.flat_map(|value| value.split(','));
    let takes = types
        .any(|part| part.split(';').next().is_some_and(|name| name.trim() == "application/openmetrics-text"));
    if takes { TextFormat::OpenMetrics } else { TextFormat::Prometheus }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
