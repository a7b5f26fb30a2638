//! Reading a detached guest over connections that are lost.

use std::time::Duration;

use tokio::time::Instant;
use trellis_wire::{Event, GuestUsage};

use crate::attached::Attached;
use crate::client::Client;
use crate::error::Error;
use crate::guest::GuestSender;

/// The first pause before another connection is tried, and the longest; each is twice the one before.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// The reading of a detached guest, as [`Attached`], that connects again when its connection is lost and goes on where it was:
/// each event comes once. Numbers of guests begin anew with each daemon, and those of another daemon than the first are not taken
/// for the guest.
///
/// ```no_run
/// # async fn example(guest_id: u64) -> Result<(), trellis_client::Error> {
/// use trellis_client::{Client, Event, Resumed};
///
/// let mut guest = Resumed::new(guest_id, None, Client::connect);
/// while let Some(event) = guest.next().await {
///     if let Event::Text { text } = event? {
///         print!("{text}");
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Resumed<C> {
    connect: C,
    guest_id: u64,
    from: Option<u64>,
    daemon: Option<u64>,
    attached: Option<Attached>,
    patience: Duration,
    /// Since when there is no connection, and the next pause.
    lost: Option<(Instant, Duration)>,
    usage: Option<GuestUsage>,
    is_over: bool,
}

impl<C, F> Resumed<C>
where
    C: FnMut() -> F,
    F: Future<Output = Result<Client, Error>>,
{
    /// The longest time, by default, for which connections are tried before the last error is given.
    pub const PATIENCE: Duration = Duration::from_secs(60);

    /// Reads from the event of this number on, or from the oldest that is kept; `connect` is called for each connection, the first
    /// included.
    pub fn new(guest_id: u64, from: Option<u64>, connect: C) -> Self {
        Self {
            connect,
            guest_id,
            from,
            daemon: None,
            attached: None,
            patience: Self::PATIENCE,
            lost: None,
            usage: None,
            is_over: false,
        }
    }

    /// The same, with another time for which connections are tried. With none, the first connection is the only one, and its loss
    /// the last item: for who sends messages, of which those on their way are lost with it.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The next event, over another connection where the one before is lost; `None` after the guest's end. An error is the last
    /// item: the guest's end, what [`Client::attach`] refuses, or the last reason why there is no connection.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        while !self.is_over {
            if let Err(error) = self.attached().await {
                return Some(Err(error));
            }
            let Some(attached) = &mut self.attached else { continue };
            let event = attached.next().await;
            match event {
                Some(Ok(event)) => {
                    self.from = Some(attached.next_number());
                    return Some(Ok(event));
                }
                Some(Err(Error::ConnectionLost(lost))) => {
                    self.attached = None;
                    let error = Error::ConnectionLost(lost);
                    if self.patience.is_zero() || !error.is_retryable() {
                        self.is_over = true;
                        return Some(Err(error));
                    }
                }
                end => {
                    self.usage = attached.usage().cloned();
                    self.attached = None;
                    self.is_over = true;
                    return end;
                }
            }
        }
        None
    }

    /// Waits until a connection reads the guest, so that there is a [`Self::sender`] before the first event; after the guest's end
    /// it returns at once. [`Self::next`] does so by itself.
    ///
    /// # Errors
    /// What [`Client::attach`] refuses, or the last reason why there is no connection; the stream is over then.
    pub async fn attached(&mut self) -> Result<(), Error> {
        if self.is_over {
            return Ok(());
        }
        let attached = self.attach().await;
        self.is_over = attached.is_err();
        attached
    }

    /// Sees to it that there is a connection that reads the guest.
    async fn attach(&mut self) -> Result<(), Error> {
        while self.attached.is_none() {
            let error = match self.try_once().await {
                Ok(attached) => {
                    self.from = Some(attached.next_number());
                    self.daemon = Some(attached.daemon());
                    self.attached = Some(attached);
                    self.lost = None;
                    return Ok(());
                }
                Err(error) => error,
            };
            let now = Instant::now();
            let (since, pause) = *self.lost.get_or_insert((now, PAUSE));
            let may_come = error.is_retryable() || matches!(error, Error::NotRunning { .. });
            if !may_come || now.duration_since(since) + pause > self.patience {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
            self.lost = Some((since, (2 * pause).min(PAUSE_MAX)));
        }
        Ok(())
    }

    async fn try_once(&mut self) -> Result<Attached, Error> {
        let client = (self.connect)().await?;
        client.attach_to(self.guest_id, self.from, self.daemon).await
    }

    /// The number of the event that comes next; none before the first connection where none was asked for.
    #[must_use]
    pub fn next_number(&self) -> Option<u64> {
        self.from
    }

    /// What the guest used; known once the stream has ended with the guest.
    #[must_use]
    pub fn usage(&self) -> Option<&GuestUsage> {
        self.usage.as_ref()
    }

    /// As [`Attached::sender`], over the connection that there is; none between two of them.
    #[must_use]
    pub fn sender(&self) -> Option<GuestSender> {
        self.attached.as_ref().map(Attached::sender)
    }
}
