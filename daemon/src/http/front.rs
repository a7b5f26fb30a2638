//! A connection's requests: whose they are, what they ask, and a session for each.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::{AUTHORIZATION, CONNECTION};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::BodyExt as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use trellis_client::Client;

use super::connection::Connection;
use super::failure::Failure;
use super::fields::Fields;
use super::places::Places;
use super::share::{self, Share};
use super::tokens::{Tokens, random_hex};
use super::write_timeout::WriteTimeout;
use super::{anthropic, openai};
use crate::config::{Config, HttpSettings};
use crate::daemon::Daemon;
use crate::ipc::HandOver;
use crate::service::HostService;
use crate::session::{Actor, Quota, QuotaPermit, Sessions};
use crate::user_places::UserPlaces;

/// Bytes under way between a request and its session.
const DUPLEX_BYTES: usize = 64 << 10;

/// Bytes of the head of a request, and of what is read of its body at a time.
const BUFFER_BYTES: usize = 64 << 10;

/// The header by which clients of OpenAI's API name an answer to whoever is to find out about it.
const REQUEST_ID: &str = "x-request-id";

/// The ends of connections.
#[derive(Clone, Default)]
pub(super) struct Ends {
    /// No more is asked from then on.
    pub(super) begin: CancellationToken,
    /// Nothing is waited for any more.
    pub(super) are_over: CancellationToken,
}

/// What answers requests.
pub(crate) struct Front {
    sessions: Arc<Sessions<HostService>>,
    service: Arc<HostService>,
    /// Of users, for work on what is large.
    large_work: UserPlaces,
    /// Connections of those who came with tokens.
    with_tokens: Arc<Quota>,
    shutdown: CancellationToken,
    hand_over: Arc<HandOver>,
    settings: HttpSettings,
    /// None where the kernel says who asks.
    tokens: Option<Arc<Tokens>>,
    /// Who is served; all where there is none.
    users: Option<[u32; 2]>,
}

impl Front {
    /// A front of a daemon, for all of its users or for these alone. With tokens, where no kernel says who asks.
    ///
    /// # Errors
    /// There are no tokens to be had.
    pub(crate) fn new(
        daemon: &Daemon,
        config: &Config,
        needs_token: bool,
        users: Option<[u32; 2]>,
    ) -> io::Result<Arc<Self>> {
        let tokens = match (needs_token, &config.http.tokens_dir, &config.state_dir) {
            (false, _, _) => None,
            (true, Some(folder), _) => Some(Arc::new(Tokens::in_folder(folder.clone())?)),
            (true, None, Some(state)) => Some(Arc::new(Tokens::own(state)?)),
            (true, None, None) => {
                let message = "there is no place for a token: set http.tokens_dir or state_dir";
                return Err(io::Error::new(io::ErrorKind::NotFound, message));
            }
        };
        if let Some(tokens) = &tokens {
            tracing::info!(place = %tokens.place().display(), "HTTP requests need a token");
        }
        Ok(Arc::new(Self {
            sessions: daemon.sessions().clone(),
            service: daemon.service().clone(),
            large_work: share::places(),
            with_tokens: Quota::new(config.http.n_connections),
            shutdown: daemon.shutdown().clone(),
            hand_over: daemon.upgrade().hand_over().clone(),
            settings: config.http.clone(),
            tokens,
            users,
        }))
    }

    /// What is where.
    pub(super) fn router(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(openai::chat::answer))
            .route("/v1/completions", post(openai::completions::answer))
            .route("/v1/embeddings", post(openai::embeddings::answer))
            .route("/v1/models", get(openai::models::list))
            .route("/v1/models/{*name}", get(openai::models::one))
            .route("/v1/responses", post(openai::responses::answer))
            .route("/v1/responses/{id}", get(openai::responses::get).delete(openai::responses::delete))
            .route("/v1/messages", post(anthropic::answer))
            .route("/v1/messages/count_tokens", post(anthropic::count))
            .fallback(openai::unknown_path)
            .method_not_allowed_fallback(openai::unknown_method)
            .with_state(self.clone())
    }

    /// Places for those who come.
    pub(super) fn places(&self) -> Places {
        Places::new(self.settings.n_connections, self.sessions.places().clone())
    }

    /// Whether another program is to take the daemon's place, and its socket.
    pub(super) fn hand_over(&self) -> &HandOver {
        &self.hand_over
    }

    /// Bytes of one message to a guest.
    pub(super) fn message_bytes(&self) -> usize {
        self.sessions.limits().message_bytes
    }

    /// By when answers have to have ended that are under way as the daemon ends.
    pub(super) fn ends_by(&self) -> Instant {
        let stop_time = Duration::from_millis(self.sessions.limits().stop_ms);
        self.sessions.ends_by().at_most(stop_time)
    }

    fn read_time(&self) -> Duration {
        Duration::from_millis(self.settings.read_ms)
    }

    /// A session of this user, which lasts until its client is dropped.
    pub(super) async fn connect(&self, actor: Actor) -> Result<Client, Failure> {
        if self.sessions.is_draining() || self.shutdown.is_cancelled() {
            let message = "the daemon is going down; there may be another soon";
            return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message));
        }
        let (near, far) = tokio::io::duplex(DUPLEX_BYTES);
        let (sessions, shutdown) = (self.sessions.clone(), self.shutdown.clone());
        tokio::spawn(async move {
            match sessions.serve(far, actor, shutdown).await {
                Err(error) if !error.is_departure() => {
                    tracing::debug!(uid = actor.uid, %error, "the session of an HTTP request failed");
                }
                Ok(()) | Err(_) => {}
            }
        });
        Ok(Client::over(near).await?)
    }

    /// What a request of this user takes of the daemon: nothing yet.
    pub(super) async fn share(&self, actor: Actor) -> Share {
        Share::new(&self.service.account_beside_sessions(actor).await, actor, &self.large_work)
    }

    /// Reads the body of a request as `read` does. What it comes to is on its user's account.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        actor: Actor,
        body: Body,
        read: impl FnOnce(Fields) -> Result<T, Failure> + Send + 'static,
    ) -> Result<(T, Share), Failure> {
        let mut share = self.share(actor).await;
        let bytes = self.body(body, &mut share).await?;
        share.set(share::bytes_of_json(&bytes))?;
        let read = share.work(move || read(Fields::of_body(&bytes)?)).await?;
        Ok((read, share))
    }

    async fn body(&self, mut body: Body, share: &mut Share) -> Result<Vec<u8>, Failure> {
        let limit = self.settings.body_bytes;
        let all = async {
            let mut bytes = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| {
                    let message = format!("the body cannot be read: {error}");
                    Failure::new(StatusCode::BAD_REQUEST, "invalid_body", message)
                })?;
                let Ok(data) = frame.into_data() else { continue };
                let n_bytes = bytes.len() + data.len();
                if n_bytes > limit {
                    let message = format!("the body has more than the limit of {limit} bytes");
                    return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message));
                }
                // A list that grows may come to twice what is in it.
                share.set(2 * n_bytes as u64)?;
                bytes.extend_from_slice(&data);
            }
            Ok(bytes)
        };
        tokio::time::timeout(self.read_time(), all).await.unwrap_or_else(|_| {
            let message = format!("the body has not come within {:?}", self.read_time());
            Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "timeout", message))
        })
    }

    /// Answers the requests of a connection; once the daemon is about to end, those alone that are under way.
    pub(super) async fn talk(
        self: Arc<Self>,
        client: Connection,
        peer: Option<Actor>,
        router: Router,
        ends: Ends,
    ) {
        let stream = WriteTimeout::new(client.clone(), Duration::from_millis(self.settings.write_ms));
        let place = Arc::new(Mutex::default());
        let router = TowerToHyperService::new(router);
        let service = service_fn(|mut request: Request<Incoming>| {
            let (front, router, place) = (self.clone(), router.clone(), place.clone());
            async move {
                let admitted = front.admit(peer, request.headers()).await;
                let admitted = admitted.and_then(|actor| front.with_place(&place, actor));
                let is_refused = admitted.is_err();
                let mut response = match admitted {
                    Ok(actor) => {
                        request.extensions_mut().insert(actor);
                        match router.call(request).await {
                            Ok(response) => response,
                            Err(never) => match never {},
                        }
                    }
                    Err(failure) if anthropic::is_asked(&request) => {
                        anthropic::Refused::from(failure).into_response()
                    }
                    Err(failure) => openai::Refused::from(failure).into_response(),
                };
                if is_refused {
                    // Its place is for others.
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                if let Ok(id) = HeaderValue::from_str(&format!("req_{}", random_hex::<12>())) {
                    response.headers_mut().insert(REQUEST_ID, id);
                }
                Ok::<Response, Infallible>(response)
            }
        });
        let mut server = http1::Builder::new();
        server.timer(TokioTimer::new()).header_read_timeout(self.read_time()).max_buf_size(BUFFER_BYTES);
        let mut connection = pin!(server.serve_connection(TokioIo::new(stream), service));
        let mut gone = pin!(client.ends());
        tokio::select! {
            // What can be answered at once is, also to a client that says no more.
            biased;
            // A client that breaks off, or says what is no HTTP, hears no more.
            _ = connection.as_mut() => return,
            () = gone.as_mut() => return,
            () = ends.begin.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            biased;
            _ = connection => {}
            () = gone => {}
            () = ends.are_over.cancelled() => {}
        }
    }

    /// An actor whose connection has one of its user's places, from the first request on that has the user's token. Where the kernel
    /// says who asks, it has had one since it came.
    fn with_place(&self, place: &Mutex<Option<(u32, QuotaPermit)>>, actor: Actor) -> Result<Actor, Failure> {
        if self.tokens.is_none() {
            return Ok(actor);
        }
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if place.as_ref().is_none_or(|(uid, _)| *uid != actor.uid) {
            let permit = self.with_tokens.take(actor).ok_or_else(|| {
                let message =
                    format!("this user has {} connections, which is the limit", self.settings.n_connections);
                Failure::new(StatusCode::TOO_MANY_REQUESTS, "too_many_connections", message)
            })?;
            *place = Some((actor.uid, permit));
        }
        Ok(actor)
    }

    /// Whose a request is.
    async fn admit(&self, peer: Option<Actor>, headers: &HeaderMap) -> Result<Actor, Failure> {
        let unauthorized = |message: &str| Failure::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message);
        let actor = match (peer, &self.tokens) {
            (Some(actor), _) => actor,
            (None, Some(tokens)) => {
                let token = token(headers).ok_or_else(|| {
                    unauthorized(
                        "a token is needed: `Authorization: Bearer TOKEN`, which clients take as the API key",
                    )
                })?;
                tokens.owner(token).await.ok_or_else(|| unauthorized("this token is nobody's"))?
            }
            (None, None) => return Err(unauthorized("it is not known who asks")),
        };
        match self.users {
            Some(users) if !users.contains(&actor.uid) => {
                let message = "this daemon runs guests in its own process, for the user who started it, and serves no others";
                Err(Failure::new(StatusCode::FORBIDDEN, "permission_denied", message))
            }
            _ => Ok(actor),
        }
    }
}

/// The token that a request has, in the header of OpenAI's or of Anthropic's API.
fn token(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    bearer.or_else(|| headers.get("x-api-key")?.to_str().ok()).filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_in_the_headers_of_either_api() {
        let of = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().expect("a header"));
            token(&headers).map(str::to_owned)
        };
        assert_eq!(of("authorization", "Bearer abc").as_deref(), Some("abc"));
        assert_eq!(of("authorization", "bearer  abc ").as_deref(), Some("abc"));
        assert_eq!(of("x-api-key", "abc").as_deref(), Some("abc"));
        for (name, value) in [("authorization", "Basic abc"), ("authorization", "Bearer "), ("cookie", "abc")]
        {
            assert_eq!(of(name, value), None, "{name}: {value}");
        }
    }
}
