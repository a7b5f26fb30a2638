//! Waiting for a daemon that starts, is replaced by another program, or ends while the next one is to come.
//!
//! - Comes in: where a daemon is looked for, or what one has said that takes on nothing more.
//! - Goes out: a connection; meanwhile, to people, how far the daemon is, as it says itself beside its socket.
//! - A daemon is waited for as long as there is a sign of it ([`Signs`]): it says that it drains, or what it says of its start has
//!   changed.
//! - Must not happen: an end of the wait while a model is being loaded; a wait for a daemon that stands still, or whose starts all fail.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use trellis_client::signs::{Shown, Signs};
use trellis_client::{Client, Error, ErrorBody, ErrorCode, Lost};

use super::connect::{Found, Home, HomeArgs, SocketArgs};
use super::error::CliError;
use super::output::{Format, note, remark};
use super::progress::ProgressDisplay;

/// The longest time without a sign, unless the user says how long.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(120);

/// After so long it is said what is waited for.
const QUIET_TIME: Duration = Duration::from_secs(1);

/// Time between two looks at how far the daemon is.
const LOOK: Duration = Duration::from_millis(500);

/// Time between two tries to find the next daemon.
const PAUSE: Duration = Duration::from_millis(200);

/// One wait, which may be for several daemons one after the other.
#[derive(Debug)]
pub(crate) struct Patience {
    pub(crate) format: Format,
    silence_max: Duration,
    progress: ProgressDisplay,
    /// Those of a daemon that has not answered yet.
    signs: Option<Signs>,
    is_said: bool,
}

impl Patience {
    /// Waits for so long without a sign, or as long as is usual.
    pub(crate) fn new(silence_max: Option<Duration>, format: Format) -> Self {
        Self {
            format,
            silence_max: silence_max.unwrap_or(SILENCE_MAX),
            progress: ProgressDisplay::of_long_work(format),
            signs: None,
            is_said: false,
        }
    }

    /// Connects to the daemon that listens.
    ///
    /// # Errors
    /// None does; or it cannot be talked to, or gives no sign for too long.
    pub(crate) async fn connect(&mut self, socket: &SocketArgs) -> Result<Client, CliError> {
        let mut connecting = pin!(socket.connect_silently());
        let mut pause = QUIET_TIME;
        let connected = loop {
            match timeout(pause, &mut connecting).await {
                Ok(connected) => break connected,
                Err(_) => self.look(&socket.candidates())?,
            }
            pause = LOOK;
        };
        self.progress.finish();
        if connected.is_ok() {
            self.signs = None;
        }
        Ok(connected?)
    }

    /// As [`Self::connect`], where the connection before is lost.
    ///
    /// # Errors
    /// As there, for whom a client waits that would know nothing of ours.
    pub(crate) async fn connect_again(&mut self, socket: &SocketArgs) -> Result<Client, Error> {
        self.connect(socket).await.map_err(|error| match error {
            CliError::Client(error) => error,
            CliError::Silent { socket, waited } => Error::Silent { socket: socket.into(), waited },
            CliError::Failing { socket, n_starts } => Error::Failing { socket: socket.into(), n_starts },
            other => unreachable!("a connection does not fail so: {other}"),
        })
    }

    /// What an error is that ends the wait of a client, whether or not it has come from [`Self::connect_again`].
    pub(crate) fn why(&mut self, error: Error) -> CliError {
        self.progress.finish();
        match error {
            Error::Silent { socket, waited } => {
                CliError::Silent { socket: socket.display().to_string(), waited }
            }
            Error::Failing { socket, n_starts } => {
                CliError::Failing { socket: socket.display().to_string(), n_starts }
            }
            error => error.into(),
        }
    }

    /// Waits until there is a daemon that takes on something, after one that does not any more.
    ///
    /// # Errors
    /// None has come in time, or it does not have the model, of which `last` is said; or it is of no use.
    pub(crate) async fn next(&mut self, args: &HomeArgs, last: Box<ErrorBody>) -> Result<Home, CliError> {
        if !self.is_said {
            self.is_said = true;
            note(self.format, "the daemon is about to go down; waiting for the next one");
        }
        // The one that has said so.
        self.signs = None;
        loop {
            sleep(PAUSE).await;
            let before = self.signs.clone();
            match args.find(self).await {
                Ok(Found::There(home)) => match n_guests_left(&home.client).await {
                    Ok(Some(n)) => {
                        self.signs = None;
                        let line =
                            format!("waiting for the next daemon: {n} guests of this one come to their ends");
                        self.progress.say(&line);
                        continue;
                    }
                    Err(error) if error.is_retryable() || is_away(&error) => {}
                    Ok(None) | Err(_) => {
                        self.progress.finish();
                        return Ok(home);
                    }
                },
                // Who waited for a daemon starts none of its own.
                Ok(Found::Here(_)) => {}
                Ok(Found::Lacking(lacking)) => {
                    self.progress.finish();
                    note(self.format, &lacking);
                    return Err(CliError::NotBegun(last));
                }
                Err(CliError::Client(error)) if error.is_retryable() || is_away(&error) => {}
                Err(error @ (CliError::Silent { .. } | CliError::Failing { .. })) => {
                    return Err(self.not_begun(&error, last));
                }
                Err(error) => return Err(error),
            }
            // One that answers and is of no use gives no sign by that.
            self.signs = self.signs.take().or(before);
            if let Err(error) = self.look(&args.socket.candidates()) {
                return Err(self.not_begun(&error, last));
            }
        }
    }

    /// What the daemon before has said, where the next one has not come, and why.
    fn not_begun(&self, why: &CliError, last: Box<ErrorBody>) -> CliError {
        note(self.format, &why.to_string());
        CliError::NotBegun(last)
    }

    /// Looks how far the daemon is, and says so.
    ///
    /// # Errors
    /// There was no sign for too long, or too many starts have come to nothing.
    fn look(&mut self, sockets: &[PathBuf]) -> Result<(), CliError> {
        let shown = self.signs.get_or_insert_default().look(sockets);
        let (is_silent, is_hopeless) = (shown.silent_for >= self.silence_max, shown.is_hopeless());
        let Shown { said, socket, n_failed_starts, failing, .. } = shown;
        if is_silent || is_hopeless {
            self.progress.finish();
            let socket = failing.filter(|_| is_hopeless).or(socket);
            let socket = socket.or_else(|| sockets.iter().find(|path| path.exists()).cloned());
            let socket = socket.or_else(|| sockets.first().cloned()).unwrap_or_default();
            let socket = socket.display().to_string();
            return Err(match is_hopeless {
                true => CliError::Failing { socket, n_starts: n_failed_starts },
                false => CliError::Silent { socket, waited: self.silence_max },
            });
        }
        if !self.progress.is_drawn() {
            if !self.is_said && self.format == Format::Text {
                remark("waiting for the daemon, which starts or has much to do");
            }
            self.is_said = true;
        }
        self.progress.say(&match said {
            Some(said) => format!("waiting for the daemon: {said}"),
            None => "waiting for the daemon, which starts or has much to do".to_owned(),
        });
        Ok(())
    }
}

/// How many guests a daemon still has, if it takes on nothing more.
async fn n_guests_left(client: &Client) -> Result<Option<u64>, Error> {
    let info = client.info().await?;
    Ok((info.state.as_deref() == Some("draining")).then_some(info.n_guests))
}

/// What a daemon said that takes on nothing more, of a guest or of the whole connection.
///
/// # Errors
/// It is another error.
pub(crate) fn not_begun(error: Error) -> Result<Box<ErrorBody>, Error> {
    match error {
        Error::Daemon(body) | Error::ConnectionLost(Lost::Fault(body))
            if body.code == ErrorCode::ShuttingDown =>
        {
            Ok(body)
        }
        error => Err(error),
    }
}

/// Nobody listens, for now.
pub(crate) fn is_away(error: &Error) -> bool {
    matches!(error, Error::NotRunning { .. } | Error::ConnectionLost(_))
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;
    use trellis_client::Resumed;

    use super::*;
    use crate::cli::error::TRY_AGAIN;
    use crate::ipc::Lock;

    #[tokio::test]
    async fn a_daemon_is_waited_for_as_long_as_it_comes_on_and_no_longer() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sock");
        let lock = Lock::take(&path).expect("nobody has it");
        // It listens, and never answers.
        let _listener = std::os::unix::net::UnixListener::bind(&path).expect("a free place");
        let silence_max = Duration::from_millis(1_500);
        let socket = SocketArgs { socket: Some(path.clone()) };
        let begun = Instant::now();
        let loads = tokio::spawn(async move {
            let note = lock.note().expect("it is open");
            for percent in 0..8 {
                note.say(&format!("loading big: {percent}% of 2.1 GB")).expect("written");
                sleep(silence_max / 4).await;
            }
            lock
        });
        let mut patience = Patience::new(Some(silence_max), Format::Json);
        let silent = patience.connect(&socket).await.expect_err("it never answers");
        assert!(matches!(silent, CliError::Silent { waited, .. } if waited == silence_max), "{silent}");
        assert!(begun.elapsed() >= 2 * silence_max, "it came on: {:?}", begun.elapsed());
        drop(loads.await.expect("no panic"));
    }

    #[tokio::test]
    async fn a_socket_on_which_nobody_listens_hides_no_daemon_that_loads() {
        let folder = tempfile::tempdir().expect("a folder");
        let [stale, loads] = ["stale.sock", "loads.sock"].map(|name| folder.path().join(name));
        drop(std::os::unix::net::UnixListener::bind(&stale).expect("a free place"));
        drop(Lock::take(&stale).expect("nobody has it"));
        let lock = Lock::take(&loads).expect("nobody has it");
        let note = lock.note().expect("it is open");
        let sockets = [stale, loads.clone()];
        let silence_max = Duration::from_millis(50);
        let mut patience = Patience::new(Some(silence_max), Format::Json);
        for percent in 0..3 {
            note.say(&format!("loading big: {percent}% of 2.1 GB")).expect("written");
            patience.look(&sockets).expect("it comes on");
            sleep(silence_max).await;
        }
        let silent = patience.look(&sockets).expect_err("it stands still");
        let its = loads.display().to_string();
        assert!(matches!(&silent, CliError::Silent { socket, .. } if *socket == its), "{silent}");
    }

    #[tokio::test]
    async fn a_daemon_whose_starts_all_fail_is_waited_for_no_longer_than_three() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sock");
        // As a service manager's socket, which stays.
        let _listener = std::os::unix::net::UnixListener::bind(&path).expect("a free place");
        let at = path.clone();
        let starts = tokio::spawn(async move {
            for n_starts in 1.. {
                let lock = Lock::take(&at).expect("nobody has it");
                let note = lock.note().expect("it is open");
                note.say(&format!("loading big: 0% of {n_starts} GB")).expect("written");
                sleep(2 * LOOK).await;
                drop((note, lock));
                sleep(2 * LOOK).await;
            }
        });
        let socket = SocketArgs { socket: Some(path) };
        let mut patience = Patience::new(None, Format::Json);
        let failing = timeout(SILENCE_MAX, patience.connect(&socket)).await.expect("it comes to an end");
        let failing = failing.expect_err("it never answers");
        assert!(matches!(failing, CliError::Failing { n_starts: 3, .. }), "{failing}");
        assert_eq!(failing.exit_code(), TRY_AGAIN);
        starts.abort();
    }

    #[tokio::test]
    async fn who_goes_on_reading_hears_that_a_daemon_is_silent_and_tries_no_more() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).expect("a free place");
        let socket = SocketArgs { socket: Some(path) };
        let mut patience = Patience::new(Some(Duration::from_millis(200)), Format::Json);
        let error = {
            let patience = tokio::sync::Mutex::new(&mut patience);
            let (patience, socket) = (&patience, &socket);
            let connect = || async move { patience.lock().await.connect_again(socket).await };
            let mut guest = Resumed::new(7, None, connect);
            timeout(Duration::from_secs(50), guest.attached()).await.expect("no longer").expect_err("silent")
        };
        assert!(matches!(error, Error::Silent { .. }), "{error}");
        let silent = patience.why(error);
        assert!(matches!(silent, CliError::Silent { .. }), "{silent}");
        assert_eq!(silent.exit_code(), TRY_AGAIN);
        let lost = patience.why(Error::ConnectionLost(Lost::Closed));
        assert!(matches!(lost, CliError::Client(Error::ConnectionLost(_))), "{lost}");
    }

    #[tokio::test]
    async fn starts_that_fail_while_nobody_listens_are_to_be_tried_again_later() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sock");
        let at = path.clone();
        let starts = tokio::spawn(async move {
            loop {
                let lock = Lock::take(&at).expect("nobody has it");
                sleep(LOOK).await;
                drop(lock);
                sleep(LOOK).await;
            }
        });
        let socket = SocketArgs { socket: Some(path.clone()) };
        let mut patience = Patience::new(None, Format::Json);
        let error = {
            let patience = tokio::sync::Mutex::new(&mut patience);
            let (patience, socket) = (&patience, &socket);
            let connect = || async move { patience.lock().await.connect_again(socket).await };
            let mut guest = Resumed::new(7, None, connect).with_patience(SILENCE_MAX);
            timeout(SILENCE_MAX, guest.attached()).await.expect("it comes to an end").expect_err("nobody")
        };
        let failing = patience.why(error);
        let its = path.display().to_string();
        assert!(matches!(&failing, CliError::Failing { n_starts: 3, socket } if *socket == its), "{failing}");
        assert_eq!(failing.exit_code(), TRY_AGAIN);
        starts.abort();
    }

    #[tokio::test]
    async fn nobody_is_waited_for_where_nobody_listens() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = SocketArgs { socket: Some(folder.path().join("none.sock")) };
        let error = Patience::new(None, Format::Json).connect(&socket).await.expect_err("there is none");
        assert!(matches!(error, CliError::Client(Error::NotRunning { .. })), "{error}");
    }
}
