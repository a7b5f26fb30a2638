use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use futures_util::Stream;
use tokio::sync::{Notify, mpsc, watch};
use trellis_wire::{Call, ClientMessage, Event, GuestUsage, OUTPUT_BYTES_MAX, Start};

use crate::calls::{ask, done};
use crate::client::{Client, Handle};
use crate::connection::{Connection, News, Slot};
use crate::error::{Error, Lost};
use crate::program::{Program, StartOptions};
use crate::upload::Component;

/// A guest under way: a stream of what it sends, which ends when the guest does. Dropping it cancels the guest.
#[derive(Debug)]
pub struct Guest {
    handle: Arc<Handle>,
    launch: Arc<Launch>,
    news: mpsc::UnboundedReceiver<News>,
    window_bytes: usize,
    /// Bytes read and not yet given back as credit.
    n_read_bytes: usize,
    progress: Progress,
    usage: Option<GuestUsage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Running,
    Over,
}

/// How a guest is started, and which request runs it. After an upload that is another one than at first.
#[derive(Debug)]
pub(crate) struct Launch {
    start: Start,
    component: Mutex<Option<Component>>,
    phase: watch::Sender<Phase>,
    /// Set before the id is looked at, and looked at after the id is set: a cancel between two requests, while the
    /// daemon knows of none that it could cancel, is not lost.
    is_cancelled: AtomicBool,
    /// Heard by the upload between two requests.
    cancelled: Notify,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Waiting { id: Option<u64> },
    Started { id: u64 },
    Ended,
}

impl Launch {
    pub(crate) fn start(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        news: &mpsc::UnboundedSender<News>,
    ) -> Result<(), Error> {
        let slot = Slot::Guest { news: news.clone(), launch: self.clone() };
        let id = connection.request(Call::Start(self.start.clone()), slot)?;
        // The daemon may already have answered.
        self.phase.send_if_modified(|phase| {
            let is_waiting = matches!(phase, Phase::Waiting { .. });
            if is_waiting {
                *phase = Phase::Waiting { id: Some(id) };
            }
            is_waiting
        });
        if news.is_closed() {
            connection.cancel(id);
        } else if self.is_cancelled.load(Ordering::SeqCst) {
            connection.send(&ClientMessage::Cancel { id });
        }
        Ok(())
    }

    pub(crate) fn take_component(&self) -> Option<Component> {
        self.component.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn started(&self, id: u64) {
        self.phase.send_replace(Phase::Started { id });
    }

    pub(crate) fn ended(&self) {
        self.phase.send_replace(Phase::Ended);
    }

    pub(crate) async fn cancelled(&self) {
        self.cancelled.notified().await;
    }

    fn request_id(&self) -> Option<u64> {
        match *self.phase.borrow() {
            Phase::Waiting { id } => id,
            Phase::Started { id } => Some(id),
            Phase::Ended => None,
        }
    }

    /// The request that runs the guest, once it runs.
    async fn running(&self) -> Result<u64, Error> {
        let mut phase = self.phase.subscribe();
        let phase = phase.wait_for(|phase| !matches!(phase, Phase::Waiting { .. })).await;
        match phase.as_deref() {
            Ok(Phase::Started { id }) => Ok(*id),
            _ => Err(Error::GuestEnded),
        }
    }
}

impl Client {
    /// Starts a guest. A component is uploaded only if the daemon does not hold it; that, and compiling it, are
    /// reported as [`Event::Progress`]. What the daemon has to say against the guest comes as the stream's last item.
    ///
    /// # Errors
    /// The connection is lost, or the arguments do not fit in a frame.
    pub async fn start(&self, program: Program, options: StartOptions) -> Result<Guest, Error> {
        let (program, component) = match program {
            Program::Named(name) => (trellis_wire::Program::Named { name }, None),
            Program::Wasm(bytes) => {
                let component = Component::new(bytes);
                (trellis_wire::Program::Component { hash: component.hash }, Some(component))
            }
        };
        let window_bytes = options.window_bytes.max(StartOptions::WINDOW_BYTES_MIN);
        let start = Start {
            program,
            arguments: options.arguments,
            seed: options.seed,
            credit_bytes: window_bytes as u64,
            deadline_ms: options.deadline.map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
        };
        let phase = watch::Sender::new(Phase::Waiting { id: None });
        let launch = Arc::new(Launch {
            start,
            component: Mutex::new(component),
            phase,
            is_cancelled: AtomicBool::new(false),
            cancelled: Notify::new(),
        });
        let (sender, news) = mpsc::unbounded_channel();
        self.connection().outbox.room().await;
        launch.start(self.connection(), &sender)?;
        let handle = self.handle.clone();
        Ok(Guest {
            handle,
            launch,
            news,
            window_bytes,
            n_read_bytes: 0,
            progress: Progress::Running,
            usage: None,
        })
    }
}

impl Guest {
    /// The next event; `None` after the guest's end. An error is the last item.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await
    }

    /// All text that is still to come, once the guest has ended.
    ///
    /// # Errors
    /// The guest did not end well; the text is lost.
    pub async fn text(mut self) -> Result<String, Error> {
        let mut all = String::new();
        while let Some(event) = self.next().await {
            if let Event::Text { text } = event? {
                all.push_str(&text);
            }
        }
        Ok(all)
    }

    /// Waits for the end and passes over what comes before it.
    ///
    /// # Errors
    /// The guest did not end well.
    pub async fn wait(&mut self) -> Result<(), Error> {
        while let Some(event) = self.next().await {
            event?;
        }
        Ok(())
    }

    /// What the guest used; known once the stream has ended.
    #[must_use]
    pub fn usage(&self) -> Option<&GuestUsage> {
        self.usage.as_ref()
    }

    /// Asks the daemon to end the guest. Unlike dropping, this leaves the stream to be read until its end.
    pub fn cancel(&self) {
        self.launch.is_cancelled.store(true, Ordering::SeqCst);
        self.launch.cancelled.notify_one();
        if let Some(id) = self.launch.request_id() {
            self.handle.connection.send(&ClientMessage::Cancel { id });
        }
    }

    /// A handle that sends messages while the stream is read.
    #[must_use]
    pub fn sender(&self) -> GuestSender {
        GuestSender { handle: self.handle.clone(), launch: self.launch.clone() }
    }

    /// Sends a message to the guest, as [`GuestSender::send`].
    ///
    /// # Errors
    /// As [`GuestSender::send`].
    pub async fn send(&self, text: impl Into<String>) -> Result<(), Error> {
        self.sender().send(text).await
    }

    /// Tells the guest that no more messages will come, as [`GuestSender::end_messages`].
    ///
    /// # Errors
    /// As [`GuestSender::end_messages`].
    pub async fn end_messages(&self) -> Result<(), Error> {
        self.sender().end_messages().await
    }

    /// Gives credit back in large pieces, so that it costs nothing for each token; but when the reader has seen
    /// everything, the window must have room for the largest output.
    fn refill(&mut self, queue: Queue) {
        let is_due = match queue {
            Queue::Waiting => self.n_read_bytes >= self.window_bytes.div_ceil(2),
            Queue::Empty => {
                self.n_read_bytes > 0
                    && self.window_bytes - self.n_read_bytes.min(self.window_bytes) < OUTPUT_BYTES_MAX
            }
        };
        if is_due && let Some(id) = self.launch.request_id() {
            let n_bytes = std::mem::take(&mut self.n_read_bytes) as u64;
            self.handle.connection.send(&ClientMessage::Credit { id, n_bytes });
        }
    }
}

enum Queue {
    Waiting,
    Empty,
}

impl Stream for Guest {
    type Item = Result<Event, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.progress == Progress::Over {
            return Poll::Ready(None);
        }
        let next = self.news.poll_recv(cx);
        if next.is_pending() {
            self.refill(Queue::Empty);
        }
        match ready!(next) {
            Some(News::Event(event)) => {
                self.n_read_bytes += event.credit_bytes();
                self.refill(Queue::Waiting);
                Poll::Ready(Some(Ok(event)))
            }
            Some(News::End { result, usage }) => {
                self.progress = Progress::Over;
                self.usage = usage;
                Poll::Ready(result.err().map(Err))
            }
            None => {
                self.progress = Progress::Over;
                Poll::Ready(Some(Err(Error::ConnectionLost(Lost::Closed))))
            }
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Closed first: a start that is being repeated after an upload looks at this once it has its id.
        self.news.close();
        if let Some(id) = self.launch.request_id() {
            self.handle.connection.cancel(id);
        }
    }
}

/// Sends messages to a guest. It does not keep the guest alive.
#[derive(Clone, Debug)]
pub struct GuestSender {
    handle: Arc<Handle>,
    launch: Arc<Launch>,
}

impl GuestSender {
    /// Sends a message to the guest, and waits until the guest runs and its inbox has room.
    ///
    /// # Errors
    /// The guest has ended, the message is too large, or the connection is lost.
    pub async fn send(&self, text: impl Into<String>) -> Result<(), Error> {
        let to = self.launch.running().await?;
        done(ask(&self.handle.connection, Call::Message { to, text: text.into() }).await?)
    }

    /// Tells the guest that no more messages will come.
    ///
    /// # Errors
    /// The guest has ended.
    pub async fn end_messages(&self) -> Result<(), Error> {
        let id = self.launch.running().await?;
        self.handle.connection.send(&ClientMessage::EndMessages { id });
        Ok(())
    }
}
