//! The sessions of a daemon: how many a user may have, how one begins, and what all of them share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use trellis_wire::{
    ErrorBody, ErrorCode, FRAME_BYTES_MAX, FrameBuffer, FrameReader, Hello, ServerMessage, WireError,
    negotiate,
};

use super::actor::{Actor, Quota};
use super::call;
use super::connection::{ConnectedClient, Connection};
use super::detached::{DetachedGuests, DetachedUsed};
use super::ends_by::EndsBy;
use super::limits::SessionLimits;
use super::memory::BufferCharge;
use super::service::{Service, StopReason};
use super::turns::UserTurns;
use super::uploads::{Uploads, UploadsUsed};
use super::used::{SessionsUsed, Used};
use crate::descriptors::Shares;
use crate::guest::GuestLimits;
use crate::ipc::Places;
use crate::live::Live;
use crate::metrics::SessionCounts;

/// Why a session ended other than by the client's leaving or the daemon's going down.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The client broke the protocol, or the connection failed.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The client said nothing.
    #[error("no hello within {limit:?}")]
    HelloTimeout {
        /// How long it had.
        limit: Duration,
    },
    /// The client used an id that is not greater than all before.
    #[error("request id {id} is not above {last_id}")]
    StaleId {
        /// The id.
        id: u64,
        /// The greatest id before it.
        last_id: u64,
    },
    /// The client has as many connections as it may have.
    #[error("more than the limit of {limit} connections of user {uid}")]
    TooManyConnections {
        /// The user.
        uid: u32,
        /// Connections allowed.
        limit: u64,
    },
    /// The client connects more often than it may.
    #[error("more than the limit of {limit} connections a second of user {uid}; try again later")]
    TooOften {
        /// The user.
        uid: u32,
        /// Connections allowed in a second.
        limit: u64,
    },
    /// All users together have as many connections as the daemon has descriptors for.
    #[error("all {limit} connections that the daemon has file descriptors for are taken; try again later")]
    Full {
        /// Connections allowed.
        limit: u64,
    },
    /// Guests of this user would run in the process of a daemon that was started for others alone.
    #[error(
        "this daemon runs guests in its own process, for the user who started it: user {uid} is not served; once others may come to \
         its socket, start it again, or write `isolation` in its configuration"
    )]
    NotServed {
        /// The user.
        uid: u32,
    },
}

impl SessionError {
    /// Whether the client has only gone, be it in the middle of a frame.
    pub(crate) fn is_departure(&self) -> bool {
        matches!(self, Self::Wire(WireError::Io(_) | WireError::Truncated { .. }))
    }

    pub(crate) fn to_body(&self) -> ErrorBody {
        let code = match self {
            Self::Wire(WireError::Unpaid { .. }) => ErrorCode::BudgetExceeded,
            Self::Wire(_) | Self::HelloTimeout { .. } | Self::StaleId { .. } => ErrorCode::Protocol,
            Self::TooManyConnections { .. } => ErrorCode::LimitExceeded,
            Self::Full { .. } | Self::TooOften { .. } => ErrorCode::Overloaded,
            Self::NotServed { .. } => ErrorCode::PermissionDenied,
        };
        let body = ErrorBody::new(code, self.to_string());
        match self {
            Self::Wire(WireError::FrameTooLarge { n_bytes, limit }) => {
                body.about("frame bytes").with_value(n_bytes).with_limit(*limit as u64)
            }
            Self::Wire(WireError::Unpaid { .. }) => body.about("host_bytes"),
            Self::StaleId { id, .. } => body.about("id").with_value(id),
            Self::TooManyConnections { limit, .. } | Self::Full { limit } => {
                body.about("connections").with_limit(*limit)
            }
            Self::TooOften { limit, .. } => body.about("connections_per_s").with_limit(*limit),
            Self::NotServed { .. } => body.about("isolation"),
            Self::Wire(_) | Self::HelloTimeout { .. } => body,
        }
    }
}

/// Everything that the sessions of one daemon share.
#[derive(Debug)]
pub struct Sessions<S> {
    pub(super) service: Arc<S>,
    limits: Live<SessionLimits>,
    /// What single guests may use.
    pub(super) guest_limits: GuestLimits,
    connections: Arc<Quota>,
    places: OnceLock<Arc<Places>>,
    pub(super) uploads: Arc<Uploads>,
    pub(super) turns: UserTurns,
    /// What a daemon that is about to go down waits for: guests, uploads, loads.
    pub(super) work: TaskTracker,
    draining: CancellationToken,
    ends_by: EndsBy,
    n_sessions_begun: AtomicU64,
    pub(super) detached: Arc<DetachedGuests>,
    pub(super) counts: SessionCounts,
}

impl<S: Service> Sessions<S> {
    /// Sessions that run their guests through `service`.
    pub fn new(service: Arc<S>, limits: SessionLimits, guest_limits: GuestLimits) -> Arc<Self> {
        Arc::new(Self {
            service,
            connections: Quota::new(limits.n_connections),
            places: OnceLock::new(),
            uploads: Uploads::new(limits.n_uploads, limits.n_uploads_waiting),
            turns: UserTurns::default(),
            work: TaskTracker::new(),
            draining: CancellationToken::new(),
            ends_by: EndsBy::default(),
            n_sessions_begun: AtomicU64::new(0),
            detached: DetachedGuests::new(limits.n_detached),
            counts: SessionCounts::default(),
            limits: Live::new(limits),
            guest_limits,
        })
    }

    /// Places for connections, by whichever way they come: of the descriptors that are free as the first of these ways opens.
    pub(crate) fn places(&self) -> &Arc<Places> {
        self.places.get_or_init(|| Arc::new(Places::new(Shares::now().n_connections)))
    }

    /// What connections may ask for now.
    pub(crate) fn limits(&self) -> Arc<SessionLimits> {
        self.limits.get()
    }

    /// Holds what is asked from now on to other limits. What is beyond them already goes on.
    pub(crate) fn set_limits(&self, limits: SessionLimits) {
        self.connections.set_n_max(limits.n_connections);
        self.uploads.set_n_max(limits.n_uploads, limits.n_uploads_waiting);
        self.detached.set_n_max(limits.n_detached);
        self.limits.set(limits);
    }

    /// What the connections of this user, and those of all users, have in use.
    #[must_use]
    pub fn used(&self, actor: Actor) -> SessionsUsed {
        let (n_connections, n_connections_of_all) = self.connections.taken(actor);
        let uploads = self.uploads.n_of(actor);
        let uploads_of_all = self.uploads.n_of_all();
        let (detached, detached_of_all) = self.detached.used(actor);
        let used = |n_connections, uploads: UploadsUsed, detached: DetachedUsed| Used {
            n_connections: n_connections as u64,
            n_uploads: uploads.n_sending as u64,
            n_uploads_waiting: uploads.n_waiting as u64,
            n_detached: detached.n_running as u64,
            n_detached_ended: detached.n_ended as u64,
        };
        SessionsUsed {
            user: used(n_connections, uploads, detached),
            all: used(n_connections_of_all, uploads_of_all, detached_of_all),
        }
    }

    /// A number for a session, which none had before.
    pub(super) fn next_id(&self) -> u64 {
        self.n_sessions_begun.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Waits for the ends of detached guests once the daemon goes down; for no longer than those of a connection may take.
    pub(crate) async fn detached_ended(&self) {
        let by = self.ends_by.at_most(2 * self.limits().stop_time());
        if tokio::time::timeout_at(by, self.detached.ended()).await.is_err() {
            tracing::warn!("detached guests have not ended in time");
        }
    }

    /// Something that is waited for as these are, until it is dropped.
    pub(crate) fn at_work(&self) -> TaskTrackerToken {
        self.work.token()
    }

    /// Guests, uploads and loads that have not ended.
    #[must_use]
    pub fn n_at_work(&self) -> usize {
        self.work.len()
    }

    /// Whether no more of these are taken on.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Resolves once no more of these are taken on.
    pub(crate) async fn drains(&self) {
        self.draining.cancelled().await;
    }

    /// Takes on no more of these, and waits until those that there are have ended, for so long as the settings say. Connections
    /// go on: clients take what they are sent, and may ask. What comes after is over soon after that time, too.
    pub async fn drain(&self) {
        let until = self.ends_by.note_drain(self.drain_time());
        self.work.close();
        self.draining.cancel();
        // Those that are left then are ended with the connections.
        let _ = tokio::time::timeout_at(until, self.work.wait()).await;
    }

    /// As [`Self::drain`]; what cancels `stopped` meanwhile cuts it short. Where that was before, what is at its end already has as long as
    /// any drain.
    pub(crate) async fn drain_unless(&self, stopped: &CancellationToken) {
        let was_stopped = stopped.is_cancelled();
        tokio::select! {
            biased;
            () = self.drain() => {}
            () = stopped.cancelled(), if !was_stopped => self.cut_short(),
        }
    }

    /// Of a daemon that drains, or has, nothing is waited for any more, however much is left of that time.
    pub(crate) fn cut_short(&self) {
        if self.is_draining() {
            self.ends_by.note_end();
        }
    }

    /// By when what is left at the end has to be over.
    pub(crate) fn ends_by(&self) -> &EndsBy {
        &self.ends_by
    }

    /// How long [`Self::drain`] waits at most.
    #[must_use]
    pub fn drain_time(&self) -> Duration {
        self.limits().drain_time()
    }

    /// Components on their way in, of all users.
    #[must_use]
    pub fn n_uploads(&self) -> usize {
        self.uploads.n_of_all().n_sending
    }

    /// Serves one connection until the client leaves, or `shutdown` is cancelled and the guests have ended. The guests
    /// of the connection never outlive it, but for those that were started detached. Dropping the future stops them, too.
    ///
    /// # Errors
    /// The client broke the protocol or a limit, or the connection failed; the client has been told if it listens.
    pub async fn serve<T>(
        self: &Arc<Self>,
        stream: T,
        actor: Actor,
        shutdown: CancellationToken,
    ) -> Result<(), SessionError>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin,
    {
        let (reader, mut writer) = tokio::io::split(stream);
        let limits = self.limits();
        let n_max = || {
            let most = usize::try_from(self.connections.n_max()).unwrap_or(usize::MAX);
            self.service.limit_of(actor, "sessions.n_connections", most)
        };
        let too_many = |limit| SessionError::TooManyConnections { uid: actor.uid, limit: limit as u64 };
        let n_max_so_far = n_max();
        let Some(permit) = self.connections.take_of(actor, n_max_so_far) else {
            let error = too_many(n_max_so_far);
            // The runtime may not know yet that there is room for these few bytes.
            let words = last_words(error.to_body());
            let _ = tokio::time::timeout(limits.hello_time(), writer.write_all(&words)).await;
            return Err(error);
        };
        let mut reader = reader;
        let hello = tokio::select! {
            biased;
            hello = tokio::time::timeout(limits.hello_time(), Hello::read(&mut reader)) => {
                hello.unwrap_or(Err(WireError::Io(std::io::ErrorKind::TimedOut.into())))
            }
            () = shutdown.cancelled() => {
                // That it has come to nothing, and that there may be another daemon soon, is worth a word.
                let words = last_words(call::stopped(StopReason::ShuttingDown));
                let _ = tokio::time::timeout(limits.hello_time(), writer.write_all(&words)).await;
                return Ok(());
            }
        };
        let agreed = hello.and_then(|theirs| Ok((negotiate(&Hello::ours(), &theirs)?, theirs)));
        let (version, theirs) = match agreed {
            Ok(agreed) => agreed,
            Err(error) => {
                let error = match error {
                    WireError::Io(io) if io.kind() == std::io::ErrorKind::TimedOut => {
                        SessionError::HelloTimeout { limit: limits.hello_time() }
                    }
                    other => other.into(),
                };
                let words = say_hello_and(&mut writer, Some(error.to_body()));
                let _ = tokio::time::timeout(limits.hello_time(), words).await;
                return Err(error);
            }
        };
        say_hello_and(&mut writer, None).await?;
        let frame_bytes_max = theirs.frame_bytes_max.min(FRAME_BYTES_MAX);
        let session_id = self.next_id();
        let account = self.service.session_began(actor, session_id).await;
        let _ended = Ended { service: &*self.service, session_id };
        // Of a user that comes for the first time its class is known by now.
        if permit.n() > n_max() {
            let error = too_many(n_max());
            let fault = say_fault(&mut writer, error.to_body());
            let _ = tokio::time::timeout(limits.hello_time(), fault).await;
            return Err(error);
        }
        let shutdown_of_guests = shutdown.clone();
        let client =
            ConnectedClient { actor, version, session_id, frame_bytes_max, shutdown: shutdown_of_guests };
        let reader = FrameReader::new(reader, FRAME_BYTES_MAX).paid_by(BufferCharge::new(&account));
        Connection::new(self.clone(), client, account).serve(reader, writer, shutdown).await
    }
}

/// Tells the service that a session is over, however it ends.
struct Ended<'a, S: Service> {
    service: &'a S,
    session_id: u64,
}

impl<S: Service> Drop for Ended<'_, S> {
    fn drop(&mut self) {
        self.service.session_ended(self.session_id);
    }
}

/// What a client is told that is not served: a hello, and why.
pub(crate) fn last_words(error: ErrorBody) -> Vec<u8> {
    let mut words = Vec::new();
    // Nothing makes this wait, and nothing there is too large.
    let _ = say_hello_and(&mut words, Some(error)).now_or_never();
    words
}

/// Even a client that is turned away learns the versions that this daemon speaks, and the reason in a frame.
async fn say_hello_and<W>(writer: &mut W, error: Option<ErrorBody>) -> Result<(), WireError>
where
    W: AsyncWrite + Unpin,
{
    Hello::ours().write(writer).await?;
    match error {
        Some(error) => say_fault(writer, error).await,
        None => Ok(()),
    }
}

async fn say_fault<W>(writer: &mut W, error: ErrorBody) -> Result<(), WireError>
where
    W: AsyncWrite + Unpin,
{
    let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
    frames.push(&ServerMessage::Fault { error })?;
    frames.write(writer).await
}
