//! One connection: its requests in, their events and ends out.

mod guests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::unconstrained;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use trellis_engine::account::{Account, HostCharge};
use trellis_wire::{
    Call, ClientMessage, ErrorBody, ErrorCode, FrameReader, Outbox, Outcome, ServerMessage, Value, WireError,
};

use super::actor::Actor;
use super::call::{self, Ending};
use super::control::Control;
use super::detached::DetachedGuest;
use super::intake::Intake;
use super::memory::BufferCharge;
use super::service::{LoadRequest, ProgressSink, Service, StopReason};
use super::sessions::{SessionError, Sessions};
use super::turns::Turns;
use super::upload::{self, Desk, Upload};
use crate::guest::InboxSender;
use crate::metrics::TextFormat;
use crate::service::over_host_bytes;

/// What a request under way takes of host memory, beside what it brings.
const REQUEST_BYTES: usize = 1 << 10;

/// Ends of requests after which other tasks have their turn.
const N_ENDS_PER_TURN: usize = 4;

/// Requests under way that a connection does not pay for: who has used up all memory may still look, and stop what holds it.
const N_FREE_REQUESTS: usize = 8;

/// The client at the other end, and what was agreed.
pub(super) struct ConnectedClient {
    pub(super) actor: Actor,
    pub(super) version: u16,
    pub(super) session_id: u64,
    /// The largest frame that the client takes.
    pub(super) frame_bytes_max: u32,
    /// The end of the daemon, up to which detached guests go on.
    pub(super) shutdown: CancellationToken,
}

/// A client's connection, from its hello to its end.
pub(super) struct Connection<S> {
    sessions: Arc<Sessions<S>>,
    actor: Actor,
    version: u16,
    session_id: u64,
    shutdown: CancellationToken,
    outbox: Arc<Outbox>,
    /// What is held for its client.
    account: Arc<Account>,
    /// For requests under way.
    paid: HostCharge,
    /// Those of its user.
    turns: Arc<Turns>,
    last_id: u64,
    /// In the order in which they came, and in which they are stopped.
    requests: BTreeMap<u64, Request>,
    running: FuturesUnordered<BoxFuture<'static, (u64, Ending)>>,
    phase: Phase,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Open,
    ShuttingDown { until: Instant },
}

impl Phase {
    /// Waits for the end of the phase.
    async fn over(self, shutdown: &CancellationToken) {
        match self {
            Self::Open => shutdown.cancelled().await,
            Self::ShuttingDown { until } => tokio::time::sleep_until(until).await,
        }
    }
}

/// A request under way.
enum Request {
    Uploading {
        control: Arc<Control>,
        chunks: mpsc::UnboundedSender<Vec<u8>>,
    },
    Running(Arc<Control>),
    /// A request that takes the daemon down, or puts another in its place. Its own success is no reason to refuse it.
    Shutdown(Arc<Control>),
    /// A message that waits for room in an inbox.
    Message {
        control: Arc<Control>,
        n_bytes: usize,
    },
    Guest {
        control: Arc<Control>,
        inbox: Option<InboxSender>,
    },
    /// The reader of a detached guest.
    Attached {
        control: Arc<Control>,
        guest: Arc<DetachedGuest>,
    },
}

impl Request {
    /// Bytes of the message that it holds.
    fn message_bytes(&self) -> usize {
        match self {
            Self::Message { n_bytes, .. } => *n_bytes,
            Self::Uploading { .. }
            | Self::Running(_)
            | Self::Shutdown(_)
            | Self::Guest { .. }
            | Self::Attached { .. } => 0,
        }
    }
}

impl<S: Service> Connection<S> {
    /// One without requests. What is held for its client is charged to `account`.
    pub(super) fn new(sessions: Arc<Sessions<S>>, client: ConnectedClient, account: Arc<Account>) -> Self {
        let ConnectedClient { actor, version, session_id, frame_bytes_max, shutdown } = client;
        let turns = sessions.turns.of(actor.uid);
        Self {
            sessions,
            actor,
            version,
            session_id,
            shutdown,
            outbox: Arc::new(Outbox::paid_by(frame_bytes_max, BufferCharge::new(&account))),
            paid: HostCharge::none(&account),
            account,
            turns,
            last_id: 0,
            requests: BTreeMap::new(),
            running: FuturesUnordered::new(),
            phase: Phase::Open,
        }
    }

    /// Serves the client until it leaves, breaks the protocol, or `shutdown` is cancelled.
    ///
    /// # Errors
    /// The client broke the protocol, or the connection failed; it has been told if it listens.
    pub(super) async fn serve<R, W>(
        mut self,
        reader: FrameReader<R>,
        mut writer: W,
        shutdown: CancellationToken,
    ) -> Result<(), SessionError>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let intake = Intake::new(reader, &self.turns);
        let result = self.exchange(intake, &mut writer, &shutdown).await;
        self.stop_all(StopReason::Disconnected);
        let last_word = match &result {
            Err(SessionError::Wire(WireError::Io(_))) | Ok(Parting::ClientLeft) => None,
            Err(error) => Some(error.to_body()),
            Ok(Parting::ShuttingDown) => Some(call::stopped(StopReason::ShuttingDown)),
        };
        let (limit, ends_by) = (self.sessions.limits().stop_time(), self.sessions.ends_by());
        let say = async {
            if let Some(error) = last_word {
                // A client that does not take it in time does without.
                let said = say_last(&self.outbox, error, &mut writer);
                let _ = tokio::time::timeout_at(ends_by.at_most(limit), said).await;
            }
        };
        // Each stop has this timeout of its own; what is left after twice that is dropped, which stops it, too.
        let rest = async { while self.running.next().await.is_some() {} };
        let rest = tokio::time::timeout_at(ends_by.at_most(2 * limit), rest);
        let _ = tokio::join!(rest, say);
        result.map(|_| ())
    }

    /// `intake` goes with this: a turn of the user's is not held while the connection is taken down.
    async fn exchange<R, W>(
        &mut self,
        mut intake: Intake<R>,
        writer: &mut W,
        shutdown: &CancellationToken,
    ) -> Result<Parting, SessionError>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut n_ends = 0_usize;
        loop {
            if let Phase::ShuttingDown { .. } = self.phase
                && self.requests.is_empty()
                && self.outbox.is_empty()
            {
                return Ok(Parting::ShuttingDown);
            }
            // A client that does not read is heard all the same: it may cancel, and grant credit. Only its requests wait,
            // since their answers would add to what it does not read: what the outbox holds is bounded by the room for
            // answers, and one answer to each request that was in flight when that was used up.
            //
            // Guests that send without end use up the task's budget. Outside the budget, the socket still has its turn.
            tokio::select! {
                biased;
                Some((id, ending)) = self.running.next() => {
                    self.end(id, ending);
                    n_ends += 1;
                    // A user may have hundreds of connections, with hundreds of requests each that end at once.
                    if n_ends.is_multiple_of(N_ENDS_PER_TURN) {
                        tokio::task::yield_now().await;
                    }
                }
                written = unconstrained(self.outbox.write(writer)) => written?,
                message = unconstrained(intake.next(&self.outbox)) => {
                    let Some(message) = message? else { return Ok(Parting::ClientLeft) };
                    self.handle(message)?;
                    intake.rest().await;
                }
                () = self.phase.over(shutdown) => match self.phase {
                    Phase::Open => {
                        let limit = 2 * self.sessions.limits().stop_time();
                        self.phase = Phase::ShuttingDown { until: self.sessions.ends_by().before_the_last(limit) };
                        self.stop_all(StopReason::ShuttingDown);
                    }
                    Phase::ShuttingDown { .. } => {
                        let ids: Vec<_> = self.requests.keys().copied().collect();
                        for id in ids {
                            self.end(id, Err(call::stopped(StopReason::ShuttingDown)).into());
                        }
                        return Ok(Parting::ShuttingDown);
                    }
                },
            }
        }
    }

    fn handle(&mut self, message: ClientMessage) -> Result<(), SessionError> {
        match message {
            ClientMessage::Request { id, call } => {
                if id <= self.last_id {
                    return Err(SessionError::StaleId { id, last_id: self.last_id });
                }
                self.last_id = id;
                if let Err(error) = self.begin(id, call) {
                    self.pay_for_fewer();
                    self.send_end(id, Err(error).into());
                }
            }
            ClientMessage::Cancel { id } => self.stop(id, StopReason::Cancelled),
            ClientMessage::Credit { id, n_bytes } => {
                if let Some(Request::Guest { control, .. } | Request::Attached { control, .. }) =
                    self.requests.get(&id)
                {
                    control.grant(n_bytes, self.sessions.guest_limits.output_bytes_in_flight as u64);
                }
            }
            ClientMessage::Chunk { id, bytes } => {
                if let Some(Request::Uploading { chunks, .. }) = self.requests.get(&id) {
                    // An upload that has ended takes no more; its end is on its way.
                    let _ = chunks.send(bytes);
                }
            }
            ClientMessage::EndMessages { id } => match self.requests.get_mut(&id) {
                Some(Request::Guest { inbox, .. }) => *inbox = None,
                Some(Request::Attached { guest, .. }) => guest.end_messages(),
                _ => {}
            },
            ClientMessage::Acknowledge { guest_id, until } => self.acknowledge(guest_id, until),
            ClientMessage::Unknown => {
                tracing::debug!(session = self.session_id, "skipped an unknown message")
            }
        }
        Ok(())
    }

    fn begin(&mut self, id: u64, call: Call) -> Result<(), ErrorBody> {
        if let Phase::ShuttingDown { .. } = self.phase {
            return Err(call::stopped(StopReason::ShuttingDown));
        }
        let is_work =
            matches!(call, Call::Start(_) | Call::StartDetached(_) | Call::Upload { .. } | Call::Load { .. });
        if is_work && self.sessions.work.is_closed() {
            return Err(call::drains());
        }
        let n_requests_max = self.sessions.limits().n_requests;
        if self.requests.len() >= n_requests_max {
            let n_requests = self.requests.len() as u64 + 1;
            return Err(ErrorBody::over_limit("requests in flight", n_requests, n_requests_max as u64));
        }
        self.pay_for(self.requests.len() + 1)?;
        let service = self.sessions.service.clone();
        let (actor, version) = (self.actor, self.version);
        match call {
            Call::Start(start) => self.begin_start(id, start)?,
            Call::StartDetached(start) => self.begin_detached(id, start)?,
            Call::Attach(attach) => self.begin_attached(id, &attach)?,
            Call::Upload { hash, n_bytes } => {
                let component_bytes_max = self.sessions.guest_limits.component_bytes as u64;
                let upload = Upload::begin(hash, n_bytes, component_bytes_max)?;
                self.begin_upload(id, upload);
            }
            Call::Message { to, text } => self.begin_message(id, to, text)?,
            Call::Models => {
                self.answer(
                    id,
                    async move { service.models(actor).await.map(|models| Value::Models { models }) },
                )
            }
            Call::Guests => {
                let sessions = self.sessions.clone();
                self.answer(id, async move {
                    let mut guests = service.guests(actor).await?;
                    sessions.detached.mark(actor, &mut guests);
                    Ok(Value::Guests { guests })
                });
            }
            Call::Limits => {
                let sessions = self.sessions.clone();
                self.answer(id, async move {
                    let used = sessions.used(actor);
                    service.limits(actor, used).await.map(|limits| Value::Limits { limits })
                });
            }
            Call::Metrics => {
                let sessions = self.sessions.clone();
                self.answer(id, async move {
                    let text = sessions.metrics(Some(actor)).await?.text(TextFormat::Prometheus);
                    Ok(Value::Metrics { text })
                });
            }
            // It may wait for as long as the client likes, so that it takes no turn.
            Call::Logs(asked) => {
                self.run(
                    id,
                    async move { service.logs(actor, asked).await.map(|logs| Value::Logs { logs }) },
                );
            }
            Call::Info => {
                let sessions = self.sessions.clone();
                self.answer(id, async move {
                    let mut info = Box::new(service.info(actor).await?);
                    if sessions.work.is_closed() && info.failure.is_none() {
                        info.state = Some("draining".to_owned());
                    }
                    Ok(Value::Info { info })
                });
            }
            Call::Load { model, device } => {
                let (progress, states) = ProgressSink::new();
                let request = LoadRequest { model, device };
                let load = async move {
                    let model = service.load(actor, request, progress).await?;
                    Ok(call::told(Value::Loaded { model }, version))
                };
                let control = Arc::new(Control::default());
                self.requests.insert(id, Request::Running(control.clone()));
                let load = call::run_telling(id, self.outbox.clone(), control, load, states);
                self.work(id, load);
            }
            Call::Unload { model, drain_ms } => {
                let drain = drain_ms.map(Duration::from_millis);
                self.run(id, async move {
                    let default_model = service.unload(actor, model, drain).await?;
                    Ok(call::told(Value::Unloaded { default_model }, version))
                });
            }
            Call::Fit { model, device } => {
                let request = LoadRequest { model, device };
                self.run(id, async move {
                    service.fit(actor, request).await.map(|fit| Value::Fit { fit: Box::new(fit) })
                });
            }
            Call::Stop { guest_id } => {
                let turns = self.turns.clone();
                self.run(id, async move {
                    let _turn = turns.stops.acquire().await;
                    service.stop(actor, guest_id).await.map(|()| Value::Done)
                });
            }
            Call::Reload => {
                self.run(id, async move {
                    service.reload(actor).await.map(|info| Value::Reloaded { info: Box::new(info) })
                });
            }
            Call::Upgrade { program } => {
                self.take_down(id, async move {
                    let info = service.upgrade(actor, program).await?;
                    Ok(Value::Upgrading { info: Box::new(info) })
                });
            }
            Call::Shutdown => {
                self.take_down(id, async move { service.shutdown(actor).await.map(|()| Value::Done) });
            }
            Call::Unknown => return Err(unsupported("request")),
        }
        Ok(())
    }

    /// Pays for so many requests under way in the place of those before.
    fn pay_for(&mut self, n_requests: usize) -> Result<(), ErrorBody> {
        // Guests are paid for as they start; whoever has many may still look after them.
        let n_guests = self.requests.values().filter(|it| matches!(it, Request::Guest { .. })).count();
        let n_paid = n_requests.saturating_sub(n_guests).saturating_sub(N_FREE_REQUESTS);
        let n_bytes = n_paid * REQUEST_BYTES;
        self.paid.resize(n_bytes as u64).map_err(|exceeded| over_host_bytes(&exceeded))
    }

    /// Pays for the requests that are left.
    fn pay_for_fewer(&mut self) {
        // What becomes less is paid for.
        let _ = self.pay_for(self.requests.len());
    }

    fn begin_upload(&mut self, id: u64, upload: Upload) {
        let control = Arc::new(Control::default());
        let (chunks, receiver) = mpsc::unbounded_channel();
        let desk = Desk {
            id,
            actor: self.actor,
            outbox: self.outbox.clone(),
            control: control.clone(),
            uploads: self.sessions.uploads.clone(),
            account: self.account.clone(),
            idle_timeout: self.sessions.limits().upload_idle_time(),
        };
        self.requests.insert(id, Request::Uploading { control, chunks });
        let upload = upload::run(desk, self.sessions.service.clone(), upload, receiver);
        self.work(id, upload);
    }

    /// Has something done for which a daemon that is about to go down waits.
    fn work(&mut self, id: u64, work: impl Future<Output = Ending> + Send + 'static) {
        let work = self.sessions.work.track_future(work);
        self.running.push(work.map(move |ending| (id, ending)).boxed());
    }

    fn run<F>(&mut self, id: u64, call: F)
    where
        F: Future<Output = Result<Value, ErrorBody>> + Send + 'static,
    {
        let control = Arc::new(Control::default());
        self.requests.insert(id, Request::Running(control.clone()));
        self.running.push(call::run(control, call).map(move |ending| (id, ending)).boxed());
    }

    /// As [`Self::run`], for what takes the daemon down.
    fn take_down<F>(&mut self, id: u64, call: F)
    where
        F: Future<Output = Result<Value, ErrorBody>> + Send + 'static,
    {
        let control = Arc::new(Control::default());
        self.requests.insert(id, Request::Shutdown(control.clone()));
        self.running.push(call::run(control, call).map(move |ending| (id, ending)).boxed());
    }

    /// As [`Self::run`], for what is answered by turns of its user.
    fn answer<F>(&mut self, id: u64, question: F)
    where
        F: Future<Output = Result<Value, ErrorBody>> + Send + 'static,
    {
        let turns = self.turns.clone();
        self.run(id, async move {
            let _turn = turns.questions.acquire().await;
            question.await
        });
    }

    fn stop(&mut self, id: u64, reason: StopReason) {
        match self.requests.get(&id) {
            Some(Request::Shutdown(_)) if reason == StopReason::ShuttingDown => {}
            Some(
                Request::Running(control)
                | Request::Shutdown(control)
                | Request::Uploading { control, .. }
                | Request::Message { control, .. }
                | Request::Guest { control, .. }
                | Request::Attached { control, .. },
            ) => control.stop(reason),
            None => {}
        }
    }

    fn stop_all(&mut self, reason: StopReason) {
        let ids: Vec<_> = self.requests.keys().copied().collect();
        for id in ids {
            self.stop(id, reason);
        }
    }

    fn end(&mut self, id: u64, ending: Ending) {
        if self.requests.remove(&id).is_some() {
            self.pay_for_fewer();
            self.send_end(id, ending);
        }
    }

    fn send_end(&self, id: u64, Ending { outcome, usage }: Ending) {
        let message = ServerMessage::End { id, outcome, usage };
        let Err(error) = self.outbox.push(&message) else { return };
        let ServerMessage::End { outcome, usage, .. } = message else { unreachable!("made above") };
        let (n_bytes, limit) = match error {
            WireError::FrameTooLarge { n_bytes, limit } => (n_bytes as u64, limit as u64),
            _ => (0, 0),
        };
        let error = match outcome {
            Outcome::Error { error } => call::shortened(error),
            _ => ErrorBody::over_limit("answer bytes", n_bytes, limit),
        };
        let pushed = self.outbox.push(&ServerMessage::End { id, outcome: Outcome::Error { error }, usage });
        debug_assert!(pushed.is_ok(), "an error of some hundred bytes fits in every frame");
    }
}

/// Sends what is left and why there will be no more.
async fn say_last<W: AsyncWrite + Unpin>(
    outbox: &Outbox,
    error: ErrorBody,
    writer: &mut W,
) -> Result<(), WireError> {
    outbox.push(&ServerMessage::Fault { error })?;
    outbox.write(writer).await?;
    Ok(writer.shutdown().await?)
}

enum Parting {
    ClientLeft,
    ShuttingDown,
}

fn unsupported(what: &str) -> ErrorBody {
    ErrorBody::new(ErrorCode::Unsupported, format!("this daemon does not know that kind of {what}"))
        .about(what)
}
