//! Waiting for a daemon that starts, is replaced by another program, or ends while the next one is to come.
//!
//! - Comes in: where a daemon is looked for, or what one has said that takes on nothing more.
//! - Goes out: a connection; meanwhile, to people, how far the daemon is, as it says itself beside its socket.
//! - A daemon is waited for as long as there is a sign of it: it answers, or what it says of its start has changed. A user who may not
//!   read that sees when it was last written.
//! - Must not happen: an end of the wait while a model is being loaded; a wait for a daemon that stands still.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep, timeout};
use trellis_client::{Client, Error, ErrorBody, ErrorCode, Lost, Tried};

use super::connect::{Found, Home, HomeArgs, SocketArgs};
use super::error::CliError;
use super::output::{Format, note, remark};
use super::progress::ProgressDisplay;
use crate::ipc::{Lock, Owner, Phase, owner_of};

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
    /// The last sign, and when it was first seen.
    sign: Option<(Instant, Sign)>,
    is_said: bool,
}

/// What can be seen of a daemon that does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sign {
    /// What it says of itself, where this user may read it.
    said: Option<String>,
    /// When it last did.
    written: Option<SystemTime>,
}

impl Sign {
    fn of(socket: &Path) -> Self {
        let said = owner_of(socket).map(|Owner { phase, .. }| match phase {
            Phase::Starting(Some(progress)) => progress,
            Phase::Starting(None) => "it starts".to_owned(),
            Phase::Ready => "it has much to do, or stands still".to_owned(),
            Phase::Ending => "it comes to its end".to_owned(),
        });
        let written = fs::metadata(Lock::path(socket)).and_then(|metadata| metadata.modified());
        Self { said, written: written.ok() }
    }
}

impl Patience {
    /// Waits for so long without a sign, or as long as is usual.
    pub(crate) fn new(silence_max: Option<Duration>, format: Format) -> Self {
        Self {
            format,
            silence_max: silence_max.unwrap_or(SILENCE_MAX),
            progress: ProgressDisplay::of_long_work(format),
            sign: None,
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
            self.sign = None;
        }
        Ok(connected?)
    }

    /// As [`Self::connect`], where the connection before is lost.
    ///
    /// # Errors
    /// As there; who gives no sign is told as one that does not run.
    pub(crate) async fn connect_again(&mut self, socket: &SocketArgs) -> Result<Client, Error> {
        self.connect(socket).await.map_err(|error| match error {
            CliError::Client(error) => error,
            silent => {
                let tried = socket.candidates().into_iter().map(|path| Tried {
                    path,
                    error: Arc::new(io::Error::new(io::ErrorKind::TimedOut, silent.to_string())),
                });
                Error::NotRunning { tried: tried.collect() }
            }
        })
    }

    /// Waits until there is a daemon that takes on something, after one that does not any more.
    ///
    /// # Errors
    /// None has come in time, of which `last` is said; or it is of no use.
    pub(crate) async fn next(&mut self, args: &HomeArgs, last: Box<ErrorBody>) -> Result<Home, CliError> {
        if !self.is_said {
            self.is_said = true;
            note(self.format, "the daemon is about to go down; waiting for the next one");
        }
        // The one that has said so.
        self.sign = None;
        loop {
            sleep(PAUSE).await;
            match args.find(self).await {
                Ok(Found::There(home)) => match n_guests_left(&home.client).await {
                    Ok(Some(n)) => {
                        self.sign = None;
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
                Err(CliError::Client(error)) if error.is_retryable() || is_away(&error) => {}
                Err(CliError::Silent { .. }) => return Err(CliError::NotBegun(last)),
                Err(error) => return Err(error),
            }
            if self.look(&args.socket.candidates()).is_err() {
                return Err(CliError::NotBegun(last));
            }
        }
    }

    /// Looks how far the daemon is, and says so.
    ///
    /// # Errors
    /// There was no sign for too long.
    fn look(&mut self, sockets: &[PathBuf]) -> Result<(), CliError> {
        let now = Instant::now();
        let socket = sockets.iter().find(|path| path.exists()).or(sockets.first());
        let sign = socket.map_or(Sign { said: None, written: None }, |path| Sign::of(path));
        let (since, sign) = match self.sign.take() {
            Some((since, last)) if last == sign => (since, sign),
            _ => (now, sign),
        };
        let said = sign.said.clone();
        self.sign = Some((since, sign));
        if now.duration_since(since) >= self.silence_max {
            self.progress.finish();
            let socket = socket.map(|path| path.display().to_string()).unwrap_or_default();
            return Err(CliError::Silent { socket, waited: self.silence_max });
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
    use super::*;

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
        // Of a daemon whose notes this user may not read, it sees that one is written.
        let seen = Sign::of(&path);
        assert_eq!(seen.said, None, "nobody has the lock");
        assert!(seen.written.is_some());
    }

    #[tokio::test]
    async fn nobody_is_waited_for_where_nobody_listens() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = SocketArgs { socket: Some(folder.path().join("none.sock")) };
        let error = Patience::new(None, Format::Json).connect(&socket).await.expect_err("there is none");
        assert!(matches!(error, CliError::Client(Error::NotRunning { .. })), "{error}");
    }
}
