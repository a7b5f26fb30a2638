//! Reading a detached guest over connections that are lost.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use trellis_wire::{Event, GuestUsage};

use crate::attached::Attached;
use crate::client::Client;
use crate::error::{Error, Lost};
use crate::guest::GuestSender;
use crate::signs::{Shown, Signs};
use crate::tried::{self, Sockets};

/// The first pause before another connection is tried, and the longest; each is twice the one before.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Time between two looks at how far a daemon is that does not answer.
const LOOK: Duration = Duration::from_millis(500);

/// The reading of a detached guest, as [`Attached`], that connects again when its connection is lost and goes on where it was:
/// each event comes once. Numbers of guests begin anew with each daemon, and those of another daemon than the first are not taken
/// for the guest.
///
/// A daemon that loads models is waited for as long as what it says of that changes ([`Signs`]): the time for which connections are tried
/// begins anew with each change. So is one that lets connections in, or has them wait, and does not answer. One of which several starts
/// come to nothing is waited for no longer ([`N_FAILED_STARTS_MAX`](crate::signs::N_FAILED_STARTS_MAX)). Signs are looked for where
/// connections were tried, as far as [`Client::connect`] or [`Client::connect_to`] makes them in the same task, and where one was made.
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
    /// A connection over which it was asked to read the guest, until that is answered: whoever drops a future meanwhile asks again over
    /// this one, in whose order that comes last. Over another it could come first, and be taken over by what nobody waits for.
    asked: Option<Client>,
    attached: Option<Attached>,
    patience: Duration,
    /// Where signs of a daemon are looked for: where the last connection was, and where others were tried since.
    sockets: Sockets,
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

    /// Looks whether to wait on, as the last sign of a daemon is no older than that, or will not be after `next`.
    ///
    /// # Errors
    /// Why not.
    fn look(&mut self, sockets: &[PathBuf], patience: Duration, next: Duration) -> Result<(), Over> {
        let now = Instant::now();
        let shown = self.signs.look(sockets);
        if shown.has_changed {
            (self.since, self.pause) = (now, PAUSE);
        }
        let is_hopeless = shown.is_hopeless();
        let Shown { socket, failing, n_failed_starts, .. } = shown;
        match failing.filter(|_| is_hopeless) {
            Some(socket) => Err(Over::Failing(Error::Failing { socket, n_starts: n_failed_starts })),
            None if now.duration_since(self.since) + next > patience => Err(Over::Silent(socket)),
            None => Ok(()),
        }
    }
}

/// Why nothing more is waited for.
#[derive(Debug)]
enum Over {
    /// Too many starts have come to nothing.
    Failing(Error),
    /// There was no sign for too long. The socket at which a daemon may be, if at any.
    Silent(Option<PathBuf>),
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
            asked: None,
            attached: None,
            patience: Self::PATIENCE,
            sockets: Sockets::default(),
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
    /// item: the guest's end, what [`Client::attach`] refuses, or why there is no connection: the last reason, or [`Error::Silent`] or
    /// [`Error::Failing`] where a daemon is there, or starts, that does not come to answer.
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
    /// What [`Client::attach`] refuses, or why there is no connection, as [`Self::next`] says; the stream is over then.
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
            let error = match self.try_once().await? {
                Ok(attached) => {
                    self.from = Some(attached.next_number());
                    self.daemon = Some(attached.daemon());
                    self.sockets.set(attached.socket());
                    self.attached = Some(attached);
                    self.lost = None;
                    return Ok(());
                }
                Err(error) => error,
            };
            let is_away = matches!(error, Error::NotRunning { .. });
            // Who connects may have waited as well.
            let is_over = matches!(error, Error::Silent { .. } | Error::Failing { .. });
            if is_over || !(error.is_retryable() || is_away) || self.patience.is_zero() {
                return Err(error);
            }
            let sockets = self.sockets.get();
            let wait = self.lost.get_or_insert_with(|| Wait::new(&sockets));
            match wait.look(&sockets, self.patience, wait.pause) {
                Ok(()) => {}
                Err(Over::Failing(failing)) => return Err(failing),
                // One that starts has no socket yet.
                Err(Over::Silent(Some(socket))) if is_away => {
                    return Err(Error::Silent { socket, waited: self.patience });
                }
                Err(Over::Silent(_)) => return Err(error),
            }
            sleep(wait.pause).await;
            wait.pause = (2 * wait.pause).min(PAUSE_MAX);
        }
        Ok(())
    }

    /// Tries to connect and to attach, for as long as it is worth waiting for an answer. Without patience that is as long as it takes.
    ///
    /// # Errors
    /// None has come, and nothing more is waited for.
    async fn try_once(&mut self) -> Result<Result<Attached, Error>, Error> {
        let Self { connect, guest_id, from, daemon, asked, patience, sockets, lost, .. } = self;
        let trying = async {
            let client = match asked.take() {
                Some(client) => client,
                None => connect().await?,
            };
            // One that was connected before is heard of here alone.
            if let Some(socket) = client.socket() {
                tried::note(socket);
            }
            *asked = Some(client.clone());
            let attached = client.attach_to(*guest_id, *from, *daemon).await;
            *asked = None;
            attached
        };
        let mut trying = pin!(sockets.noting(trying));
        if patience.is_zero() {
            return Ok(trying.await);
        }
        let wait = lost.get_or_insert_with(|| Wait::new(&sockets.get()));
        loop {
            if let Ok(tried) = timeout(LOOK, &mut trying).await {
                return Ok(tried);
            }
            let tried = sockets.get();
            match wait.look(&tried, *patience, Duration::ZERO) {
                Ok(()) => {}
                Err(Over::Failing(failing)) => return Err(failing),
                Err(Over::Silent(seen)) => {
                    // Somebody listens there, be it no daemon.
                    return Err(match seen.or_else(|| tried.into_iter().next()) {
                        Some(socket) => Error::Silent { socket, waited: *patience },
                        None => Error::ConnectionLost(Lost::Wire(Arc::new(
                            io::Error::from(io::ErrorKind::TimedOut).into(),
                        ))),
                    });
                }
            }
        }
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
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use futures_util::future::BoxFuture;
    use tempfile::TempDir;
    use tokio::task::JoinHandle;

    use super::*;
    use crate::lock;

    const PATIENCE: Duration = Duration::from_secs(3);

    /// Between two signs.
    const PERIOD: Duration = Duration::from_millis(300);

    const N_SAID: u32 = 15;

    /// A daemon that loads, and says so as often as that; then it stands still.
    fn loads(socket: &Path) -> JoinHandle<File> {
        let mut lock = File::create(lock::path(socket)).expect("a free place");
        lock.try_lock().expect("nobody has it");
        tokio::spawn(async move {
            for percent in 0..N_SAID {
                lock.rewind().expect("it can be written");
                writeln!(lock, "7\nloading big: {percent:02}% of 2.1 GB").expect("written");
                sleep(PERIOD).await;
            }
            lock
        })
    }

    fn at(folder: &TempDir) -> (PathBuf, Resumed<impl FnMut() -> BoxFuture<'static, Result<Client, Error>>>) {
        let socket = folder.path().join("t.sock");
        let to = socket.clone();
        let connect =
            move || -> BoxFuture<'static, Result<Client, Error>> { Box::pin(Client::connect_to(to.clone())) };
        (socket, Resumed::new(7, None, connect).with_patience(PATIENCE))
    }

    #[tokio::test]
    async fn a_daemon_that_loads_is_waited_for_and_one_that_stands_still_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (socket, mut guest) = at(&folder);
        let loads = loads(&socket);
        let begun = Instant::now();
        let error = timeout(100 * PATIENCE, guest.attached()).await.expect("it ends").expect_err("nobody");
        assert!(matches!(&error, Error::Silent { socket: its, .. } if *its == socket), "{error}");
        assert!(begun.elapsed() >= PERIOD * N_SAID, "it came on: {:?}", begun.elapsed());
        drop(loads.await.expect("no panic"));
    }

    #[tokio::test]
    async fn a_daemon_whose_starts_all_fail_is_not_waited_for_for_ever() {
        let folder = tempfile::tempdir().expect("a folder");
        let (socket, mut guest) = at(&folder);
        let path = lock::path(&socket);
        let starts = tokio::spawn(async move {
            for pid in 1.. {
                let mut lock = File::create(&path).expect("it can be made");
                lock.lock().expect("it can be locked");
                writeln!(lock, "{pid}").expect("written");
                sleep(PERIOD).await;
            }
        });
        let error = timeout(100 * PATIENCE, guest.attached()).await.expect("it ends").expect_err("nobody");
        assert!(matches!(&error, Error::Failing { socket: its, n_starts: 3 } if *its == socket), "{error}");
        assert!(error.is_retryable());
        starts.abort();
    }

    #[tokio::test]
    async fn one_that_lets_in_and_never_answers_is_waited_for_no_longer_than_was_said() {
        let folder = tempfile::tempdir().expect("a folder");
        let (socket, mut guest) = at(&folder);
        let _listener = UnixListener::bind(&socket).expect("a free place");
        let begun = Instant::now();
        let error = timeout(100 * PATIENCE, guest.attached()).await.expect("it ends").expect_err("silent");
        assert!(matches!(&error, Error::Silent { socket: its, .. } if *its == socket), "{error}");
        assert!(begun.elapsed() >= PATIENCE);
        assert!(guest.next().await.is_none(), "it was the last item");
    }

    #[tokio::test]
    async fn one_that_loads_behind_a_socket_that_is_kept_for_it_is_waited_for_while_it_comes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let (socket, mut guest) = at(&folder);
        let _listener = UnixListener::bind(&socket).expect("a free place");
        let begun = Instant::now();
        let loads = loads(&socket);
        timeout(100 * PATIENCE, guest.attached()).await.expect("it ends").expect_err("silent");
        assert!(begun.elapsed() >= PERIOD * N_SAID, "it came on: {:?}", begun.elapsed());
        drop(loads.await.expect("no panic"));
    }

    #[tokio::test]
    async fn where_nobody_is_and_nobody_starts_it_is_said_that_none_runs() {
        let folder = tempfile::tempdir().expect("a folder");
        let (_, guest) = at(&folder);
        let mut guest = guest.with_patience(PERIOD);
        let error = timeout(100 * PATIENCE, guest.attached()).await.expect("it ends").expect_err("nobody");
        assert!(matches!(error, Error::NotRunning { .. }), "{error}");
    }
}
