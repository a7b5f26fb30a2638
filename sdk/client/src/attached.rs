//! Guests that go on without their connection, and reading them.

use std::time::Duration;

use trellis_wire::{ACKNOWLEDGED_BYTES, Attach, Call, ClientMessage, ErrorCode, Event, GuestUsage};

use crate::client::Client;
use crate::error::Error;
use crate::guest::{Guest, GuestSender};
use crate::program::{Program, StartOptions};

/// How long the last acknowledgement may take to be sent, with what stands before it.
const ACKNOWLEDGE_TIME: Duration = Duration::from_secs(1);

impl Client {
    /// Starts a guest that goes on without this connection, and returns its number once it runs. `progress` hears what has to be
    /// done for that, as [`Event::Progress`]. The daemon keeps what the guest sends, up to a limit at which the guest waits, until a
    /// client of this user has read it ([`Client::attach`]); a guest that none reads for too long is ended. Dropping the future
    /// before the guest runs cancels the start.
    ///
    /// # Errors
    /// What the daemon has to say against the guest, its recording or its profile asked for included
    /// ([`trellis_wire::ErrorCode::InvalidArgument`]); as many run as this user may have
    /// ([`trellis_wire::ErrorCode::LimitExceeded`]); the daemon is of an older version ([`trellis_wire::ErrorCode::Unsupported`]);
    /// or the connection is lost: a guest that runs then is among those that [`Client::ps`] lists.
    pub async fn start_detached(
        &self,
        program: Program,
        options: StartOptions,
        mut progress: impl FnMut(Event),
    ) -> Result<u64, Error> {
        let window_bytes = options.window_bytes;
        let (start, component) = self.prepare(program, options)?;
        let mut starting = self.launch(Call::StartDetached(start), component, window_bytes).await?;
        while let Some(event) = starting.next().await {
            match event? {
                // It runs, whatever becomes of the connection.
                Event::Started { guest_id } => return Ok(guest_id),
                event => progress(event),
            }
        }
        Err(Error::UnknownAnswer)
    }

    /// Reads a detached guest of this user, from the event of this number on, or from the oldest that the daemon has kept. Returns
    /// once the daemon has let it.
    ///
    /// # Errors
    /// This user has no such guest ([`trellis_wire::ErrorCode::UnknownGuest`]); that event is not kept any more
    /// ([`trellis_wire::ErrorCode::OutputLost`], whose limit is the first that is) or still to come; the daemon is of an older
    /// version ([`trellis_wire::ErrorCode::Unsupported`]); or the connection is lost.
    pub async fn attach(&self, guest_id: u64, from: Option<u64>) -> Result<Attached, Error> {
        self.attach_to(guest_id, from, None).await
    }

    /// As [`Self::attach`], to a guest of the daemon that was given this number.
    pub(crate) async fn attach_to(
        &self,
        guest_id: u64,
        from: Option<u64>,
        daemon: Option<u64>,
    ) -> Result<Attached, Error> {
        let window_bytes = StartOptions::default().window_bytes;
        let attach = Attach { guest_id, from, daemon, credit_bytes: window_bytes as u64 };
        let mut guest = self.launch(Call::Attach(attach), None, window_bytes).await?;
        match guest.next().await {
            Some(Ok(Event::Attached { guest_id, from, daemon })) => {
                let client = self.clone();
                let (last, is_over) = (None, false);
                Ok(Attached { guest, guest_id, daemon, next: from, n_read_bytes: 0, client, last, is_over })
            }
            Some(Err(error)) => Err(error),
            Some(Ok(_)) | None => Err(Error::UnknownAnswer),
        }
    }
}

/// The reading of a detached guest: a stream of what it sends, which ends when the guest does, or with
/// [`trellis_wire::ErrorCode::TakenOver`] once another client of the user attaches. Dropping it leaves the guest alone.
#[derive(Debug)]
pub struct Attached {
    guest: Guest,
    guest_id: u64,
    daemon: u64,
    next: u64,
    /// Read and not yet acknowledged, as credit counts it.
    n_read_bytes: usize,
    client: Client,
    /// The last item, once it has come, until it is given.
    last: Option<Option<Result<Event, Error>>>,
    is_over: bool,
}

impl Attached {
    /// The next event; `None` after the guest's end. An error is the last item. What was returned before is taken care of: the
    /// daemon comes to hear that it need not keep it. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        if self.is_over {
            return None;
        }
        if self.n_read_bytes >= ACKNOWLEDGED_BYTES {
            self.acknowledge();
        }
        if self.last.is_none() {
            let event = self.guest.next().await;
            match &event {
                Some(Ok(read)) => {
                    if read.is_numbered() {
                        self.next += 1;
                        self.n_read_bytes += read.credit_bytes();
                    }
                    return event;
                }
                Some(Err(Error::ConnectionLost(_))) => {}
                // What is left is the other reader's to acknowledge.
                Some(Err(error)) if error.code() == Some(&ErrorCode::TakenOver) => {}
                // The guest's end is one more; the daemon passes over it where only the reading has ended.
                Some(Err(_)) | None => {
                    let until = self.next + 1;
                    let message = ClientMessage::Acknowledge { guest_id: self.guest_id, until };
                    self.client.connection().send(&message);
                }
            }
            self.last = Some(event);
        }
        // A program may end with its guest, and the daemon is to hear before that it need not keep the end. One that does not read is
        // not waited for: it forgets the end in its own time.
        let heard = self.client.connection().outbox.written();
        let _ = tokio::time::timeout(ACKNOWLEDGE_TIME, heard).await;
        self.is_over = true;
        self.last.take().flatten()
    }

    /// Tells the daemon that it need not keep what has been read so far; [`Self::next`] does so by itself now and then.
    pub fn acknowledge(&mut self) {
        self.n_read_bytes = 0;
        let message = ClientMessage::Acknowledge { guest_id: self.guest_id, until: self.next };
        self.client.connection().send(&message);
    }

    /// All text that is still to come, once the guest has ended.
    ///
    /// # Errors
    /// The guest did not end well, or another client reads it now; the text is lost.
    pub async fn text(mut self) -> Result<String, Error> {
        let mut all = String::new();
        while let Some(event) = self.next().await {
            if let Event::Text { text } = event? {
                all.push_str(&text);
            }
        }
        Ok(all)
    }

    /// The number of the event that comes next: where another [`Client::attach`] would go on.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// The guest's number.
    #[must_use]
    pub fn guest_id(&self) -> u64 {
        self.guest_id
    }

    /// A number that the daemon was given by chance when it started.
    #[must_use]
    pub fn daemon(&self) -> u64 {
        self.daemon
    }

    /// What the guest used; known once the stream has ended with the guest.
    #[must_use]
    pub fn usage(&self) -> Option<&GuestUsage> {
        self.guest.usage()
    }

    /// A handle that sends messages to the guest while the stream is read; its `cancel` ends the reading and not the guest.
    #[must_use]
    pub fn sender(&self) -> GuestSender {
        self.guest.sender()
    }
}
