use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::Stream;
use tokio::sync::mpsc;
use trellis_wire::{
    Call, ClientMessage, Event, GuestUsage, OUTPUT_CREDIT_BYTES_MAX, Room, Start, VERSION_OF_MODELS,
};

use crate::calls::{ask, done};
use crate::client::{Client, Handle};
use crate::connection::News;
use crate::error::{Error, Lost};
use crate::launch::Launch;
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
    state: StreamState,
    usage: Option<GuestUsage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamState {
    Running,
    Over,
}

impl Client {
    /// Starts a guest. A component is uploaded only if the daemon does not hold it; that, and compiling it, are
    /// reported as [`Event::Progress`]. What the daemon has to say against the guest comes as the stream's last item.
    ///
    /// # Errors
    /// The connection is lost, the arguments do not fit in a frame, or a model is named and the daemon is too old for that.
    pub async fn start(&self, program: Program, options: StartOptions) -> Result<Guest, Error> {
        let (start, component) = self.prepare(program, options)?;
        let window_bytes = usize::try_from(start.credit_bytes).unwrap_or(usize::MAX);
        self.launch(Call::Start(start), component, window_bytes).await
    }

    /// What a start sends, and the component that may have to be uploaded for it.
    pub(crate) fn prepare(
        &self,
        program: Program,
        options: StartOptions,
    ) -> Result<(Start, Option<Component>), Error> {
        if options.model.is_some() {
            self.check_version("run a guest on a model of the client's choice", VERSION_OF_MODELS)?;
        }
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
            model: options.model,
            seed: options.seed,
            credit_bytes: window_bytes as u64,
            deadline_ms: options.deadline.map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
            label: options.label,
            is_recorded: options.is_recorded,
            is_profiled: options.is_profiled,
        };
        Ok((start, component))
    }

    /// Asks for something that a guest's events come of.
    pub(crate) async fn launch(
        &self,
        call: Call,
        component: Option<Component>,
        window_bytes: usize,
    ) -> Result<Guest, Error> {
        let launch = Launch::new(call, component);
        let (sender, news) = mpsc::unbounded_channel();
        self.connection().outbox.room(Room::Bulk).await;
        launch.start(self.connection(), &sender)?;
        let handle = self.handle.clone();
        Ok(Guest {
            handle,
            launch,
            news,
            window_bytes,
            n_read_bytes: 0,
            state: StreamState::Running,
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
        self.handle.connection.cancel_guest(&self.launch);
    }

    /// A handle that sends messages, or cancels, while the stream is read.
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
                    && self.window_bytes - self.n_read_bytes.min(self.window_bytes) < OUTPUT_CREDIT_BYTES_MAX
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
        if self.state == StreamState::Over {
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
                self.state = StreamState::Over;
                self.usage = usage;
                Poll::Ready(result.err().map(Err))
            }
            None => {
                self.state = StreamState::Over;
                Poll::Ready(Some(Err(Error::ConnectionLost(Lost::Closed))))
            }
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Closed first: a start that is being repeated after an upload asks for nothing once it sees this.
        self.news.close();
        self.handle.connection.forget_guest(&self.launch);
    }
}

/// Talks to a guest from elsewhere than where its stream is read. It does not keep the guest alive.
#[derive(Clone, Debug)]
pub struct GuestSender {
    handle: Arc<Handle>,
    launch: Arc<Launch>,
}

impl GuestSender {
    /// Sends a message to the guest, and waits until the guest runs and its inbox has room.
    ///
    /// # Errors
    /// The guest has ended, the message is too large, or the connection is lost. What ended the guest is the error if it may be
    /// tried again.
    pub async fn send(&self, text: impl Into<String>) -> Result<(), Error> {
        let to = self.launch.running().await?;
        done(ask(&self.handle.connection, Call::Message { to, text: text.into() }).await?)
    }

    /// Asks the daemon to end the guest, as [`Guest::cancel`].
    pub fn cancel(&self) {
        self.handle.connection.cancel_guest(&self.launch);
    }

    /// Tells the guest that no more messages will come.
    ///
    /// # Errors
    /// The guest has ended, or the connection is lost. What ended the guest is the error if it may be tried again.
    pub async fn end_messages(&self) -> Result<(), Error> {
        let id = self.launch.running().await?;
        self.handle.connection.send(&ClientMessage::EndMessages { id });
        Ok(())
    }
}
