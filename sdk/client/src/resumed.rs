//! Reading a detached guest over connections that are lost.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;
use trellis_wire::{Event, GuestUsage};

use crate::attached::Attached;
use crate::client::Client;
use crate::error::Error;
use crate::guest::GuestSender;
use crate::signs::Signs;
use crate::socket::candidates;

/// The first pause before another connection is tried, and the longest; each is twice the one before.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// The reading of a detached guest, as [`Attached`], that connects again when its connection is lost and goes on where it was:
/// each event comes once. Numbers of guests begin anew with each daemon, and those of another daemon than the first are not taken
/// for the guest.
///
/// A daemon that loads models is waited for as long as what it says of that changes ([`Signs`]): the time for which connections are tried
/// begins anew with each change. One of which several starts come to nothing is waited for no longer
/// ([`N_FAILED_STARTS_MAX`](crate::signs::N_FAILED_STARTS_MAX)).
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
    /// Where signs of a daemon are looked for: where the last connection was, or else where all daemons are.
    sockets: Vec<PathBuf>,
    /// What there is while there is no connection.
    lost: Option<Wait>,
    usage: Option<GuestUsage>,
    is_over: bool,
}

/// The time without a connection.
#[derive(Debug)]
struct Wait {
    /// Since when nothing was seen to come on.
    since: Instant,
    /// Before the next try.
    pause: Duration,
    signs: Signs,
}

impl Wait {
    fn new(sockets: &[PathBuf]) -> Self {
        let mut wait = Self { since: Instant::now(), pause: PAUSE, signs: Signs::default() };
        wait.signs.look(sockets);
        wait
    }

    /// Whether another try is worth it, and comes within so long of the last sign of a daemon.
    fn goes_on(&mut self, sockets: &[PathBuf], patience: Duration) -> bool {
        let now = Instant::now();
        let shown = self.signs.look(sockets);
        if shown.has_changed {
            (self.since, self.pause) = (now, PAUSE);
        }
        !shown.is_hopeless() && now.duration_since(self.since) + self.pause <= patience
    }
}

impl<C, F> Resumed<C>
where
    C: FnMut() -> F,
    F: Future<Output = Result<Client, Error>>,
{
    /// The longest time, by default, for which connections are tried without a sign of a daemon before the last error is given.
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
            sockets: candidates(),
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
                    self.sockets = attached.socket().map(PathBuf::from).into_iter().collect();
                    self.attached = Some(attached);
                    self.lost = None;
                    return Ok(());
                }
                Err(error) => error,
            };
            let may_come = error.is_retryable() || matches!(error, Error::NotRunning { .. });
            if !may_come || self.patience.is_zero() {
                return Err(error);
            }
            let wait = self.lost.get_or_insert_with(|| Wait::new(&self.sockets));
            if !wait.goes_on(&self.sockets, self.patience) {
                return Err(error);
            }
            tokio::time::sleep(wait.pause).await;
            wait.pause = (2 * wait.pause).min(PAUSE_MAX);
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Seek as _, Write as _};

    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::lock;

    const PATIENCE: Duration = Duration::from_millis(500);

    async fn nobody() -> Result<Client, Error> {
        Err(Error::NotRunning { tried: Vec::new() })
    }

    #[tokio::test]
    async fn a_daemon_that_loads_is_waited_for_and_one_that_stands_still_is_not() {
        const N_SAID: u32 = 15;
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("t.sock");
        let mut lock = File::create(lock::path(&socket)).expect("a free place");
        lock.try_lock().expect("nobody has it");
        let loads = tokio::spawn(async move {
            for percent in 0..N_SAID {
                lock.rewind().expect("it can be written");
                writeln!(lock, "7\nloading big: {percent:02}% of 2.1 GB").expect("written");
                sleep(PATIENCE / 5).await;
            }
            lock
        });
        let mut guest = Resumed::new(7, None, nobody).with_patience(PATIENCE);
        guest.sockets = vec![socket];
        let begun = Instant::now();
        let error = timeout(100 * PATIENCE, guest.attached()).await.expect("it ends").expect_err("nobody");
        assert!(matches!(error, Error::NotRunning { .. }), "{error}");
        assert!(begun.elapsed() >= PATIENCE / 5 * N_SAID, "it came on: {:?}", begun.elapsed());
        drop(loads.await.expect("no panic"));
    }

    #[tokio::test]
    async fn a_daemon_whose_starts_all_fail_is_not_waited_for_for_ever() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("t.sock");
        let path = lock::path(&socket);
        let starts = tokio::spawn(async move {
            for pid in 1.. {
                let mut lock = File::create(&path).expect("it can be made");
                lock.lock().expect("it can be locked");
                writeln!(lock, "{pid}").expect("written");
                sleep(PATIENCE / 5).await;
            }
        });
        let mut guest = Resumed::new(7, None, nobody).with_patience(PATIENCE);
        guest.sockets = vec![socket];
        timeout(100 * PATIENCE, guest.attached()).await.expect("it ends").expect_err("nobody");
        starts.abort();
    }
}
