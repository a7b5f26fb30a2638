//! The connection that all handles of one client share: one task reads and writes, all others push into its outbox.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use trellis_wire::{
    Call, ClientMessage, ErrorBody, ErrorCode, Event, FRAME_BYTES_MAX, FrameReader, GuestUsage, Outbox,
    Outcome, ServerMessage, Value,
};

use crate::error::{Error, Lost};
use crate::launch::Launch;
use crate::upload;

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) outbox: Outbox,
    state: Mutex<State>,
    unused: Notify,
}

#[derive(Debug)]
struct State {
    next_id: u64,
    /// In the order in which they were sent, and in which they end with the connection.
    requests: BTreeMap<u64, Recipient>,
    lost: Option<Lost>,
}

/// Where the answers to a request go.
#[derive(Debug)]
pub(crate) enum Recipient {
    Call(oneshot::Sender<Result<Value, Error>>),
    /// A call that tells how far it is: units done, units in all.
    Long {
        reply: oneshot::Sender<Result<Value, Error>>,
        progress: watch::Sender<(u64, u64)>,
    },
    Upload {
        reply: oneshot::Sender<Result<Value, Error>>,
        wanted: Arc<Notify>,
    },
    Guest {
        news: mpsc::UnboundedSender<News>,
        launch: Arc<Launch>,
    },
}

/// What comes for a guest. The queue is bounded by the credit that was granted.
#[derive(Debug)]
pub(crate) enum News {
    Event(Event),
    End { result: Result<(), Error>, usage: Option<GuestUsage> },
}

impl Connection {
    pub(crate) fn new(frame_bytes_max: u32) -> Arc<Self> {
        let state = State { next_id: 1, requests: BTreeMap::new(), lost: None };
        Arc::new(Self {
            outbox: Outbox::new(frame_bytes_max),
            state: Mutex::new(state),
            unused: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request. Ids and frames leave in the same order, as the protocol wants it.
    ///
    /// Which request runs a guest, and whether its client still wants it, change under this lock alone: a cancel is
    /// either seen here, and the guest is not asked for, or finds the request that is about to leave.
    pub(crate) fn request(&self, call: Call, recipient: Recipient) -> Result<u64, Error> {
        let mut state = self.lock();
        if let Some(lost) = &state.lost {
            return Err(Error::ConnectionLost(lost.clone()));
        }
        let id = state.next_id;
        // An id is used up even if the request does not fit in a frame: nothing else may ever be taken for it.
        state.next_id += 1;
        if let Recipient::Guest { news, launch } = &recipient {
            if launch.is_cancelled() || news.is_closed() {
                return Err(cancelled());
            }
            launch.asked(id);
        }
        let request = ClientMessage::Request { id, call };
        self.outbox.push(&request).map_err(|error| Error::Request(Arc::new(error)))?;
        state.requests.insert(id, recipient);
        Ok(id)
    }

    /// Asks the daemon to end a guest; what it still has to say is heard.
    pub(crate) fn cancel_guest(&self, launch: &Launch) {
        let _state = self.lock();
        launch.cancel();
        if let Some(id) = launch.request_id() {
            self.send(&ClientMessage::Cancel { id });
        }
    }

    /// Forgets a guest, whose news are closed already, and asks the daemon to end it.
    pub(crate) fn forget_guest(&self, launch: &Launch) {
        let mut state = self.lock();
        if let Some(id) = launch.request_id() {
            let recipient = state.requests.remove(&id);
            if recipient.is_some() {
                self.send(&ClientMessage::Cancel { id });
            }
        }
    }

    /// Forgets a request and tells the daemon to, unless it has ended by itself.
    pub(crate) fn cancel(&self, id: u64) {
        if self.lock().requests.remove(&id).is_some() {
            self.send(&ClientMessage::Cancel { id });
        }
    }

    /// Sends a message that has no answer. A lost connection is noticed where the answers are.
    pub(crate) fn send(&self, message: &ClientMessage) {
        let pushed = self.outbox.push(message);
        debug_assert!(pushed.is_ok(), "such messages fit in every frame");
    }

    /// Lets the task end once the last handle is gone.
    pub(crate) fn close(&self) {
        self.unused.notify_one();
    }

    /// Reads and writes until the connection ends or its last user is gone.
    pub(crate) async fn drive<T: AsyncRead + AsyncWrite>(self: Arc<Self>, stream: T) {
        let (reader, mut writer) = tokio::io::split(stream);
        let mut frames = FrameReader::new(reader, FRAME_BYTES_MAX);
        let lost = loop {
            tokio::select! {
                biased;
                written = self.outbox.write(&mut writer) => if let Err(error) = written {
                    // The daemon may have said why before it closed; that is worth more.
                    break self.last_words(&mut frames).await.unwrap_or(Lost::Wire(Arc::new(error)));
                },
                message = frames.next() => match message {
                    Ok(Some(message)) => if let Some(lost) = self.dispatch(message) { break lost },
                    Ok(None) => break Lost::Closed,
                    Err(error) => break Lost::Wire(Arc::new(error)),
                },
                () = self.unused.notified() => break Lost::Closed,
            }
        };
        let mut state = self.lock();
        let requests = std::mem::take(&mut state.requests);
        state.lost = Some(lost.clone());
        drop(state);
        // What waits for room to ask for something comes to hear that the connection is lost.
        self.outbox.close();
        for recipient in requests.into_values() {
            end(recipient, Err(Error::ConnectionLost(lost.clone())), None);
        }
    }

    async fn last_words<R: AsyncRead + Unpin>(self: &Arc<Self>, frames: &mut FrameReader<R>) -> Option<Lost> {
        while let Ok(Some(message)) = frames.next().await {
            if let Some(lost) = self.dispatch(message) {
                return Some(lost);
            }
        }
        None
    }

    fn dispatch(self: &Arc<Self>, message: ServerMessage) -> Option<Lost> {
        match message {
            ServerMessage::Event { id, event } => {
                match self.lock().requests.get(&id) {
                    Some(Recipient::Guest { news, launch }) => {
                        if matches!(event, Event::Started { .. } | Event::Attached { .. }) {
                            launch.started(id);
                            // The daemon may not have known the request when it was told.
                            if launch.is_cancelled() {
                                self.send(&ClientMessage::Cancel { id });
                            }
                        }
                        // A task that dropped the receiver is about to cancel.
                        let _ = news.send(News::Event(event));
                    }
                    Some(Recipient::Upload { wanted, .. }) if event == Event::Wanted => wanted.notify_one(),
                    Some(Recipient::Long { progress, .. }) => {
                        if let Event::Progress { done, total, .. } = event {
                            progress.send_replace((done, total));
                        }
                    }
                    Some(Recipient::Upload { .. } | Recipient::Call(_)) | None => {}
                }
            }
            ServerMessage::End { id, outcome, usage } => {
                let recipient = self.lock().requests.remove(&id)?;
                let result = match outcome {
                    Outcome::Ok { value } => Ok(value),
                    Outcome::Error { error } => Err(Error::Daemon(Box::new(error))),
                    Outcome::Unknown => Err(Error::UnknownAnswer),
                };
                self.finish(recipient, result, usage);
            }
            ServerMessage::Fault { error } => return Some(Lost::Fault(Box::new(error))),
            ServerMessage::Unknown => {}
        }
        None
    }

    fn finish(
        self: &Arc<Self>,
        recipient: Recipient,
        result: Result<Value, Error>,
        usage: Option<GuestUsage>,
    ) {
        if let (Recipient::Guest { news, launch }, Err(error)) = (&recipient, &result) {
            let is_unknown = error.code() == Some(&ErrorCode::UnknownComponent);
            if is_unknown && let Some(component) = launch.take_component() {
                tokio::spawn(upload::upload_and_start(self.clone(), component, news.clone(), launch.clone()));
                return;
            }
        }
        end(recipient, result, usage);
    }
}

/// The end of a guest that its client gave up before the daemon was asked for it.
pub(crate) fn cancelled() -> Error {
    Error::Daemon(Box::new(ErrorBody::new(ErrorCode::Cancelled, "cancelled before the guest started")))
}

/// Tells the task that waits for a request that it is over; the task may be gone.
pub(crate) fn end(recipient: Recipient, result: Result<Value, Error>, usage: Option<GuestUsage>) {
    match recipient {
        Recipient::Call(reply) | Recipient::Long { reply, .. } | Recipient::Upload { reply, .. } => {
            let _ = reply.send(result);
        }
        Recipient::Guest { news, launch } => {
            launch.ended(result.as_ref().err());
            let _ = news.send(News::End { result: result.map(|_| ()), usage });
        }
    }
}
