//! The connection that all handles of one client share: one task reads and writes, everybody else pushes into
//! its outbox.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, mpsc, oneshot};
use trellis_wire::{
    Call, ClientMessage, ErrorCode, Event, FRAME_BYTES_MAX, FrameReader, GuestUsage, Outbox, Outcome,
    ServerMessage, Value,
};

use crate::error::{Error, Lost};
use crate::guest::Launch;
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
    requests: HashMap<u64, Slot>,
    lost: Option<Lost>,
}

/// Where the answers to a request go.
#[derive(Debug)]
pub(crate) enum Slot {
    Call(oneshot::Sender<Result<Value, Error>>),
    Guest { news: mpsc::UnboundedSender<News>, launch: Arc<Launch> },
}

/// What comes for a guest. The queue is bounded by the credit that was granted.
#[derive(Debug)]
pub(crate) enum News {
    Event(Event),
    End { result: Result<(), Error>, usage: Option<GuestUsage> },
}

impl Connection {
    pub(crate) fn new(frame_bytes_max: u32) -> Arc<Self> {
        let state = State { next_id: 1, requests: HashMap::new(), lost: None };
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
    pub(crate) fn request(&self, call: Call, slot: Slot) -> Result<u64, Error> {
        let mut state = self.lock();
        if let Some(lost) = &state.lost {
            return Err(Error::ConnectionLost(lost.clone()));
        }
        let id = state.next_id;
        let request = ClientMessage::Request { id, call };
        self.outbox.push(&request).map_err(|error| Error::Request(Arc::new(error)))?;
        state.next_id += 1;
        state.requests.insert(id, slot);
        Ok(id)
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

    /// Reads and writes until the connection ends or nobody uses it any more.
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
        for slot in requests.into_values() {
            end(slot, Err(Error::ConnectionLost(lost.clone())), None);
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
                if let Some(Slot::Guest { news, launch }) = self.lock().requests.get(&id) {
                    if matches!(event, Event::Started { .. }) {
                        launch.started(id);
                    }
                    // Who dropped the receiver is about to cancel.
                    let _ = news.send(News::Event(event));
                }
            }
            ServerMessage::End { id, outcome, usage } => {
                let slot = self.lock().requests.remove(&id)?;
                let result = match outcome {
                    Outcome::Ok { value } => Ok(value),
                    Outcome::Error { error } => Err(Error::Daemon(Box::new(error))),
                    Outcome::Unknown => Err(Error::UnknownAnswer),
                };
                self.finish(slot, result, usage);
            }
            ServerMessage::Fault { error } => return Some(Lost::Fault(Box::new(error))),
            ServerMessage::Unknown => {}
        }
        None
    }

    fn finish(self: &Arc<Self>, slot: Slot, result: Result<Value, Error>, usage: Option<GuestUsage>) {
        if let (Slot::Guest { news, launch }, Err(error)) = (&slot, &result) {
            let is_unknown = error.code() == Some(&ErrorCode::UnknownComponent);
            if is_unknown && let Some(component) = launch.take_component() {
                tokio::spawn(upload::upload_and_start(self.clone(), component, news.clone(), launch.clone()));
                return;
            }
        }
        end(slot, result, usage);
    }
}

/// Tells who waits for a request that it is over; nobody may be left to hear it.
pub(crate) fn end(slot: Slot, result: Result<Value, Error>, usage: Option<GuestUsage>) {
    match slot {
        Slot::Call(reply) => {
            let _ = reply.send(result);
        }
        Slot::Guest { news, launch } => {
            launch.ended();
            let _ = news.send(News::End { result: result.map(|_| ()), usage });
        }
    }
}
