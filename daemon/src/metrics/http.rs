//! The metrics over HTTP, for Prometheus and its like, on an address that only this machine reaches.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::exposition::{Exposition, TextFormat};

/// Connections at once. Those beyond wait until one of them ends.
const N_CONNECTIONS: usize = 8;

/// How long a connection may take to say what it wants, and may last: whoever scrapes connects again.
const HEADER_TIME: Duration = Duration::from_secs(10);
const CONNECTION_TIME: Duration = Duration::from_secs(600);

/// How long to wait where the process has no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Whether nobody but this machine reaches an address.
pub(crate) fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// A place where metrics are asked for.
#[derive(Debug)]
pub(crate) struct Endpoint {
    listener: TcpListener,
}

impl Endpoint {
    /// Listens there. Who comes is kept waiting until [`Self::serve`].
    ///
    /// # Errors
    /// The address is in use, or not to be had.
    pub(crate) async fn bind(address: SocketAddr) -> std::io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await? })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers with what `read` gives at that moment, until the token is cancelled.
    pub(crate) async fn serve<F, R>(self, read: F, shutdown: CancellationToken)
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = Option<Exposition>> + Send + 'static,
    {
        let (read, places) = (Arc::new(read), Arc::new(Semaphore::new(N_CONNECTIONS)));
        let accept = async {
            loop {
                let Ok(place) = places.clone().acquire_owned().await else { return };
                match self.listener.accept().await {
                    Ok((stream, _)) => {
                        let (read, shutdown) = (read.clone(), shutdown.clone());
                        tokio::spawn(async move {
                            let connection = tokio::time::timeout(CONNECTION_TIME, talk(stream, &*read));
                            tokio::select! {
                                _ = connection => {}
                                () = shutdown.cancelled() => {}
                            }
                            drop(place);
                        });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection for metrics is not taken");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        };
        tokio::select! {
            () = accept => {}
            () = shutdown.cancelled() => {}
        }
    }
}

async fn talk<F, R>(stream: TcpStream, read: &F)
where
    F: Fn() -> R,
    R: Future<Output = Option<Exposition>>,
{
    let answer = service_fn(|request: Request<Incoming>| async move {
        Ok::<_, Infallible>(answer(request.method(), request.uri().path(), request.headers(), read).await)
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME);
    // A client that breaks off, or says what is no HTTP, hears no more.
    let _ = server.serve_connection(TokioIo::new(stream), answer).await;
}

async fn answer<F, R>(method: &Method, path: &str, headers: &HeaderMap, read: &F) -> Response<Full<Bytes>>
where
    F: Fn() -> R,
    R: Future<Output = Option<Exposition>>,
{
    if path != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "metrics are at /metrics\n");
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "metrics are only read\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let Some(exposition) = read().await else {
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
